//! What a loop asks of a model.

use device::{Stream, ViewMut};
use structure_core::Refusal;

use crate::KvChoice;

/// What a loop needs to know of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostShape {
    /// Token ids there are.
    pub vocab: usize,
    /// The most positions there can be.
    pub max_positions: usize,
}

/// The one sequence that a host works on: what is allocated for it, once, before the first token.
#[derive(Clone, Copy, Default)]
pub struct Sequence<'a> {
    /// Positions there is room for.
    pub window: usize,
    /// The most rows of one step: 1, or K + 1 where drafts are verified.
    pub rows: usize,
    /// Where keys and values are kept.
    pub kv: KvChoice<'a>,
}

/// A model in host memory.
pub trait CpuHost: Send {
    /// Its shape.
    fn shape(&self) -> HostShape;

    /// Begins a sequence, in place of any other.
    ///
    /// # Errors
    /// [`Refusal::WindowExceeded`] for more positions than the model has, and what the store refuses.
    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Refusal>;

    /// Bytes of the keys and values of the sequence.
    fn kv_bytes(&self) -> u64;

    /// Goes back to before the first token of the sequence.
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`] before the first [`begin`](Self::begin).
    fn reset(&mut self) -> Result<(), Refusal>;

    /// Appends tokens; the result is the logits `[vocab]` after the last of them.
    ///
    /// # Errors
    /// [`Refusal::EmptyPrompt`], [`Refusal::TokenOutside`] or [`Refusal::WindowExceeded`] before anything is done, what the seats
    /// refuse, and [`Refusal::ValueOutside`] before the first [`begin`](Self::begin).
    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Refusal>;
}

/// A model on a GPU, over static buffers: everything that [`prompt`](Self::prompt) and [`step`](Self::step) touch is allocated by
/// [`begin`](Self::begin).
pub trait CudaHost: Send {
    /// Its shape.
    fn shape(&self) -> HostShape;

    /// The stream that all its work is queued on.
    fn stream(&self) -> &Stream;

    /// Allocates a sequence, in place of any other; graphs that were captured over that one must be gone.
    ///
    /// # Errors
    /// [`Refusal::WindowExceeded`] for more positions than the model has, [`Refusal::OutOfMemory`] with the bytes asked and free
    /// before anything is allocated, and what the store refuses.
    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Refusal>;

    /// Bytes of the keys and values of the sequence.
    fn kv_bytes(&self) -> u64;

    /// Queues the state before the first token: position 0, recurrent states zero. Keys and values stay, as none is read
    /// before it is written anew.
    ///
    /// # Errors
    /// [`Refusal::Cuda`].
    fn reset(&mut self) -> Result<(), Refusal>;

    /// Queues appending a run of prompt tokens, in chunks, from where the sequence stands; moves the position on. The logits of the
    /// last token are row 0 of [`StepBuffers::logits`] after it.
    ///
    /// # Errors
    /// [`Refusal::EmptyPrompt`], [`Refusal::TokenOutside`] or [`Refusal::WindowExceeded`] before anything is queued, and what the
    /// seats refuse.
    fn prompt(&mut self, tokens: &[u32]) -> Result<(), Refusal>;

    /// Queues one step over the first `rows` tokens of [`StepBuffers::tokens`], at [`StepBuffers::position`], to the logits of every
    /// row. Reads both when it runs, moves neither on, allocates nothing and waits for nothing: it can be captured.
    ///
    /// # Errors
    /// What the seats refuse.
    fn step(&mut self, rows: usize) -> Result<(), Refusal>;

    /// The buffers that a step reads and writes; they stay where they are until the next [`begin`](Self::begin).
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`] before the first [`begin`](Self::begin).
    fn buffers(&mut self) -> Result<StepBuffers<'_>, Refusal>;
}

/// A step's inputs and output on the device.
#[derive(Debug)]
pub struct StepBuffers<'a> {
    /// I32 `[rows]`: the tokens that the step reads.
    pub tokens: ViewMut<'a>,
    /// I32 `[1]`: the position of the first of them.
    pub position: ViewMut<'a>,
    /// F32 `[rows, vocab]`: the logits that it leaves.
    pub logits: ViewMut<'a>,
}

/// The host that a loop is built over.
pub enum Arm<'a> {
    /// In host memory.
    Cpu(&'a mut dyn CpuHost),
    /// On a GPU.
    Cuda(&'a mut dyn CudaHost),
}

impl Arm<'_> {
    /// The host's shape.
    pub fn shape(&self) -> HostShape {
        match self {
            Arm::Cpu(host) => host.shape(),
            Arm::Cuda(host) => host.shape(),
        }
    }
}
