use decode_loop::{CpuHost, HostShape, KvChoice, Sequence};
use structure_core::Refusal;

use crate::layer::LayerState;
use crate::{Model, State};

/// A model in host memory, with the one sequence that a [`DecodeLoop`](decode_loop::DecodeLoop) works on.
pub struct CpuModel<'m> {
    model: &'m mut Model,
    state: Option<State>,
}

impl<'m> CpuModel<'m> {
    /// A model before its first sequence.
    pub fn new(model: &'m mut Model) -> Self {
        CpuModel { model, state: None }
    }
}

impl CpuHost for CpuModel<'_> {
    fn shape(&self) -> HostShape {
        let config = self.model.config();
        HostShape { vocab: config.vocab_size, max_positions: config.max_position_embeddings }
    }

    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Refusal> {
        let mut state = self.model.new_state(sequence.window)?;
        if let KvChoice::Store(factory, options) = sequence.kv {
            let shape = self.model.config().kv_shape(sequence.window);
            (factory.check)(&shape, &options)?;
            for (index, kv) in state.layers.iter_mut().filter_map(LayerState::kv_mut).enumerate() {
                *kv = (factory.cpu)(&shape, &options, index)?;
            }
        }
        self.state = Some(state);
        Ok(())
    }

    fn kv_bytes(&self) -> u64 {
        let layers = self.state.iter().flat_map(|state| &state.layers);
        layers.filter_map(LayerState::kv).map(|kv| kv.bytes()).sum()
    }

    fn reset(&mut self) -> Result<(), Refusal> {
        let fresh = self.model.new_layer_states();
        self.state.as_mut().ok_or_else(no_sequence)?.reset(fresh);
        Ok(())
    }

    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Refusal> {
        let state = self.state.as_mut().ok_or_else(no_sequence)?;
        let last = self.model.forward(state, tokens)?.last();
        self.model.logits(&last)
    }
}

fn no_sequence() -> Refusal {
    Refusal::ValueOutside {
        what: "the sequence".to_string(),
        value: "none".to_string(),
        bound: "begun before it is used".to_string(),
    }
}
