//! The mixer of a gated-delta layer between its projections: causal convolution, gates, delta rule, gated norm.

use std::ptr;

use device::{Buffer, Stream, View, ViewMut};
use half::bf16;
use structure_core::{Bound, DType, Refusal};

use super::{check, input, output};
use crate::ffi;

/// Dimensions of a gated-delta layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys, each of which serves a run of value heads.
    pub key_heads: usize,
    /// Value heads: a multiple of the key heads, up to `8 / ceil(value_dim / 64)` times as many: 4 of 128 elements. At least
    /// twice as many where a value has up to 64 elements.
    pub heads: usize,
    /// Elements of a query or key: a multiple of 16 up to 256.
    pub key_dim: usize,
    /// Elements of a value: a multiple of 16 up to 256.
    pub value_dim: usize,
    /// Rows that a filter of the convolution spans: 2 to 8.
    pub taps: usize,
}

impl DeltaShape {
    /// Channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.values()
    }

    /// Elements of the values of a row, as of its z and its result.
    pub fn values(&self) -> usize {
        self.heads * self.value_dim
    }

    /// Bytes of a state with so many slots.
    pub fn state_bytes(&self, slots: usize) -> usize {
        slots * (self.conv_len() * size_of::<bf16>() + self.values() * self.key_dim * size_of::<f32>())
    }

    /// Elements of a slot's rows before the convolution.
    fn conv_len(&self) -> usize {
        (self.taps - 1) * self.channels()
    }

    fn check(&self) -> Result<(), Refusal> {
        let dim = |dim, value: usize, min, max, multiple_of| {
            let (value, bound) = (value as u64, Bound { min, max, multiple_of });
            let what = "gated delta".to_string();
            if bound.takes(value) { Ok(()) } else { Err(Refusal::DimOutside { what, dim, value, bound }) }
        };
        dim("key_heads", self.key_heads, 1, 1 << 15, 1)?;
        dim("key_dim", self.key_dim, 16, 256, 16)?;
        dim("value_dim", self.value_dim, 16, 256, 16)?;
        dim("taps", self.taps, 2, 8, 1)?;
        // A cluster has two to eight blocks of 64 elements.
        let (key_heads, slices) = (self.key_heads as u64, self.value_dim.div_ceil(64) as u64);
        dim("heads", self.heads, key_heads * 2u64.div_ceil(slices), key_heads * (8 / slices), key_heads)
    }
}

/// Parameters of a gated-delta layer as the checkpoint has them, in FP32.
#[derive(Clone, Copy, Debug)]
pub struct DeltaParameters<'a> {
    /// `[channels, taps]`: the filters of the convolution; the last tap meets the current row.
    pub filters: &'a [f32],
    /// `[heads]`: `-e^A_log`.
    pub rate: &'a [f32],
    /// `[heads]`: added to `a`.
    pub dt_bias: &'a [f32],
    /// `[value_dim]`: the scale of the gated norm.
    pub scale: &'a [f32],
    /// Added to the norm's mean square.
    pub eps: f32,
}

/// A gated-delta layer's own parameters in device memory.
#[derive(Debug)]
pub struct DeltaLayer {
    shape: DeltaShape,
    /// `[taps, channels]`.
    filters: Buffer<f32>,
    rate: Buffer<f32>,
    dt_bias: Buffer<f32>,
    scale: Buffer<f32>,
    eps: f32,
}

/// What a gated-delta layer remembers of the rows before, in `slots`: slot 0 for the sequence, and one for each row of a call
/// that keeps them all. Zeros before the first row.
#[derive(Debug)]
pub struct DeltaState {
    shape: DeltaShape,
    slots: usize,
    conv: Buffer<bf16>,
    delta: Buffer<f32>,
}

