//! The sparse feed-forward: routed experts in their plain form, and a gated shared expert.

use linear_proj::DenseWeights;
use rayon::prelude::*;
use structure_core::Refusal;

use crate::config::SparseFfnConfig;
use crate::dense::{project, project_serial};
use crate::ffn::{DenseFfn, activate};
use crate::loader::Loader;
use crate::math::sigmoid;
use crate::router::route;
use crate::seats::Seats;
use crate::tensor::Weights;

/// A bank of routed experts, as a checkpoint names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bank {
    /// Its path, such as `model.layers.0.mlp.experts`.
    pub path: String,
    /// `[E, 2I, H]`: experts, gate and up features together, hidden size.
    pub dims: [usize; 3],
}

pub(crate) struct SparseFfn {
    bank: Bank,
    top_k: usize,
    router: Weights,
    experts: Vec<Expert>,
    shared: DenseFfn,
    shared_gate: Weights,
}

struct Expert {
    gate: Weights,
    up: Weights,
    down: Weights,
}

impl SparseFfn {
    pub fn load(loader: &mut Loader<'_>, path: &str, sparse: &SparseFfnConfig) -> Result<Self, Refusal> {
        let hidden = loader.config.hidden_size;
        let bank = Bank {
            path: format!("{path}.experts"),
            dims: [sparse.num_experts, 2 * sparse.moe_intermediate_size, hidden],
        };
        let shared = sparse.shared_expert_intermediate_size;
        Ok(SparseFfn {
            top_k: sparse.num_experts_per_tok,
            router: loader.weights(&format!("{path}.gate"), sparse.num_experts, hidden)?,
            experts: load_experts(loader, &bank)?,
            shared: DenseFfn::load(loader, &format!("{path}.shared_expert"), shared)?,
            shared_gate: loader.weights(&format!("{path}.shared_expert_gate"), 1, hidden)?,
            bank,
        })
    }

    pub fn bank(&self) -> &Bank {
        &self.bank
    }

    /// Which experts serve a row, and how much of the shared one: weights `[E, hidden]` and `[1, hidden]`.
    #[cfg(kernels_built)]
    pub fn gates(&self) -> [&Weights; 2] {
        [&self.router, &self.shared_gate]
    }

    /// Experts that serve a row.
    #[cfg(kernels_built)]
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Gate, up and down of each expert.
    #[cfg(kernels_built)]
    pub fn experts(&self) -> impl Iterator<Item = [&Weights; 3]> {
        self.experts.iter().map(|expert| [&expert.gate, &expert.up, &expert.down])
    }

    /// The expert that serves every row.
    #[cfg(kernels_built)]
    pub fn shared(&self) -> &DenseFfn {
        &self.shared
    }

    /// `x` and the result are `[rows, hidden]`.
    pub fn forward(&self, seats: &mut Seats, x: &[f32], rows: usize) -> Result<Vec<f32>, Refusal> {
        let mut out = self.shared.forward(seats, x, rows)?;
        let mut gates = vec![0.0; rows];
        project(&self.shared_gate.dense()?, x, &mut gates);
        let hidden = x.len() / rows;
        for (out, gate) in out.chunks_exact_mut(hidden).zip(gates) {
            let gate = sigmoid(gate);
            out.iter_mut().for_each(|out| *out *= gate);
        }
        let routed = self.routed(x, rows)?;
        out.iter_mut().zip(routed).for_each(|(out, routed)| *out += routed);
        Ok(out)
    }

    /// The weighted sum of each row's experts, in the order of their ids. An expert is run once, on all rows that chose it.
    fn routed(&self, x: &[f32], rows: usize) -> Result<Vec<f32>, Refusal> {
        let (experts, hidden) = (self.experts.len(), x.len() / rows);
        let mut logits = vec![0.0; rows * experts];
        project(&self.router.dense()?, x, &mut logits);
        let mut chosen_by = vec![Vec::new(); experts];
        for (row, logits) in logits.chunks_exact(experts).enumerate() {
            for (expert, weight) in route(logits.to_vec(), self.top_k) {
                chosen_by[expert].push((row, weight));
            }
        }
        let results: Vec<Vec<f32>> = self
            .experts
            .par_iter()
            .zip(&chosen_by)
            .map(|(expert, chosen_by)| {
                let x: Vec<f32> = chosen_by
                    .iter()
                    .flat_map(|(row, _)| &x[row * hidden..(row + 1) * hidden])
                    .copied()
                    .collect();
                expert.forward(&x, chosen_by.len())
            })
            .collect::<Result<_, _>>()?;
        let mut out = vec![0.0; x.len()];
        for (results, chosen_by) in results.iter().zip(&chosen_by) {
            for (result, (row, weight)) in results.chunks_exact(hidden).zip(chosen_by) {
                let out = &mut out[row * hidden..(row + 1) * hidden];
                out.iter_mut().zip(result).for_each(|(out, result)| *out += weight * result);
            }
        }
        Ok(out)
    }
}

impl Expert {
    fn forward(&self, x: &[f32], rows: usize) -> Result<Vec<f32>, Refusal> {
        let run = |weights: DenseWeights<'_>, x: &[f32]| {
            let mut y = vec![0.0; rows * weights.n()];
            project_serial(&weights, x, &mut y);
            y
        };
        if rows == 0 {
            return Ok(Vec::new());
        }
        let mut gate = run(self.gate.dense()?, x);
        activate(&mut gate, &run(self.up.dense()?, x));
        Ok(run(self.down.dense()?, &gate))
    }
}

/// Experts one by one, or fused into two tensors.
fn load_experts(loader: &mut Loader<'_>, bank: &Bank) -> Result<Vec<Expert>, Refusal> {
    let Bank { path, dims: [experts, gate_up, hidden] } = bank;
    let intermediate = gate_up / 2;
    if !loader.checkpoint.contains(&format!("{path}.gate_up_proj")) {
        return (0..*experts)
            .map(|expert| {
                Ok(Expert {
                    gate: loader.weights(&format!("{path}.{expert}.gate_proj"), intermediate, *hidden)?,
                    up: loader.weights(&format!("{path}.{expert}.up_proj"), intermediate, *hidden)?,
                    down: loader.weights(&format!("{path}.{expert}.down_proj"), *hidden, intermediate)?,
                })
            })
            .collect();
    }
    let gate_and_up = loader.checkpoint.weights(&format!("{path}.gate_up_proj"), &bank.dims)?;
    let down = loader.checkpoint.weights(&format!("{path}.down_proj"), &[*experts, *hidden, intermediate])?;
    (0..*experts)
        .map(|expert| {
            let first = expert * gate_up;
            Ok(Expert {
                gate: gate_and_up.features(first..first + intermediate)?,
                up: gate_and_up.features(first + intermediate..first + gate_up)?,
                down: down.features(expert * hidden..(expert + 1) * hidden)?,
            })
        })
        .collect()
}
