//! The CUDA arm: one graph a token, a few replays ahead of the host.

use std::hint;
use std::ops::ControlFlow;
use std::thread;

use decode_loop::{CudaHost, DecodeLoop, Finish, Generation, Progress, Request, Sequence};
use device::Graph;
use structure_core::Refusal;

use crate::cuda::Chooser;
use crate::text::Text;

/// Tokens of a prompt between two reports of progress.
const PROMPT_TOKENS: usize = 4096;
/// Replays that are queued before their tokens have come: the device goes on while a callback runs.
const AHEAD: usize = 4;
/// Looks at the ring between two questions whether the device still works.
const LOOKS: u32 = 4096;

/// A loop over a host on a GPU. The graph goes before the host can free or move what it was captured over.
pub(crate) struct CudaLoop<'a> {
    graph: Graph,
    chooser: Chooser,
    host: &'a mut dyn CudaHost,
    window: usize,
}

impl<'a> CudaLoop<'a> {
    /// Begins the host's sequence and captures a step; nothing runs yet.
    pub fn new(host: &'a mut dyn CudaHost, sequence: &Sequence<'_>) -> Result<Self, Refusal> {
        host.begin(sequence)?;
        let stream = host.stream().clone();
        let mut chooser = Chooser::new(&stream, host.shape().vocab)?;
        let graph = Graph::capture(&stream, |_| {
            host.step(1)?;
            chooser.choose(host, true)
        })?;
        Ok(CudaLoop { graph, chooser, host, window: sequence.window })
    }

    /// The tokens of a text; says why there are no more.
    fn run(&mut self, request: &Request<'_>, text: &mut Text<'_>) -> Result<Finish, Refusal> {
        self.host.reset()?;
        let mut read = 0;
        for tokens in request.prompt.chunks(PROMPT_TOKENS) {
            self.host.prompt(tokens)?;
            self.host.stream().synchronize()?;
            read += tokens.len();
            if let Some(finish) = text.read(read) {
                return Ok(finish);
            }
        }
        let stream = self.host.stream().clone();
        self.chooser.begin(&stream, request)?;
        self.chooser.choose(self.host, false)?;
        // The first token is chosen without a replay.
        let mut queued = 1;
        loop {
            while queued < request.max_new.min(text.len() + 1 + AHEAD) {
                self.graph.launch()?;
                queued += 1;
            }
            let token = self.wait_for(text.len())?;
            if let Some(finish) = text.push(token) {
                return Ok(finish);
            }
        }
    }

    /// Token `index`, as soon as the device has made it.
    fn wait_for(&self, index: usize) -> Result<u32, Refusal> {
        loop {
            for _ in 0..LOOKS {
                if let Some(token) = self.chooser.token(index)? {
                    return Ok(token);
                }
                hint::spin_loop();
            }
            thread::yield_now();
            if self.host.stream().is_idle()? {
                let problem = "the device is idle and made no token".to_string();
                let missing = || Refusal::Cuda { call: "a decode step".to_string(), problem };
                return self.chooser.token(index)?.ok_or_else(missing);
            }
        }
    }
}

impl DecodeLoop for CudaLoop<'_> {
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
        // A callback that panicked has left replays behind.
        self.host.stream().synchronize()?;
        let outcome = self.run(request, &mut text);
        // Replays past the end of the text change nothing that the next one reads.
        self.host.stream().synchronize()?;
        Ok(text.end(outcome?))
    }

    fn kv_bytes(&self) -> u64 {
        self.host.kv_bytes()
    }
}
