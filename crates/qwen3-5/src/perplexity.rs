use rayon::prelude::*;
use serde::Serialize;
use structure_core::{Bound, Refusal};

use crate::Model;

/// How well a model predicts a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Perplexity {
    /// Tokens that were predicted.
    pub tokens: usize,
    /// The mean negative log-likelihood of a token, in nats.
    pub nll: f64,
    /// `e^nll`.
    pub ppl: f64,
}

impl Model {
    /// Predicts every token of a text but the first. Window w reads tokens `window * w` on from a fresh state and predicts
    /// the next token at each; the last window may be shorter.
    ///
    /// Tokens pass `rows` at a time, so that an implementation bound to the seats is measured in its own band; in the host's
    /// own form the result does not depend on it. `progress` is told how many tokens have been predicted.
    ///
    /// # Errors
    /// [`Refusal::EmptyPrompt`] for fewer than two tokens, [`Refusal::DimOutside`] for a window or rows of zero,
    /// [`Refusal::NonFinite`] for logits that are not numbers, and as [`Model::forward`].
    pub fn perplexity(
        &mut self,
        tokens: &[u32],
        window: usize,
        rows: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Perplexity, Refusal> {
        at_least_one("window", window)?;
        at_least_one("rows", rows)?;
        let [read @ .., _] = tokens else { return Err(Refusal::EmptyPrompt) };
        let predicted = &tokens[1..];
        if read.is_empty() {
            return Err(Refusal::EmptyPrompt);
        }
        self.check_tokens(tokens)?;
        let (mut sum, mut done) = (0.0, 0);
        for (read, next) in read.chunks(window).zip(predicted.chunks(window)) {
            let mut state = self.new_state(read.len())?;
            for (read, next) in read.chunks(rows).zip(next.chunks(rows)) {
                let hidden = self.forward(&mut state, read)?;
                let logits = self.logits(&hidden)?;
                let losses: Vec<f64> = logits
                    .par_chunks_exact(self.config().vocab_size)
                    .zip(next)
                    .map(|(logits, &next)| loss(logits, next))
                    .collect();
                if let Some(index) = losses.iter().position(|loss| loss.is_nan()) {
                    let what = "loss of tokens".to_string();
                    return Err(Refusal::NonFinite { what, index: done + index, value: f32::NAN });
                }
                sum += losses.iter().sum::<f64>();
                done += losses.len();
                progress(done);
            }
        }
        let nll = sum / done as f64;
        Ok(Perplexity { tokens: done, nll, ppl: nll.exp() })
    }
}

/// `ln(sum of e^logit) - logit[token]`, in FP64.
fn loss(logits: &[f32], token: u32) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
    max + sum.ln() - logits.get(token as usize).copied().map_or(f64::NAN, f64::from)
}

fn at_least_one(dim: &'static str, value: usize) -> Result<(), Refusal> {
    let bound = Bound { min: 1, max: u64::MAX, multiple_of: 1 };
    if value > 0 {
        return Ok(());
    }
    Err(Refusal::DimOutside { what: "perplexity".to_string(), dim, value: 0, bound })
}
