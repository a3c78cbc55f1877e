use std::ops::ControlFlow;
use std::time::Instant;

use structure_core::Refusal;

use crate::{Model, argmax};

/// Tokens of a prompt that pass together: enough to fill all cores, and few enough to need little memory.
const PROMPT_ROWS: usize = 256;

/// How [`Model::generate`] generates.
#[derive(Clone, Copy, Debug)]
pub struct Generate<'a> {
    /// The most new tokens.
    pub max_new: usize,
    /// Tokens that end the text; the one that did is the last of the new tokens.
    pub stop: &'a [u32],
}

/// What [`Model::generate`] generated, and how long it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The new tokens.
    pub tokens: Vec<u32>,
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

impl Model {
    /// Continues a prompt greedily, and shows each new token to `on_token`, which can end the text.
    ///
    /// # Errors
    /// [`Refusal::EmptyPrompt`], [`Refusal::TokenOutside`], or [`Refusal::WindowExceeded`] when the model has not enough
    /// positions for the prompt and the most new tokens, all before any work; [`Refusal::NonFinite`] for logits that are
    /// not numbers, and what the seats refuse.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        options: &Generate<'_>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generation, Refusal> {
        // The last new token is never read.
        let positions = prompt.len().saturating_add(options.max_new.saturating_sub(1));
        self.check_tokens(prompt)?;
        let mut state = self.new_state(positions)?;
        let mut generation = Generation { tokens: Vec::new(), prompt_seconds: 0.0, decode_seconds: 0.0 };
        if options.max_new == 0 {
            return Ok(generation);
        }
        let start = Instant::now();
        let mut last = None;
        for tokens in prompt.chunks(PROMPT_ROWS) {
            last = Some(self.forward(&mut state, tokens)?.last());
        }
        let mut first_at = start;
        while let Some(hidden) = last {
            let token = argmax(&self.logits(&hidden)?)?;
            generation.tokens.push(token);
            if generation.tokens.len() == 1 {
                first_at = Instant::now();
                generation.prompt_seconds = (first_at - start).as_secs_f64();
            }
            let ended = on_token(token).is_break()
                || options.stop.contains(&token)
                || generation.tokens.len() == options.max_new;
            last = if ended { None } else { Some(self.forward(&mut state, &[token])?) };
        }
        generation.decode_seconds = first_at.elapsed().as_secs_f64();
        Ok(generation)
    }
}
