//! The multi-token-prediction layer, which drafts the token after next.

use structure_core::Refusal;

use crate::config::LayerType;
use crate::layer::{Layer, LayerState};
use crate::loader::Loader;
use crate::norm::RmsNorm;
use crate::seats::{SeatId, Seats};

/// `norm(layer(fc([norm(embedding), norm(hidden)])))`; the embedding and the `lm_head` are the main model's.
pub(crate) struct Mtp {
    embedding_norm: RmsNorm,
    hidden_norm: RmsNorm,
    fc: SeatId,
    layer: Layer,
    norm: RmsNorm,
}

impl Mtp {
    /// What the names of its tensors start with.
    pub const PREFIX: &str = "mtp.";

    pub fn load(loader: &mut Loader<'_>) -> Result<Self, Refusal> {
        let hidden = loader.config.hidden_size;
        Ok(Mtp {
            embedding_norm: RmsNorm::load(loader, "mtp.pre_fc_norm_embedding", hidden)?,
            hidden_norm: RmsNorm::load(loader, "mtp.pre_fc_norm_hidden", hidden)?,
            fc: loader.seat("mtp.fc", hidden, 2 * hidden)?,
            layer: Layer::load(loader, "mtp.layers.0", LayerType::FullAttention)?,
            norm: RmsNorm::load(loader, "mtp.norm", hidden)?,
        })
    }

    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    pub fn layer_mut(&mut self) -> &mut Layer {
        &mut self.layer
    }

    /// `hidden` are normed rows of the main model or of an earlier draft, `embeddings` those of the tokens that follow
    /// them, `[rows, hidden_size]` both; so is the result, from which the `lm_head` reads the drafted tokens.
    pub fn forward(
        &self,
        seats: &mut Seats,
        state: &mut LayerState,
        hidden: &[f32],
        embeddings: &[f32],
        rows: usize,
        position: usize,
    ) -> Result<Vec<f32>, Refusal> {
        let (embeddings, hidden) = (self.embedding_norm.apply(embeddings), self.hidden_norm.apply(hidden));
        let width = hidden.len() / rows;
        let pairs = embeddings.chunks_exact(width).zip(hidden.chunks_exact(width));
        let x: Vec<f32> =
            pairs.flat_map(|(embedding, hidden)| embedding.iter().chain(hidden)).copied().collect();
        let mut x = seats.project(self.fc, &x, rows)?;
        self.layer.forward(seats, state, &mut x, rows, position)?;
        Ok(self.norm.apply(&x))
    }
}
