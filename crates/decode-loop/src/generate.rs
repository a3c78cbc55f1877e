use std::ops::ControlFlow;

use structure_core::Refusal;

/// How the next token is chosen from FP32 logits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Sampler {
    /// The largest logit, the lowest id where several have it.
    #[default]
    Greedy,
    /// A draw from the softmax of `logits / temperature`, restricted first to the `top_k` largest logits, then to the fewest of the
    /// most probable tokens whose probabilities sum to `top_p`. The same seed draws the same tokens.
    Random {
        /// Above 0.
        temperature: f32,
        /// At least 1; none for all tokens.
        top_k: Option<usize>,
        /// Above 0, at most 1.
        top_p: f32,
        /// What the draws are derived from, with the position.
        seed: u64,
    },
}

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// At least one token.
    pub prompt: &'a [u32],
    /// The most new tokens.
    pub max_new: usize,
    /// Tokens that end the text; the one that did is the last of the new tokens.
    pub stop: &'a [u32],
    /// How tokens are chosen.
    pub sampler: Sampler,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// `max_new` tokens were made.
    Length,
    /// A stop token was made.
    Stop,
    /// The callback ended it.
    Cancelled,
}

/// What was generated, and how long it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The new tokens.
    pub tokens: Vec<u32>,
    /// Why there are no more.
    pub finish: Finish,
    /// From the call to the first new token.
    pub prompt_seconds: f64,
    /// From the first new token to the last one.
    pub decode_seconds: f64,
}

impl Generation {
    /// New tokens a second after the first one, if there were any.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let decoded = self.tokens.len().saturating_sub(1);
        (decoded > 0 && self.decode_seconds > 0.0).then(|| decoded as f64 / self.decode_seconds)
    }
}

/// A loop over one host.
pub trait DecodeLoop {
    /// Continues a prompt from a fresh sequence, and shows each new token to `on_token` as it comes; the callback can end the text.
    ///
    /// A call that ends early, by whatever way, leaves the loop ready for the next one.
    ///
    /// # Errors
    /// [`Refusal::EmptyPrompt`], [`Refusal::TokenOutside`], [`Refusal::ValueOutside`] for a sampler outside its bounds, or
    /// [`Refusal::WindowExceeded`] when the window is too small for the prompt and the most new tokens, all before any work;
    /// [`Refusal::NonFinite`] for logits that are not numbers, and what the host refuses.
    fn generate(
        &mut self,
        request: &Request<'_>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generation, Refusal>;

    /// Bytes of keys and values that the loop holds.
    fn kv_bytes(&self) -> u64;
}
