use structure_core::Refusal;

use crate::layer::LayerState;

/// What a model remembers of the tokens it was given: a KV cache per full-attention layer, convolution and delta-rule
/// state per gated-delta layer. All FP32.
///
/// A pass that ends in a refusal leaves the layers at different tokens, so that every later pass on the same state is
/// refused for the same reason.
pub struct State {
    pub(crate) layers: Vec<LayerState>,
    position: usize,
    window: usize,
    failed: Option<Refusal>,
}

impl State {
    pub(crate) fn new(layers: Vec<LayerState>, position: usize, window: usize) -> Self {
        State { layers, position, window, failed: None }
    }

    /// Goes back to before the first token; `fresh` are such layers.
    pub(crate) fn reset(&mut self, fresh: Vec<LayerState>) {
        self.layers.iter_mut().zip(fresh).for_each(|(layer, fresh)| layer.reset(fresh));
        (self.position, self.failed) = (0, None);
    }

    /// The position of the next token.
    pub fn position(&self) -> usize {
        self.position
    }

    /// One past the last position it has room for.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Refuses a state with another number of layers than the model that is to use it.
    pub(crate) fn check_layers(&self, expected: usize) -> Result<(), Refusal> {
        if self.layers.len() == expected {
            return Ok(());
        }
        let what = "layers of a state".to_string();
        Err(Refusal::ShapeMismatch { what, expected: vec![expected], got: vec![self.layers.len()] })
    }

    /// Runs a pass over `rows` tokens, if there is room for them and no pass has failed.
    pub(crate) fn pass<T: Send>(
        &mut self,
        rows: usize,
        pass: impl FnOnce(&mut [LayerState], usize) -> Result<T, Refusal> + Send,
    ) -> Result<T, Refusal> {
        if let Some(refusal) = &self.failed {
            return Err(refusal.clone());
        }
        let needed = self.position.saturating_add(rows);
        if needed > self.window {
            return Err(Refusal::WindowExceeded { needed, window: self.window });
        }
        let (layers, position) = (&mut self.layers, self.position);
        // The whole pass runs on a worker: entering the pool anew for each projection costs more than the small ones do.
        match rayon::scope(|_| pass(layers, position)) {
            Ok(result) => {
                self.position = needed;
                Ok(result)
            }
            Err(refusal) => {
                self.failed = Some(refusal.clone());
                Err(refusal)
            }
        }
    }
}
