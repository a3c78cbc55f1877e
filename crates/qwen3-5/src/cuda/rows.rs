//! Row by row: embedding, norms, rotation, activations.
//!
//! Row m of a result depends on row m alone, so its bits are the same in a call of any number of rows. Widths are multiples of 8.

use std::ffi::c_void;

use device::{Stream, View, ViewMut};
use structure_core::{DType, Refusal};

use super::{check, eights, input, output, within};
use crate::ffi;

/// The widest row of any other call: no model's.
const WIDTH: usize = 1 << 30;
/// The widest row that [`Norm`] and [`AddNorm`] take.
const NORM_WIDTH: usize = 24_576;
/// The widest head that [`QkNormRope`] takes.
const HEAD_DIM: usize = 512;

/// `out[m, :] = table[tokens[m], :]`; NaN where a token is outside the vocabulary.
#[derive(Debug)]
pub struct Embed<'a> {
    /// BF16 `[vocab, hidden]`.
    pub table: View<'a>,
    /// I32 `[rows]`.
    pub tokens: View<'a>,
    /// BF16 `[rows, hidden]`.
    pub out: ViewMut<'a>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub hidden: usize,
}

impl Embed<'_> {
    /// Queues the call.
    ///
    /// # Errors
    /// [`Refusal::DimOutside`] for a width that is no multiple of 8; [`Refusal::ShapeMismatch`], [`Refusal::DTypeOutside`] or
    /// [`Refusal::WrongDevice`] for views that do not fit; [`Refusal::Cuda`] when the launch fails.
    pub fn queue(&self, stream: &Stream) -> Result<(), Refusal> {
        eights("embedding", "hidden", self.hidden, WIDTH)?;
        let elements = self.rows * self.hidden;
        let arguments = ffi::qwen3_5_embed_call {
            table: input("embedding", self.table, DType::BF16, self.hidden, stream)?,
            tokens: input("tokens", self.tokens, DType::I32, self.rows, stream)?,
            out: output("embedded rows", &self.out, DType::BF16, elements, stream)?,
            rows: self.rows as i64,
            vocab: (self.table.len() / self.hidden) as i64,
            hidden: self.hidden as i64,
            overlap: stream.overlap().into(),
        };
        stream.device().make_current()?;
        // SAFETY: the views were checked to hold what the call reads and writes; a view's contract holds until the stream's work
        // is done.
        check("qwen3_5_embed", unsafe { ffi::qwen3_5_embed(&arguments, stream.raw().cast()) })
    }
}

/// `out[m, :] = x[m, :] / sqrt(mean(x[m, :]^2) + eps) * scale`.
#[derive(Debug)]
pub struct Norm<'a> {
    /// BF16 `[rows, hidden]`.
    pub x: View<'a>,
    /// F32 `[hidden]`.
    pub scale: View<'a>,
    /// What is added to the mean of squares.
    pub eps: f32,
    /// BF16 or F32 `[rows, hidden]`.
    pub out: ViewMut<'a>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row, at most 24,576.
    pub hidden: usize,
}

impl Norm<'_> {
    /// Queues the call.
    ///
    /// # Errors
    /// As [`Embed::queue`].
    pub fn queue(&self, stream: &Stream) -> Result<(), Refusal> {
        eights("norm", "hidden", self.hidden, NORM_WIDTH)?;
        let elements = self.rows * self.hidden;
        let x: *const c_void = input("residual stream", self.x, DType::BF16, elements, stream)?;
        // The launcher writes through the pointer with an update only.
        let dims = [self.rows, self.hidden];
        queue_norm(x.cast_mut(), std::ptr::null(), self.scale, self.eps, &self.out, dims, stream)
    }
}

/// `x[m, :] += update[m, :]`, rounded once, then [`Norm`] of the new `x`.
#[derive(Debug)]
pub struct AddNorm<'a> {
    /// BF16 `[rows, hidden]`, read and written.
    pub x: ViewMut<'a>,
    /// BF16 `[rows, hidden]`.
    pub update: View<'a>,
    /// F32 `[hidden]`.
    pub scale: View<'a>,
    /// What is added to the mean of squares.
    pub eps: f32,
    /// BF16 or F32 `[rows, hidden]`.
    pub out: ViewMut<'a>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row, at most 24,576.
    pub hidden: usize,
}

