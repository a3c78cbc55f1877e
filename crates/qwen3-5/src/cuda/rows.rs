//! Row by row: embedding, norms, activations.

use device::{Stream, View, ViewMut};
use structure_core::{DType, Refusal};

use super::{check, input, output};
use crate::ffi;

/// `out[m, :] = table[tokens[m], :]`; NaN where a token is outside the vocabulary.
#[derive(Debug)]
pub struct Embed<'a> {
    /// BF16 `[vocab, hidden]`.
    pub table: View<'a>,
    /// I32 `[rows]`.
    pub tokens: View<'a>,
    /// BF16 `[rows, hidden]`.
    pub out: ViewMut<'a>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub hidden: usize,
}

impl Embed<'_> {
    /// Queues the call.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`], [`Refusal::DTypeOutside`] or [`Refusal::WrongDevice`] for views that do not fit, and
    /// [`Refusal::Cuda`] when the launch fails.
    pub fn queue(&self, stream: &Stream) -> Result<(), Refusal> {
        let elements = self.rows * self.hidden;
        let arguments = ffi::qwen3_5_embed_call {
            table: input("embedding", self.table, DType::BF16, self.hidden, stream)?,
            tokens: input("tokens", self.tokens, DType::I32, self.rows, stream)?,
            out: output("embedded rows", &self.out, DType::BF16, elements, stream)?,
            rows: self.rows as i64,
            vocab: (self.table.len() / self.hidden) as i64,
            hidden: self.hidden as i64,
            overlap: stream.overlap().into(),
        };
        stream.device().make_current()?;
        // SAFETY: the views were checked to hold what the call reads and writes; a view's contract holds until the stream's work
        // is done.
        check("qwen3_5_embed", unsafe { ffi::qwen3_5_embed(&arguments, stream.raw().cast()) })
    }
}
