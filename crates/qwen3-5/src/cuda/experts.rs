//! Sparse experts in their plain form: the router's choice, and each row's products with its own experts' weights.
//!
//! Row m of a result depends on row m alone, so its bits are the same in a call of any number of rows. Widths are multiples of 8.
//! A layer's calls are [`Route`], [`ExpertsGateUp`], [`ExpertsDown`], in this order on one stream; others may lie between.

use device::{Stream, View, ViewMut};
use structure_core::{DType, Refusal};

use super::{check, eights, input, output, within};
use crate::ffi;

/// The most experts that [`Route`] chooses among.
const EXPERTS: usize = 512;
/// The most experts of a row.
const TOP_K: usize = 16;
/// The widest hidden size and expert: no model's.
const WIDTH: usize = 1 << 24;

/// The `top_k` most probable of all experts under the softmax of each row's logits, by falling probability and, where equal, rising
/// id; their weights are the probabilities, scaled to sum 1. A row with a NaN gets experts 0, 1, ... and weights of NaN.
#[derive(Debug)]
pub struct Route<'a> {
    /// F32 `[rows, experts]`.
    pub logits: View<'a>,
    /// I32 `[rows, top_k]`.
    pub ids: ViewMut<'a>,
    /// F32 `[rows, top_k]`.
    pub weights: ViewMut<'a>,
    /// Rows.
    pub rows: usize,
    /// Experts to choose from, at most 512.
    pub experts: usize,
    /// Experts to choose, at most 16.
    pub top_k: usize,
}

impl Route<'_> {
    /// Queues the call.
    ///
    /// # Errors
    /// [`Refusal::DimOutside`] for a dimension out of bounds; [`Refusal::ShapeMismatch`], [`Refusal::DTypeOutside`] or
    /// [`Refusal::WrongDevice`] for views that do not fit; [`Refusal::Cuda`] when the launch fails.
    pub fn queue(&self, stream: &Stream) -> Result<(), Refusal> {
        within("router", "experts", self.experts, 1, EXPERTS)?;
        within("router", "top_k", self.top_k, 1, TOP_K.min(self.experts))?;
        let chosen = self.rows * self.top_k;
        let arguments = ffi::qwen3_5_route_call {
            logits: input("router logits", self.logits, DType::F32, self.rows * self.experts, stream)?,
            ids: output("expert ids", &self.ids, DType::I32, chosen, stream)?,
            weights: output("expert weights", &self.weights, DType::F32, chosen, stream)?,
            rows: self.rows as i64,
            experts: self.experts as i32,
            top_k: self.top_k as i32,
            overlap: stream.overlap().into(),
        };
        stream.device().make_current()?;
        // SAFETY: the views were checked to hold what the call reads and writes; a view's contract holds until the stream's work
        // is done.
        check("qwen3_5_route", unsafe { ffi::qwen3_5_route(&arguments, stream.raw().cast()) })
    }
}

/// The shape of a bank of experts and of a row's choice from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsShape {
    /// Experts of the bank.
    pub experts: usize,
    /// Experts of a row, at most 16.
    pub top_k: usize,
    /// Elements of a row of the residual stream.
    pub hidden: usize,
    /// Features of an expert.
    pub intermediate: usize,
}

impl ExpertsShape {
    fn check(&self) -> Result<(), Refusal> {
        within("experts", "experts", self.experts, 1, i32::MAX as usize)?;
        within("experts", "top_k", self.top_k, 1, TOP_K)?;
        eights("experts", "hidden", self.hidden, WIDTH)?;
        eights("experts", "intermediate", self.intermediate, WIDTH)
    }
}

/// `act[m, s, i] = silu(bank[e, i, :] . x[m, :]) * (bank[e, intermediate + i, :] . x[m, :])` of expert `e = ids[m, s]`; zero where
/// there is no such expert.
#[derive(Debug)]
pub struct ExpertsGateUp<'a> {
    /// BF16 `[rows, hidden]`.
    pub x: View<'a>,
    /// I32 `[rows, top_k]`.
    pub ids: View<'a>,
    /// BF16 `[experts, 2 * intermediate, hidden]`: the gate's features, then those of up.
    pub bank: View<'a>,
    /// BF16 `[rows, top_k, intermediate]`.
    pub act: ViewMut<'a>,
    /// Rows.
    pub rows: usize,
    /// All other dimensions.
    pub shape: ExpertsShape,
}

