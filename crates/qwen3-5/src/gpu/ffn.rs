//! The dense feed-forward: `down(silu(gate(x)) * up(x))`.

use device::{Buffer, Stream};
use half::bf16;
use structure_core::Refusal;

use super::layer::Pass;
use super::seats::CudaSeats;
use crate::cuda::SiluMul;
use crate::ffn::DenseFfn;
use crate::seats::SeatId;

pub(crate) struct CudaFfn {
    gate_proj: SeatId,
    up_proj: SeatId,
    down_proj: SeatId,
}

/// What a feed-forward works in.
pub(crate) struct FfnScratch {
    /// `[rows, intermediate]`, as the two after it.
    gate: Buffer<bf16>,
    up: Buffer<bf16>,
    activated: Buffer<bf16>,
}

impl FfnScratch {
    pub fn bytes(rows: usize, intermediate: usize) -> u64 {
        (3 * rows * intermediate * size_of::<bf16>()) as u64
    }

    pub fn new(stream: &Stream, rows: usize, intermediate: usize) -> Result<Self, Refusal> {
        let buffer = || Buffer::zeros(stream, &[rows, intermediate]);
        Ok(FfnScratch { gate: buffer()?, up: buffer()?, activated: buffer()? })
    }
}

impl CudaFfn {
    pub fn new(ffn: &DenseFfn) -> Self {
        let [gate_proj, up_proj, down_proj] = ffn.seats();
        CudaFfn { gate_proj, up_proj, down_proj }
    }

    /// From the normed rows to `update`.
    pub fn forward(&self, pass: &mut Pass<'_>, scratch: &mut FfnScratch) -> Result<(), Refusal> {
        self.gate_and_up(pass, scratch)?;
        self.down(pass.seats, pass.stream, pass.rows, scratch, pass.update)
    }

    /// From the normed rows to rows elsewhere.
    pub fn forward_to(
        &self,
        pass: &mut Pass<'_>,
        scratch: &mut FfnScratch,
        out: &mut Buffer<bf16>,
    ) -> Result<(), Refusal> {
        self.gate_and_up(pass, scratch)?;
        self.down(pass.seats, pass.stream, pass.rows, scratch, out)
    }

    fn gate_and_up(&self, pass: &mut Pass<'_>, scratch: &mut FfnScratch) -> Result<(), Refusal> {
        let out = [scratch.gate.view_mut(), scratch.up.view_mut()];
        pass.seats.project_together([self.gate_proj, self.up_proj], pass.x.view(), out, pass.rows)
    }

    fn down(
        &self,
        seats: &mut CudaSeats,
        stream: &Stream,
        rows: usize,
        FfnScratch { gate, up, activated }: &mut FfnScratch,
        out: &mut Buffer<bf16>,
    ) -> Result<(), Refusal> {
        if seats.project_gated(self.down_proj, [gate.view(), up.view()], out.view_mut(), rows)? {
            return Ok(());
        }
        let width = gate.shape()[1];
        let call = SiluMul { gate: gate.view(), up: up.view(), out: activated.view_mut(), rows, width };
        call.queue(stream)?;
        seats.project(self.down_proj, activated.view(), out.view_mut(), rows)
    }
}
