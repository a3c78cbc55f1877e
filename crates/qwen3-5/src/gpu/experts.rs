//! The sparse feed-forward: routed experts in gather form, and a gated shared expert.

use device::{Buffer, Stream};
use half::bf16;
use linear_proj::{LinearProj, Rows, RowsMut};
use structure_core::Refusal;

use super::ffn::{CudaFfn, FfnScratch};
use super::layer::{CudaNorm, Pass};
use crate::config::SparseFfnConfig;
use crate::cuda::{Bf16Linear, ExpertsDown, ExpertsGateUp, ExpertsShape, Route};
use crate::experts::SparseFfn;
use crate::tensor::Weights;

pub(crate) struct CudaExperts {
    shared: CudaFfn,
    /// `[E, hidden]` and `[1, hidden]`, over FP32 rows: a choice between experts is not rounded.
    router: Bf16Linear,
    shared_gate: Bf16Linear,
    /// `[E, 2 I, hidden]`.
    gate_up: Buffer<bf16>,
    /// `[E, hidden, I]`.
    down: Buffer<bf16>,
    shape: ExpertsShape,
}

/// What a sparse feed-forward works in.
pub(crate) struct ExpertsScratch {
    shared: FfnScratch,
    /// The normed rows once more, in FP32.
    x: Buffer<f32>,
    logits: Buffer<f32>,
    ids: Buffer<i32>,
    weights: Buffer<f32>,
    /// `[rows, top_k, I]`.
    activated: Buffer<bf16>,
    shared_gate: Buffer<f32>,
    shared_out: Buffer<bf16>,
}

impl ExpertsScratch {
    pub fn bytes(rows: usize, hidden: usize, sparse: &SparseFfnConfig) -> u64 {
        let (experts, top_k) = (sparse.num_experts, sparse.num_experts_per_tok);
        let floats = hidden + experts + 2 * top_k + 1;
        let halves = top_k * sparse.moe_intermediate_size + hidden;
        FfnScratch::bytes(rows, sparse.shared_expert_intermediate_size)
            + (rows * (4 * floats + 2 * halves)) as u64
    }

    pub fn new(
        stream: &Stream,
        rows: usize,
        hidden: usize,
        sparse: &SparseFfnConfig,
    ) -> Result<Self, Refusal> {
        let (experts, top_k) = (sparse.num_experts, sparse.num_experts_per_tok);
        Ok(ExpertsScratch {
            shared: FfnScratch::new(stream, rows, sparse.shared_expert_intermediate_size)?,
            x: Buffer::zeros(stream, &[rows, hidden])?,
            logits: Buffer::zeros(stream, &[rows, experts])?,
            ids: Buffer::zeros(stream, &[rows, top_k])?,
            weights: Buffer::zeros(stream, &[rows, top_k])?,
            activated: Buffer::zeros(stream, &[rows, top_k, sparse.moe_intermediate_size])?,
            shared_gate: Buffer::zeros(stream, &[rows, 1])?,
            shared_out: Buffer::zeros(stream, &[rows, hidden])?,
        })
    }
}

impl CudaExperts {
    pub fn upload(stream: &Stream, ffn: &SparseFfn) -> Result<Self, Refusal> {
        let [experts, gate_up, hidden] = ffn.bank().dims;
        let path = &ffn.bank().path;
        let intermediate = gate_up / 2;
        let [router, shared_gate] = ffn.gates();
        let parts = ffn.experts().flat_map(|[gate, up, _]| [gate, up]);
        let gates = bank(stream, [experts, gate_up, hidden], parts)?;
        let down = bank(stream, [experts, hidden, intermediate], ffn.experts().map(|[_, _, down]| down))?;
        Ok(CudaExperts {
            shared: CudaFfn::new(ffn.shared()),
            router: Bf16Linear::new(stream, format!("{path}: router"), router.dense()?)?,
            shared_gate: Bf16Linear::new(stream, format!("{path}: shared gate"), shared_gate.dense()?)?,
            gate_up: gates,
            down,
            shape: ExpertsShape { experts, top_k: ffn.top_k(), hidden, intermediate },
        })
    }

    /// Bytes of weights that one token reads: its experts', and those that choose them.
    pub fn token_bytes(&self) -> usize {
        let ExpertsShape { experts, top_k, hidden, intermediate } = self.shape;
        (top_k * 3 * intermediate + experts + 1) * hidden * size_of::<bf16>()
    }

    /// From the normed rows to `update`. The residual stream is normed again, into FP32 rows, for the router.
    pub fn forward(
        &mut self,
        pass: &mut Pass<'_>,
        norm: &CudaNorm,
        scratch: &mut ExpertsScratch,
    ) -> Result<(), Refusal> {
        let (rows, stream, shape) = (pass.rows, pass.stream, self.shape);
        self.shared.forward_to(pass, &mut scratch.shared, &mut scratch.shared_out)?;
        norm.queue_f32(pass, &mut scratch.x)?;
        gate(&mut self.router, &scratch.x, &mut scratch.logits, rows, stream)?;
        gate(&mut self.shared_gate, &scratch.x, &mut scratch.shared_gate, rows, stream)?;
        let route = Route {
            logits: scratch.logits.view(),
            ids: scratch.ids.view_mut(),
            weights: scratch.weights.view_mut(),
            rows,
            experts: shape.experts,
            top_k: shape.top_k,
        };
        route.queue(stream)?;
        let (x, ids, bank) = (pass.x.view(), scratch.ids.view(), self.gate_up.view());
        ExpertsGateUp { x, ids, bank, act: scratch.activated.view_mut(), rows, shape }.queue(stream)?;
        let down = ExpertsDown {
            act: scratch.activated.view(),
            ids: scratch.ids.view(),
            weights: scratch.weights.view(),
            bank: self.down.view(),
            shared: scratch.shared_out.view(),
            shared_gate: scratch.shared_gate.view(),
            out: pass.update.view_mut(),
            rows,
            shape,
        };
        down.queue(stream)
    }
}

/// A bank from its parts, one after the other. Parts that are the same memory, as random ones are, are decoded once.
fn bank<'a>(
    stream: &Stream,
    shape: [usize; 3],
    parts: impl Iterator<Item = &'a Weights>,
) -> Result<Buffer<bf16>, Refusal> {
    let mut bank = Buffer::zeros(stream, &shape)?;
    let (mut first, mut decoded) = (0, (None, Vec::new()));
    for weights in parts {
        let dense = weights.dense()?;
        if decoded.0 != Some(dense.identity()) {
            decoded = (Some(dense.identity()), dense.to_bf16());
        }
        bank.copy_range_from_host(stream, first, &decoded.1)?;
        first += decoded.1.len();
    }
    Ok(bank)
}

/// Projects FP32 rows to FP32 logits.
fn gate(
    linear: &mut Bf16Linear,
    x: &Buffer<f32>,
    out: &mut Buffer<f32>,
    rows: usize,
    stream: &Stream,
) -> Result<(), Refusal> {
    let (n, k) = (linear.n(), linear.k());
    let x = Rows::device(x.view().first(rows * k)?, stream, rows, k)?;
    linear.project(x, RowsMut::device(out.view_mut().first(rows * n)?, rows, n)?)
}
