use std::ops::ControlFlow;

use structure_core::Refusal;

use crate::{HostShape, Sampler};

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

impl Request<'_> {
    /// Positions that it takes: the last new token is never read.
    pub fn positions(&self) -> usize {
        self.prompt.len().saturating_add(self.max_new.saturating_sub(1))
    }

    /// What every loop checks before any work.
    ///
    /// # Errors
    /// [`Refusal::EmptyPrompt`], [`Refusal::TokenOutside`], [`Refusal::WindowExceeded`] when a window is too small for the prompt and
    /// the most new tokens, and as [`Sampler::check`].
    pub fn check(&self, host: &HostShape, window: usize) -> Result<(), Refusal> {
        if self.prompt.is_empty() {
            return Err(Refusal::EmptyPrompt);
        }
        if let Some(&token) = self.prompt.iter().find(|&&token| token as usize >= host.vocab) {
            return Err(Refusal::TokenOutside { token, vocab: host.vocab });
        }
        let needed = self.positions();
        if needed > window {
            return Err(Refusal::WindowExceeded { needed, window });
        }
        self.sampler.check()
    }
}

/// What a callback is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// So many tokens of the prompt have been read.
    Prompt(usize),
    /// A new token.
    Token(u32),
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
    /// Continues a prompt from a fresh sequence, and shows the prompt's progress and each new token to `on_progress` as they come; the
    /// callback can end the text.
    ///
    /// A call that ends early, by whatever way, leaves the loop ready for the next one.
    ///
    /// # Errors
    /// As [`Request::check`] before any work; [`Refusal::NonFinite`] for logits that are not numbers, and what the host refuses.
    fn generate(
        &mut self,
        request: &Request<'_>,
        on_progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Generation, Refusal>;

    /// Bytes of keys and values that the loop holds.
    fn kv_bytes(&self) -> u64;
}
