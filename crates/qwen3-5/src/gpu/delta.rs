//! A gated-delta layer's mixer: projections around one kernel for convolution, delta rule and gated norm.

use device::{Buffer, Stream};
use half::bf16;
use structure_core::Refusal;

use super::layer::Pass;
use crate::Config;
use crate::cuda::{DeltaLayer, DeltaParameters, DeltaRows, DeltaShape, DeltaState};
use crate::gated_delta::GatedDelta;
use crate::seats::SeatId;

pub(crate) struct CudaDelta {
    in_proj_qkv: SeatId,
    in_proj_z: SeatId,
    in_proj_b: SeatId,
    in_proj_a: SeatId,
    out_proj: SeatId,
    layer: DeltaLayer,
}

/// What a gated-delta mixer works in.
pub(crate) struct DeltaScratch {
    /// `[rows, channels]`.
    mixed: Buffer<bf16>,
    /// `[rows, heads, value_dim]`, as `out`.
    z: Buffer<bf16>,
    /// `[rows, heads]`, as `a`.
    b: Buffer<bf16>,
    a: Buffer<bf16>,
    out: Buffer<bf16>,
}

impl DeltaScratch {
    pub fn bytes(shape: &DeltaShape, rows: usize) -> u64 {
        (rows * (shape.channels() + 2 * shape.values() + 2 * shape.heads) * size_of::<bf16>()) as u64
    }

    pub fn new(stream: &Stream, shape: &DeltaShape, rows: usize) -> Result<Self, Refusal> {
        let buffer = |width: usize| Buffer::zeros(stream, &[rows, width]);
        Ok(DeltaScratch {
            mixed: buffer(shape.channels())?,
            z: buffer(shape.values())?,
            b: buffer(shape.heads)?,
            a: buffer(shape.heads)?,
            out: buffer(shape.values())?,
        })
    }
}

/// The gated-delta layers of a model.
pub(crate) fn shape(config: &Config) -> DeltaShape {
    DeltaShape {
        key_heads: config.linear_num_key_heads,
        heads: config.linear_num_value_heads,
        key_dim: config.linear_key_head_dim,
        value_dim: config.linear_value_head_dim,
        taps: config.linear_conv_kernel_dim,
    }
}

impl CudaDelta {
    pub fn upload(stream: &Stream, config: &Config, mixer: &GatedDelta) -> Result<Self, Refusal> {
        let [in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj] = mixer.seats();
        let shape = shape(config);
        let (by_tap, rate, dt_bias, norm) = mixer.parameters();
        // The host keeps the taps apart; the checkpoint, and the kernel's wrapper, the channels.
        let channels = shape.channels();
        let filters: Vec<f32> = (0..channels)
            .flat_map(|channel| by_tap.iter().skip(channel).step_by(channels).copied())
            .collect();
        let parameters =
            DeltaParameters { filters: &filters, rate, dt_bias, scale: norm.scale(), eps: norm.eps() };
        let layer = DeltaLayer::new(stream, &shape, &parameters)?;
        Ok(CudaDelta { in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj, layer })
    }

    /// From the normed rows to `update`.
    pub fn forward(
        &self,
        pass: &mut Pass<'_>,
        state: &mut DeltaState,
        scratch: &mut DeltaScratch,
    ) -> Result<(), Refusal> {
        let rows = pass.rows;
        // Where b and a have a launch of their own, it is the first: the weights of the others are on their way meanwhile.
        let seats = [self.in_proj_b, self.in_proj_a, self.in_proj_qkv, self.in_proj_z];
        let out = [&mut scratch.b, &mut scratch.a, &mut scratch.mixed, &mut scratch.z].map(Buffer::view_mut);
        pass.seats.project_together(seats, pass.x.view(), out, rows)?;
        let call = DeltaRows {
            mixed: scratch.mixed.view(),
            z: scratch.z.view(),
            b: scratch.b.view(),
            a: scratch.a.view(),
            out: scratch.out.view_mut(),
            rows,
            from: None,
            keep: false,
        };
        self.layer.queue(state, &call, pass.stream)?;
        pass.seats.project(self.out_proj, scratch.out.view(), pass.update.view_mut(), rows)
    }
}
