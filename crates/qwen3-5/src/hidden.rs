use std::ops::Range;

use structure_core::Refusal;

/// Hidden states of a run of tokens: rows of `hidden_size` FP32 elements, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Hidden {
    width: usize,
    elements: Vec<f32>,
}

impl Hidden {
    pub(crate) fn new(width: usize, elements: Vec<f32>) -> Self {
        Hidden { width, elements }
    }

    /// Rows from elsewhere, `[rows, width]`.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when there are not whole rows.
    pub fn from_rows(width: usize, elements: Vec<f32>) -> Result<Self, Refusal> {
        if width > 0 && elements.len().is_multiple_of(width) {
            return Ok(Hidden { width, elements });
        }
        let (what, rows) = ("hidden states".to_string(), elements.len().div_ceil(width.max(1)));
        Err(Refusal::ShapeMismatch { what, expected: vec![rows, width], got: vec![elements.len()] })
    }

    /// How many tokens there are.
    pub fn rows(&self) -> usize {
        self.elements.len() / self.width
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// All rows, `[rows, width]`.
    pub fn elements(&self) -> &[f32] {
        &self.elements
    }

    /// Some of the rows. Those past the last one are left out.
    pub fn slice(&self, rows: Range<usize>) -> Hidden {
        let end = rows.end.min(self.rows());
        let start = rows.start.min(end);
        Hidden::new(self.width, self.elements[start * self.width..end * self.width].to_vec())
    }

    /// The last row alone.
    pub fn last(&self) -> Hidden {
        self.slice(self.rows().saturating_sub(1)..self.rows())
    }
}