/// One call: rows of one sequence that follow those in the state.
#[derive(Debug)]
pub struct DeltaRows<'a> {
    /// BF16 `[rows, channels]`: queries, keys and values before the convolution.
    pub mixed: View<'a>,
    /// BF16 `[rows, heads, value_dim]`.
    pub z: View<'a>,
    /// BF16 `[rows, heads]`.
    pub b: View<'a>,
    /// BF16 `[rows, heads]`.
    pub a: View<'a>,
    /// BF16 `[rows, heads, value_dim]`.
    pub out: ViewMut<'a>,
    /// Rows, any number from 1 on.
    pub rows: usize,
    /// I32 `[1]`: the slot that the call starts from, such as the last accepted row of a verified draft; slot 0 where there is
    /// none. A slot that does not exist gives NaN.
    pub from: Option<View<'a>>,
    /// Whether slot t gets the state after row t, for each of up to 16 rows; else slot 0 gets the one after the last row.
    pub keep: bool,
}

impl DeltaLayer {
    /// Copies the parameters to the stream's device, and loads the kernels, so that no later call does.
    ///
    /// # Errors
    /// [`Refusal::DimOutside`] or [`Refusal::ShapeMismatch`] for parameters that do not fit, [`Refusal::OutOfMemory`] or
    /// [`Refusal::Cuda`].
    pub fn new(
        stream: &Stream,
        shape: &DeltaShape,
        parameters: &DeltaParameters<'_>,
    ) -> Result<Self, Refusal> {
        shape.check()?;
        stream.device().make_current()?;
        // SAFETY: the device's context is current.
        check("qwen3_5_gated_delta_prepare", unsafe { ffi::qwen3_5_gated_delta_prepare() })?;
        let (channels, taps) = (shape.channels(), shape.taps);
        let upload = |what: &str, elements: &[f32], len: usize| {
            if elements.len() == len {
                return Buffer::from_host(stream, elements, &[len]);
            }
            let what = format!("{what} of a gated-delta layer");
            Err(Refusal::ShapeMismatch { what, expected: vec![len], got: vec![elements.len()] })
        };
        let filters = parameters.filters;
        let transposed: Vec<f32> =
            (0..taps).flat_map(|tap| filters.iter().skip(tap).step_by(taps).copied()).collect();
        Ok(DeltaLayer {
            shape: *shape,
            filters: upload("filters", &transposed, taps * channels)?,
            rate: upload("rate", parameters.rate, shape.heads)?,
            dt_bias: upload("dt_bias", parameters.dt_bias, shape.heads)?,
            scale: upload("norm scale", parameters.scale, shape.value_dim)?,
            eps: parameters.eps,
        })
    }

    /// Its dimensions.
    pub fn shape(&self) -> DeltaShape {
        self.shape
    }

    /// Queues a call, which takes its rows in order and leaves the state after them. The same launch serves any number of rows,
    /// and the bits of a row do not depend on how rows are cut into calls.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`], [`Refusal::DTypeOutside`] or [`Refusal::WrongDevice`] for views that do not fit,
    /// [`Refusal::DimOutside`] for no rows or more than states can be kept of, and [`Refusal::Cuda`] when the launch fails.
    pub fn queue(
        &self,
        state: &mut DeltaState,
        call: &DeltaRows<'_>,
        stream: &Stream,
    ) -> Result<(), Refusal> {
        let (shape, rows) = (self.shape, call.rows);
        state.check(&shape, call)?;
        let (conv, delta) = (state.conv.view_mut(), state.delta.view_mut());
        let values = rows * shape.values();
        let arguments = ffi::qwen3_5_gated_delta_call {
            mixed: input("mixed rows", call.mixed, DType::BF16, rows * shape.channels(), stream)?,
            z: input("z", call.z, DType::BF16, values, stream)?,
            b: input("b", call.b, DType::BF16, rows * shape.heads, stream)?,
            a: input("a", call.a, DType::BF16, rows * shape.heads, stream)?,
            filters: input(
                "filters",
                self.filters.view(),
                DType::F32,
                shape.taps * shape.channels(),
                stream,
            )?,
            rate: input("rate", self.rate.view(), DType::F32, shape.heads, stream)?,
            dt_bias: input("dt_bias", self.dt_bias.view(), DType::F32, shape.heads, stream)?,
            scale: input("norm scale", self.scale.view(), DType::F32, shape.value_dim, stream)?,
            out: output("mixed values", &call.out, DType::BF16, values, stream)?,
            conv_state: output("convolution state", &conv, DType::BF16, conv.len(), stream)?,
            delta_state: output("delta state", &delta, DType::F32, delta.len(), stream)?,
            from: match call.from {
                Some(from) => input("slot", from, DType::I32, 1, stream)?,
                None => ptr::null(),
            },
            rows: rows as i64,
            slots: state.slots as i64,
            key_heads: shape.key_heads as i32,
            heads: shape.heads as i32,
            key_dim: shape.key_dim as i32,
            value_dim: shape.value_dim as i32,
            taps: shape.taps as i32,
            eps: self.eps,
            keep: call.keep.into(),
            overlap: stream.overlap().into(),
        };
        stream.device().make_current()?;
        // SAFETY: the views were checked to hold what the call reads and writes; a view's contract holds until the stream's work
        // is done.
        check("qwen3_5_gated_delta", unsafe { ffi::qwen3_5_gated_delta(&arguments, stream.raw().cast()) })
    }
}