impl ExpertsGateUp<'_> {
    /// Queues the call.
    ///
    /// # Errors
    /// As [`Route::queue`].
    pub fn queue(&self, stream: &Stream) -> Result<(), Refusal> {
        self.shape.check()?;
        let ExpertsShape { experts, top_k, hidden, intermediate } = self.shape;
        let (chosen, bank) = (self.rows * top_k, experts * 2 * intermediate * hidden);
        let arguments = ffi::qwen3_5_experts_gate_up_call {
            x: input("expert rows", self.x, DType::BF16, self.rows * hidden, stream)?,
            ids: input("expert ids", self.ids, DType::I32, chosen, stream)?,
            bank: input("experts' gate and up", self.bank, DType::BF16, bank, stream)?,
            act: output("expert activations", &self.act, DType::BF16, chosen * intermediate, stream)?,
            rows: self.rows as i64,
            experts: experts as i32,
            top_k: top_k as i32,
            hidden: hidden as i32,
            intermediate: intermediate as i32,
            overlap: stream.overlap().into(),
        };
        stream.device().make_current()?;
        // SAFETY: as in `Route::queue`; the kernel checks the ids against the bank.
        check("qwen3_5_experts_gate_up", unsafe {
            ffi::qwen3_5_experts_gate_up(&arguments, stream.raw().cast())
        })
    }
}

/// `out[m, :] = sum over s of weights[m, s] * bank[e, :, :] . act[m, s, :]`, by rising `e = ids[m, s]`, plus
/// `sigmoid(shared_gate[m]) * shared[m, :]`. A slot without such an expert adds nothing.
///
/// On a stream with [`overlap`](Stream::overlap) it reads ids and weights while the kernel before it still runs: there must be an
/// [`ExpertsGateUp`], or a copy, between it and the [`Route`] that wrote them.
#[derive(Debug)]
pub struct ExpertsDown<'a> {
    /// BF16 `[rows, top_k, intermediate]`.
    pub act: View<'a>,
    /// I32 `[rows, top_k]`.
    pub ids: View<'a>,
    /// F32 `[rows, top_k]`.
    pub weights: View<'a>,
    /// BF16 `[experts, hidden, intermediate]`.
    pub bank: View<'a>,
    /// What the shared expert gave: BF16 `[rows, hidden]`.
    pub shared: View<'a>,
    /// F32 `[rows]`.
    pub shared_gate: View<'a>,
    /// BF16 `[rows, hidden]`.
    pub out: ViewMut<'a>,
    /// Rows.
    pub rows: usize,
    /// All other dimensions.
    pub shape: ExpertsShape,
}

impl ExpertsDown<'_> {
    /// Queues the call.
    ///
    /// # Errors
    /// As [`Route::queue`].
    pub fn queue(&self, stream: &Stream) -> Result<(), Refusal> {
        self.shape.check()?;
        let ExpertsShape { experts, top_k, hidden, intermediate } = self.shape;
        let (chosen, elements) = (self.rows * top_k, self.rows * hidden);
        let bank = experts * hidden * intermediate;
        let arguments = ffi::qwen3_5_experts_down_call {
            act: input("expert activations", self.act, DType::BF16, chosen * intermediate, stream)?,
            ids: input("expert ids", self.ids, DType::I32, chosen, stream)?,
            weights: input("expert weights", self.weights, DType::F32, chosen, stream)?,
            bank: input("experts' down", self.bank, DType::BF16, bank, stream)?,
            shared: input("shared expert", self.shared, DType::BF16, elements, stream)?,
            shared_gate: input("shared expert's gate", self.shared_gate, DType::F32, self.rows, stream)?,
            out: output("experts' sum", &self.out, DType::BF16, elements, stream)?,
            rows: self.rows as i64,
            experts: experts as i32,
            top_k: top_k as i32,
            hidden: hidden as i32,
            intermediate: intermediate as i32,
            overlap: stream.overlap().into(),
        };
        stream.device().make_current()?;
        // SAFETY: as in `ExpertsGateUp::queue`.
        check("qwen3_5_experts_down", unsafe { ffi::qwen3_5_experts_down(&arguments, stream.raw().cast()) })
    }
}
