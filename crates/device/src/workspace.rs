use std::sync::{Arc, Mutex, PoisonError};

use structure_core::Refusal;

use crate::{Buffer, Stream, ViewMut};

/// Scratch memory that calls on one stream share. The stream's order keeps one call's use of it apart from the next one's, so
/// it is lent for calls on that stream alone.
///
/// It grows while weights are bound, never in a call. What it had before stays until it is dropped: captured graphs hold
/// the addresses.
#[derive(Clone, Debug)]
pub struct Workspace {
    stream: Stream,
    rows: usize,
    buffers: Arc<Mutex<Vec<Buffer<u8>>>>,
}

impl Workspace {
    /// An empty workspace for calls on `stream` that take up to `rows` rows at a time.
    pub fn new(stream: &Stream, rows: usize) -> Self {
        Workspace { stream: stream.clone(), rows, buffers: Arc::default() }
    }

    /// Rows that a call takes at a time.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Makes sure that there are so many bytes.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] with the bytes asked and free, or [`Refusal::Cuda`].
    pub fn reserve(&self, bytes: usize) -> Result<(), Refusal> {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if buffers.last().is_none_or(|buffer| buffer.len() < bytes) {
            buffers.push(Buffer::zeros(&self.stream, &[bytes])?);
        }
        Ok(())
    }

    /// Lends all of it to a call on `stream`; `None`, and nothing is called, if the stream is another one or nothing was reserved.
    pub fn lend<R>(&self, stream: &Stream, call: impl FnOnce(ViewMut<'_>) -> R) -> Option<R> {
        if stream.raw() != self.stream.raw() || stream.device().ordinal() != self.stream.device().ordinal() {
            return None;
        }
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        buffers.last_mut().map(|buffer| call(buffer.view_mut()))
    }
}