impl DeltaState {
    /// The state before the first row.
    ///
    /// # Errors
    /// [`Refusal::DimOutside`] for a shape that is not served or no slots, [`Refusal::OutOfMemory`] or [`Refusal::Cuda`].
    pub fn new(stream: &Stream, shape: &DeltaShape, slots: usize) -> Result<Self, Refusal> {
        shape.check()?;
        if slots == 0 {
            let (what, bound) =
                ("gated-delta state".to_string(), Bound { min: 1, max: 1 << 20, multiple_of: 1 });
            return Err(Refusal::DimOutside { what, dim: "slots", value: 0, bound });
        }
        Ok(DeltaState {
            shape: *shape,
            slots,
            conv: Buffer::zeros(stream, &[slots, shape.taps - 1, shape.channels()])?,
            delta: Buffer::zeros(stream, &[slots, shape.heads, shape.value_dim, shape.key_dim])?,
        })
    }

    /// Forgets all rows, in the order of the stream.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver refuses.
    pub fn reset(&mut self, stream: &Stream) -> Result<(), Refusal> {
        self.conv.fill_bytes(stream, 0)?;
        self.delta.fill_bytes(stream, 0)
    }

    /// Bytes of one slot.
    pub fn bytes(&self) -> usize {
        self.shape.state_bytes(1)
    }

    /// How many states it has room for.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// BF16 `[slots, taps - 1, channels]`: the rows before the next one, before the convolution, oldest first.
    pub fn conv(&self) -> &Buffer<bf16> {
        &self.conv
    }

    /// FP32 `[slots, heads, value_dim, key_dim]`: the matrix of each head, transposed.
    pub fn delta(&self) -> &Buffer<f32> {
        &self.delta
    }

    /// Whether it is a state of this shape, with room for what a call writes.
    fn check(&self, shape: &DeltaShape, call: &DeltaRows<'_>) -> Result<(), Refusal> {
        if self.shape != *shape {
            let dims = |s: &DeltaShape| vec![s.key_heads, s.heads, s.key_dim, s.value_dim, s.taps];
            let what = "gated-delta state".to_string();
            return Err(Refusal::ShapeMismatch { what, expected: dims(shape), got: dims(&self.shape) });
        }
        let kept = self.slots.min(ffi::QWEN3_5_DELTA_KEPT_ROWS as usize) as u64;
        let bound = Bound { min: 1, max: if call.keep { kept } else { i64::MAX as u64 }, multiple_of: 1 };
        let (what, value) = ("gated delta".to_string(), call.rows as u64);
        if bound.takes(value) { Ok(()) } else { Err(Refusal::DimOutside { what, dim: "rows", value, bound }) }
    }
}
