//! A text as it grows: what both arms do with a token that has come.

use std::ops::ControlFlow;
use std::time::Instant;

use decode_loop::{Finish, Generation, Progress, Request};

pub(crate) type OnProgress<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<()>;

/// The new tokens so far, and when the first and the last of them came.
pub(crate) struct Text<'a> {
    request: &'a Request<'a>,
    on_progress: OnProgress<'a>,
    tokens: Vec<u32>,
    start: Instant,
    first: Instant,
    last: Instant,
}

impl<'a> Text<'a> {
    /// A text before its prompt.
    pub fn new(request: &'a Request<'a>, on_progress: OnProgress<'a>) -> Self {
        let now = Instant::now();
        Text { request, on_progress, tokens: Vec::new(), start: now, first: now, last: now }
    }

    /// Tells that so many tokens of the prompt have been read; a text that ends there is returned.
    pub fn read(&mut self, tokens: usize) -> Option<Finish> {
        (self.on_progress)(Progress::Prompt(tokens)).is_break().then_some(Finish::Cancelled)
    }

    /// Adds a token and tells of it; says why the text ends with it, if it does.
    pub fn push(&mut self, token: u32) -> Option<Finish> {
        self.last = Instant::now();
        if self.tokens.is_empty() {
            self.first = self.last;
        }
        self.tokens.push(token);
        let cancelled = (self.on_progress)(Progress::Token(token)).is_break();
        if self.request.stop.contains(&token) {
            Some(Finish::Stop)
        } else if self.tokens.len() == self.request.max_new {
            Some(Finish::Length)
        } else {
            cancelled.then_some(Finish::Cancelled)
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// What became of it.
    pub fn end(self, finish: Finish) -> Generation {
        Generation {
            tokens: self.tokens,
            finish,
            prompt_seconds: (self.first - self.start).as_secs_f64(),
            decode_seconds: (self.last - self.first).as_secs_f64(),
        }
    }
}
