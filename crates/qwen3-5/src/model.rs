use std::fmt;
use std::path::Path;

use linear_proj::{DenseWeights, Host, Seat};
use structure_core::Refusal;

use crate::checkpoint::Checkpoint;
use crate::experts::Bank;
use crate::layer::{Layer, LayerState};
use crate::loader::{Loader, Source};
use crate::mtp::Mtp;
use crate::norm::RmsNorm;
use crate::random::RandomTensors;
use crate::rope::Rope;
use crate::seats::{SeatId, Seats};
use crate::state::State;
use crate::tensor::Weights;
use crate::{Config, Hidden};

/// What the names of the decoder's tensors start with; the longer where the checkpoint has a vision tower too.
const PREFIXES: [&str; 2] = ["model.language_model.", "model."];

/// A model in host memory, over mapped weights.
///
/// Its seats are the projections, by their paths in the checkpoint; see [`Host`]. Whatever is bound to them, the model
/// hands them FP32 rows and takes FP32 rows back.
pub struct Model {
    config: Config,
    embedding: Weights,
    pub(crate) layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: SeatId,
    pub(crate) mtp: Option<Mtp>,
    pub(crate) seats: Seats,
}

impl Model {
    /// Loads a Hugging Face checkpoint: its config, and its tensors, which are mapped and not copied; of FP8 the scales
    /// of blocks are.
    ///
    /// # Errors
    /// [`Refusal::File`] for a file that is absent, truncated or unreadable; [`Refusal::MissingTensor`],
    /// [`Refusal::UnreadTensors`], [`Refusal::ShapeMismatch`], [`Refusal::DTypeOutside`] or [`Refusal::NonFinite`] for
    /// tensors, and what [`Config::load`] refuses.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self, Refusal> {
        let config = Config::load(&folder)?;
        let checkpoint = Checkpoint::open(folder.as_ref())?;
        let prefix = PREFIXES
            .into_iter()
            .find(|prefix| checkpoint.contains_under(&format!("{prefix}embed_tokens.")))
            .ok_or_else(|| checkpoint.missing("model.embed_tokens.weight"))?;
        let has_draft = checkpoint.contains_under(Mtp::PREFIX);
        let (model, source) = Self::build(config, Source::Checkpoint(checkpoint), prefix, has_draft)?;
        if let Source::Checkpoint(checkpoint) = source {
            checkpoint.all_read()?;
        }
        Ok(model)
    }

    /// A model of a shape with random weights, for measuring: projections of one shape share their memory. It has no MTP layer.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] for a shape whose tensors cannot be.
    pub fn random(config: Config) -> Result<Self, Refusal> {
        let source = Source::Random(RandomTensors::default());
        Self::build(config, source, "model.", false).map(|(model, _)| model)
    }

    /// A model from its tensors, which are handed back.
    fn build(
        config: Config,
        source: Source,
        prefix: &str,
        has_draft: bool,
    ) -> Result<(Self, Source), Refusal> {
        let mut loader = Loader { config: &config, checkpoint: source, seats: Seats::default() };
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = loader.weights(&format!("{prefix}embed_tokens"), vocab, hidden)?;
        let layers = config.layer_types.iter().enumerate();
        let layers = layers
            .map(|(index, layer_type)| {
                Layer::load(&mut loader, &format!("{prefix}layers.{index}"), *layer_type)
            })
            .collect::<Result<_, _>>()?;
        let norm = RmsNorm::load(&mut loader, &format!("{prefix}norm"), hidden)?;
        let lm_head = if config.tie_word_embeddings {
            loader.seats.add("lm_head", embedding.clone())
        } else {
            loader.seat("lm_head", vocab, hidden)?
        };
        let mtp = match has_draft {
            true => Some(Mtp::load(&mut loader)?),
            false => None,
        };
        let Loader { checkpoint, seats, .. } = loader;
        Ok((Model { config, embedding, layers, norm, lm_head, mtp, seats }, checkpoint))
    }

    /// The embedding `[vocab, hidden_size]`.
    #[cfg(kernels_built)]
    pub(crate) fn embedding(&self) -> &Weights {
        &self.embedding
    }

    /// The norm before the head.
    #[cfg(kernels_built)]
    pub(crate) fn final_norm(&self) -> &RmsNorm {
        &self.norm
    }

    /// The head's seat: the last of the decoder's, as those of the MTP layer come after it.
    #[cfg(kernels_built)]
    pub(crate) fn lm_head(&self) -> SeatId {
        self.lm_head
    }

    /// Its shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The expert banks in the order of the checkpoint; none where the feed-forward is dense.
    pub fn banks(&self) -> Vec<Bank> {
        let draft = self.mtp.iter().map(Mtp::layer);
        self.layers.iter().chain(draft).filter_map(Layer::bank).cloned().collect()
    }

    /// Whether the checkpoint has an MTP layer to draft with.
    pub fn has_draft(&self) -> bool {
        self.mtp.is_some()
    }

    /// Rounds the rotary frequencies to BF16, which casting a whole PyTorch module does to its buffers.
    ///
    /// Transformers loads a checkpoint with frequencies in FP32, and so does [`load`](Self::load). This is for comparison
    /// with outputs that were recorded from a module after such a cast, as the golden files in assets/ are.
    pub fn round_rope_frequencies(&mut self) {
        let draft = self.mtp.iter_mut().map(Mtp::layer_mut);
        self.layers.iter_mut().chain(draft).filter_map(Layer::rope_mut).for_each(Rope::round_frequencies);
    }

    /// A state before the first token, with room for `window` tokens. KV caches grow with the tokens.
    ///
    /// # Errors
    /// [`Refusal::WindowExceeded`] for more tokens than the model has positions.
    pub fn new_state(&self, window: usize) -> Result<State, Refusal> {
        self.check_window(window)?;
        Ok(State::new(self.new_layer_states(), 0, window))
    }

    /// What the layers remember before the first token.
    pub(crate) fn new_layer_states(&self) -> Vec<LayerState> {
        self.layers.iter().map(Layer::new_state).collect()
    }

    /// Appends tokens to a state; the result is their hidden states after the final norm.
    ///
    /// One token or many, in one call or several: in the host's own form a token's row has the same bits.
    ///
    /// # Errors
    /// [`Refusal::EmptyPrompt`], [`Refusal::TokenOutside`] or [`Refusal::WindowExceeded`] before anything is done,
    /// [`Refusal::ShapeMismatch`] for a state that another model made, and what the seats refuse.
    pub fn forward(&mut self, state: &mut State, tokens: &[u32]) -> Result<Hidden, Refusal> {
        self.forward_observed(state, tokens, &mut |_, _| ())
    }

    /// [`forward`](Self::forward), showing each layer's index and its input, `[tokens, hidden_size]`, to `observe`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_observed(
        &mut self,
        state: &mut State,
        tokens: &[u32],
        observe: &mut (dyn FnMut(usize, &[f32]) + Send),
    ) -> Result<Hidden, Refusal> {
        let mut hidden = self.embed(tokens)?;
        state.check_layers(self.layers.len())?;
        let rows = tokens.len();
        state.pass(rows, |states, position| {
            for (index, (layer, state)) in self.layers.iter().zip(states).enumerate() {
                observe(index, &hidden);
                layer.forward(&mut self.seats, state, &mut hidden, rows, position)?;
            }
            Ok(Hidden::new(self.config.hidden_size, self.norm.apply(&hidden)))
        })
    }

    /// The next-token logits of each row, `[rows, vocab_size]`.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] for rows that another model made, and what the seat refuses.
    pub fn logits(&mut self, hidden: &Hidden) -> Result<Vec<f32>, Refusal> {
        self.seats.project(self.lm_head, hidden.elements(), hidden.rows())
    }

    /// A state of the MTP layer before its first token, with room up to position `window`.
    ///
    /// # Errors
    /// [`Refusal::MissingTensor`] when the checkpoint has no MTP layer, [`Refusal::WindowExceeded`] for more tokens than
    /// the model has positions.
    pub fn new_draft_state(&self, window: usize) -> Result<State, Refusal> {
        self.check_window(window)?;
        let mtp = self.mtp.as_ref().ok_or_else(no_draft)?;
        // The first row pairs the hidden state at position 0 with the token at position 1.
        Ok(State::new(vec![mtp.layer().new_state()], 1, window))
    }

    /// Drafts: row i pairs the hidden state of a token with `tokens[i]`, the one that follows it. The result's
    /// [`logits`](Self::logits) are of the token after that, and its rows can stand for `hidden` in the next call.
    ///
    /// # Errors
    /// [`Refusal::MissingTensor`] when the checkpoint has no MTP layer, [`Refusal::ShapeMismatch`] when there are not as
    /// many tokens as rows, and as [`forward`](Self::forward).
    pub fn draft(&mut self, state: &mut State, hidden: &Hidden, tokens: &[u32]) -> Result<Hidden, Refusal> {
        let embeddings = self.embed(tokens)?;
        let mtp = self.mtp.as_ref().ok_or_else(no_draft)?;
        let (rows, width) = (tokens.len(), self.config.hidden_size);
        if (hidden.rows(), hidden.width()) != (rows, width) {
            return Err(Refusal::ShapeMismatch {
                what: "hidden states to draft from".to_string(),
                expected: vec![rows, width],
                got: vec![hidden.rows(), hidden.width()],
            });
        }
        state.check_layers(1)?;
        state.pass(rows, |states, position| {
            let state = &mut states[0];
            let drafted =
                mtp.forward(&mut self.seats, state, hidden.elements(), &embeddings, rows, position)?;
            Ok(Hidden::new(width, drafted))
        })
    }

    /// Refuses more tokens than there are positions.
    pub(crate) fn check_window(&self, needed: usize) -> Result<(), Refusal> {
        let window = self.config.max_position_embeddings;
        if needed > window { Err(Refusal::WindowExceeded { needed, window }) } else { Ok(()) }
    }

    /// Refuses no tokens, and tokens without an embedding.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<(), Refusal> {
        check_tokens(tokens, self.config.vocab_size)
    }

    /// The embedding rows of tokens, `[tokens, hidden_size]`.
    fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>, Refusal> {
        self.check_tokens(tokens)?;
        let table = self.embedding.dense()?;
        let mut rows = vec![0.0; tokens.len() * table.k()];
        for (row, &token) in rows.chunks_exact_mut(table.k()).zip(tokens) {
            table.decode_row(token as usize, row);
        }
        Ok(rows)
    }
}

/// Refuses no tokens, and tokens outside the vocabulary.
pub(crate) fn check_tokens(tokens: &[u32], vocab: usize) -> Result<(), Refusal> {
    if tokens.is_empty() {
        return Err(Refusal::EmptyPrompt);
    }
    match tokens.iter().find(|&&token| token as usize >= vocab) {
        Some(&token) => Err(Refusal::TokenOutside { token, vocab }),
        None => Ok(()),
    }
}

fn no_draft() -> Refusal {
    Refusal::MissingTensor { path: "the checkpoint".to_string(), tensor: "mtp.fc.weight".to_string() }
}

impl Host for Model {
    fn seats(&self) -> Vec<&Seat> {
        self.seats.all()
    }

    fn seat_mut(&mut self, path: &str) -> Option<&mut Seat> {
        self.seats.by_path(path)
    }

    fn weights(&self, path: &str) -> Option<DenseWeights<'_>> {
        self.seats.weights(path)
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("config", &self.config).finish_non_exhaustive()
    }
}