impl AddNorm<'_> {
    /// Queues the call.
    ///
    /// # Errors
    /// As [`Embed::queue`].
    pub fn queue(&self, stream: &Stream) -> Result<(), Refusal> {
        eights("norm", "hidden", self.hidden, NORM_WIDTH)?;
        let elements = self.rows * self.hidden;
        let x = output("residual stream", &self.x, DType::BF16, elements, stream)?;
        let update = input("residual update", self.update, DType::BF16, elements, stream)?;
        let dims = [self.rows, self.hidden];
        queue_norm(x, update, self.scale, self.eps, &self.out, dims, stream)
    }
}

fn queue_norm(
    x: *mut c_void,
    update: *const c_void,
    scale: View<'_>,
    eps: f32,
    out: &ViewMut<'_>,
    [rows, hidden]: [usize; 2],
    stream: &Stream,
) -> Result<(), Refusal> {
    let out_f32 = out.dtype() == DType::F32;
    let dtype = if out_f32 { DType::F32 } else { DType::BF16 };
    let arguments = ffi::qwen3_5_norm_call {
        x,
        update,
        scale: input("norm scale", scale, DType::F32, hidden, stream)?,
        out: output("normalised rows", out, dtype, rows * hidden, stream)?,
        rows: rows as i64,
        hidden: hidden as i64,
        eps,
        out_f32: out_f32.into(),
        overlap: stream.overlap().into(),
    };
    stream.device().make_current()?;
    // SAFETY: as in `Embed::queue`; both callers checked `x`, and the update where there is one.
    check("qwen3_5_norm", unsafe { ffi::qwen3_5_norm(&arguments, stream.raw().cast()) })
}

/// `out[m, i] = silu(gate[m, i]) * up[m, i]`.
#[derive(Debug)]
pub struct SiluMul<'a> {
    /// BF16 `[rows, width]`.
    pub gate: View<'a>,
    /// BF16 `[rows, width]`.
    pub up: View<'a>,
    /// BF16 `[rows, width]`.
    pub out: ViewMut<'a>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

impl SiluMul<'_> {
    /// Queues the call.
    ///
    /// # Errors
    /// As [`Embed::queue`].
    pub fn queue(&self, stream: &Stream) -> Result<(), Refusal> {
        eights("gated activation", "width", self.width, WIDTH)?;
        let elements = self.rows * self.width;
        let arguments = ffi::qwen3_5_silu_mul_call {
            gate: input("gate", self.gate, DType::BF16, elements, stream)?,
            up: input("up", self.up, DType::BF16, elements, stream)?,
            out: output("gated activation", &self.out, DType::BF16, elements, stream)?,
            rows: self.rows as i64,
            width: self.width as i64,
            overlap: stream.overlap().into(),
        };
        stream.device().make_current()?;
        // SAFETY: as in `Embed::queue`.
        check("qwen3_5_silu_mul", unsafe { ffi::qwen3_5_silu_mul(&arguments, stream.raw().cast()) })
    }
}

/// `out[m, h, d] = values[m, h, d] * sigmoid(q_and_gate[m, h, head_dim + d])`: each head's query lies beside its gate.
#[derive(Debug)]
pub struct OutputGate<'a> {
    /// What attention gave: BF16 `[rows, heads, head_dim]`.
    pub values: View<'a>,
    /// BF16 `[rows, heads, 2 * head_dim]`.
    pub q_and_gate: View<'a>,
    /// BF16 `[rows, heads, head_dim]`.
    pub out: ViewMut<'a>,
    /// Rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl OutputGate<'_> {
    /// Queues the call.
    ///
    /// # Errors
    /// As [`Embed::queue`].
    pub fn queue(&self, stream: &Stream) -> Result<(), Refusal> {
        eights("output gate", "head_dim", self.head_dim, WIDTH)?;
        let elements = self.rows * self.heads * self.head_dim;
        let arguments = ffi::qwen3_5_output_gate_call {
            values: input("attention values", self.values, DType::BF16, elements, stream)?,
            q_and_gate: input("queries and gates", self.q_and_gate, DType::BF16, 2 * elements, stream)?,
            out: output("gated values", &self.out, DType::BF16, elements, stream)?,
            rows: self.rows as i64,
            heads: self.heads as i32,
            head_dim: self.head_dim as i32,
            overlap: stream.overlap().into(),
        };
        stream.device().make_current()?;
        // SAFETY: as in `Embed::queue`.
        check("qwen3_5_output_gate", unsafe { ffi::qwen3_5_output_gate(&arguments, stream.raw().cast()) })
    }
}

