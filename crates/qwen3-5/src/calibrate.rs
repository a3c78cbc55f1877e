use std::collections::BTreeMap;

use linear_proj::{Calibration, Host};
use structure_core::{Bound, Refusal};

use crate::Model;
use crate::config::{Config, FfnConfig};

impl Model {
    /// Records what the input channels of every seat reach while it reads a text, and the draft head's seats while it drafts from
    /// it. Each `window` of tokens is a sample, read from a fresh state; the last one may be shorter. `percentile` says which
    /// quantile over the samples is taken, see [`Calibration`]. `progress` is told how many tokens have been read.
    ///
    /// # Errors
    /// [`Refusal::EmptyPrompt`] for no tokens, [`Refusal::DimOutside`] for a window of zero, [`Refusal::ValueOutside`] for a
    /// percentile outside 0..=1, and as [`Model::forward`].
    pub fn calibrate(
        &mut self,
        tokens: &[u32],
        window: usize,
        percentile: f64,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Calibration, Refusal> {
        if window == 0 {
            let bound = Bound { min: 1, max: u64::MAX, multiple_of: 1 };
            return Err(Refusal::DimOutside {
                what: "calibration".to_string(),
                dim: "window",
                value: 0,
                bound,
            });
        }
        Calibration::check_percentile(percentile)?;
        self.check_tokens(tokens)?;
        let mut done = 0;
        let recorded = tokens.chunks(window).try_for_each(|sample| {
            self.record(sample)?;
            done += sample.len();
            progress(done);
            Ok(())
        });
        // Also takes the recorders away, whatever became of the run.
        let dims = self.config().dims();
        let calibration = Calibration::collect(self, dims, window, percentile);
        recorded.and(calibration)
    }

    /// Shows one sample to all seats.
    fn record(&mut self, sample: &[u32]) -> Result<(), Refusal> {
        let paths: Vec<String> = self.seats().iter().map(|seat| seat.path().to_string()).collect();
        for path in paths {
            if let Some(seat) = self.seat_mut(&path) {
                seat.record();
            }
        }
        let mut state = self.new_state(sample.len())?;
        let hidden = self.forward(&mut state, sample)?;
        self.logits(&hidden)?;
        if self.has_draft() && sample.len() > 1 {
            let mut state = self.new_draft_state(sample.len())?;
            let drafted = self.draft(&mut state, &hidden.slice(0..sample.len() - 1), &sample[1..])?;
            self.logits(&drafted)?;
        }
        Ok(())
    }
}

impl Config {
    /// The dims that shapes of weights follow from, by their names in `config.json`.
    pub fn dims(&self) -> BTreeMap<String, usize> {
        let mut dims = vec![
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.layer_types.len()),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("linear_num_key_heads", self.linear_num_key_heads),
            ("linear_num_value_heads", self.linear_num_value_heads),
            ("linear_key_head_dim", self.linear_key_head_dim),
            ("linear_value_head_dim", self.linear_value_head_dim),
        ];
        match &self.ffn {
            FfnConfig::Dense { intermediate_size } => dims.push(("intermediate_size", *intermediate_size)),
            FfnConfig::Sparse(sparse) => dims.extend([
                ("num_experts", sparse.num_experts),
                ("moe_intermediate_size", sparse.moe_intermediate_size),
                ("shared_expert_intermediate_size", sparse.shared_expert_intermediate_size),
            ]),
        }
        dims.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
    }
}
