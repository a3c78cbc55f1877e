//! The CPU arm: the same loop, a step at a time.

use std::ops::ControlFlow;

use decode_loop::{CpuHost, DecodeLoop, Finish, Generation, Progress, Request, Sequence};
use structure_core::Refusal;

use crate::text::Text;

/// Tokens of a prompt that pass together: enough to fill all cores, and few enough to need little memory.
const PROMPT_ROWS: usize = 256;

/// A loop over a host in host memory.
pub(crate) struct CpuLoop<'a> {
    host: &'a mut dyn CpuHost,
    window: usize,
}

impl<'a> CpuLoop<'a> {
    /// Begins the host's sequence.
    pub fn new(host: &'a mut dyn CpuHost, sequence: &Sequence<'_>) -> Result<Self, Refusal> {
        host.begin(sequence)?;
        Ok(CpuLoop { host, window: sequence.window })
    }

    /// The tokens of a text; says why there are no more.
    fn run(&mut self, request: &Request<'_>, text: &mut Text<'_>) -> Result<Finish, Refusal> {
        let mut logits = Vec::new();
        let mut read = 0;
        for tokens in request.prompt.chunks(PROMPT_ROWS) {
            logits = self.host.forward(tokens)?;
            read += tokens.len();
            if let Some(finish) = text.read(read) {
                return Ok(finish);
            }
        }
        loop {
            let token = request.sampler.choose(&logits, request.prompt.len() + text.len())?;
            if let Some(finish) = text.push(token) {
                return Ok(finish);
            }
            logits = self.host.forward(&[token])?;
        }
    }
}

impl DecodeLoop for CpuLoop<'_> {
    fn generate(
        &mut self,
        request: &Request<'_>,
        on_progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Generation, Refusal> {
        request.check(&self.host.shape(), self.window)?;
        let mut text = Text::new(request, on_progress);
        if request.max_new == 0 {
            return Ok(text.end(Finish::Length));
        }
        self.host.reset()?;
        let finish = self.run(request, &mut text)?;
        Ok(text.end(finish))
    }

    fn kv_bytes(&self) -> u64 {
        self.host.kv_bytes()
    }
}