/// Normalises each query and key head as [`Norm`] does a row, then rotates it: elements `i` and `pairs + i`, for `i < pairs`, are one
/// point of a plane, turned by `frequencies[i] * (position[0] + m)` radians.
#[derive(Debug)]
pub struct QkNormRope<'a> {
    /// BF16 `[rows, heads, 2 * head_dim]`; the first half of each head is read.
    pub q_and_gate: View<'a>,
    /// BF16 `[rows, kv_heads, head_dim]`.
    pub k: View<'a>,
    /// F32 `[head_dim]`.
    pub q_scale: View<'a>,
    /// F32 `[head_dim]`.
    pub k_scale: View<'a>,
    /// F32 `[pairs]`: radians a position.
    pub frequencies: View<'a>,
    /// I32 `[1]`: the position of row 0.
    pub position: View<'a>,
    /// BF16 `[rows, heads, head_dim]`.
    pub q_out: ViewMut<'a>,
    /// BF16 `[rows, kv_heads, head_dim]`.
    pub k_out: ViewMut<'a>,
    /// Rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Elements of a head, at most 512.
    pub head_dim: usize,
    /// Pairs of elements that are rotated, the first `2 * pairs` of a head.
    pub pairs: usize,
    /// What is added to the mean of squares.
    pub eps: f32,
}

impl QkNormRope<'_> {
    /// Queues the call.
    ///
    /// # Errors
    /// As [`Embed::queue`]; [`Refusal::DimOutside`] for more pairs than a head has, too.
    pub fn queue(&self, stream: &Stream) -> Result<(), Refusal> {
        const WHAT: &str = "query and key norms";
        eights(WHAT, "head_dim", self.head_dim, HEAD_DIM)?;
        within(WHAT, "pairs", self.pairs, 0, self.head_dim / 2)?;
        let (queries, keys) =
            (self.rows * self.heads * self.head_dim, self.rows * self.kv_heads * self.head_dim);
        let arguments = ffi::qwen3_5_qk_norm_rope_call {
            q_and_gate: input("queries and gates", self.q_and_gate, DType::BF16, 2 * queries, stream)?,
            k: input("keys", self.k, DType::BF16, keys, stream)?,
            q_scale: input("query norm scale", self.q_scale, DType::F32, self.head_dim, stream)?,
            k_scale: input("key norm scale", self.k_scale, DType::F32, self.head_dim, stream)?,
            frequencies: input("rotary frequencies", self.frequencies, DType::F32, self.pairs, stream)?,
            position: input("position", self.position, DType::I32, 1, stream)?,
            q_out: output("rotated queries", &self.q_out, DType::BF16, queries, stream)?,
            k_out: output("rotated keys", &self.k_out, DType::BF16, keys, stream)?,
            rows: self.rows as i64,
            heads: self.heads as i32,
            kv_heads: self.kv_heads as i32,
            head_dim: self.head_dim as i32,
            pairs: self.pairs as i32,
            eps: self.eps,
            overlap: stream.overlap().into(),
        };
        stream.device().make_current()?;
        // SAFETY: as in `Embed::queue`.
        check("qwen3_5_qk_norm_rope", unsafe { ffi::qwen3_5_qk_norm_rope(&arguments, stream.raw().cast()) })
    }
}
