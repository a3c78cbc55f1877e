use std::any::Any;
use std::ops::Range;

use structure_core::{Band, DType, Form, Place, Receipt, Refusal, Registration};

use crate::cpu_arm::round_to_bf16;
use crate::{Rows, RowsMut};

/// Anything that projects rows of K elements to rows of N: a host's own form, or an implementation's.
///
/// `&mut self` because scratch memory belongs to one stream at a time.
pub trait LinearProj: Any + Send {
    /// Output features.
    fn n(&self) -> usize;

    /// Input features.
    fn k(&self) -> usize;

    /// `y[m, n] = sum over k of w[n, k] * x[m, k] + bias[n]`. `x` is `[M, K]`, `y` is `[M, N]` and of the same type.
    ///
    /// On a device the call is queued on the stream of `x` and not waited for.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`], [`Refusal::DTypeOutside`] or [`Refusal::WrongDevice`] for rows it cannot take, and
    /// [`Refusal::Cuda`] when a launch fails.
    fn project(&mut self, x: Rows<'_>, y: RowsMut<'_>) -> Result<(), Refusal>;

    /// As [`project`](Self::project), and the same rows for as many of `others` as it can take into one launch with its own: these
    /// it takes out of their places.
    ///
    /// A row has the same bits as long as the same projections are together, whatever the other rows are. They may be other bits
    /// than those of a projection alone: the sums may be cut into other slices.
    ///
    /// # Errors
    /// As [`project`](Self::project), for any of those it takes.
    fn project_with(
        &mut self,
        x: Rows<'_>,
        y: RowsMut<'_>,
        _others: &mut [Option<Together<'_>>],
    ) -> Result<(), Refusal> {
        self.project(x, y)
    }

    /// The same projection of rows that are gated on their way in, where it has a form for that.
    fn gated(&mut self) -> Option<&mut dyn GatedProj> {
        None
    }
}

/// A projection of gated rows, which are never in memory: `y[m, n] = sum over k of w[n, k] * bf16(silu(gate[m, k]) * x[m, k]) +
/// bias[n]`, with the bits that the projection has of those rows.
pub trait GatedProj {
    /// `gate` and `x` are BF16 `[M, K]`, M of 1 to 16, and `y` is `[M, N]`.
    ///
    /// # Errors
    /// As [`LinearProj::project`].
    fn project(&mut self, gate: Rows<'_>, x: Rows<'_>, y: RowsMut<'_>) -> Result<(), Refusal>;
}

/// One of a few projections of the same rows.
pub struct Together<'a> {
    /// What projects.
    pub proj: &'a mut (dyn LinearProj + 'static),
    /// Where its rows go, `[M, N]`.
    pub y: RowsMut<'a>,
}

/// An implementation bound to weights.
pub trait BoundProj: LinearProj {
    /// The form of call it serves itself.
    fn form(&self) -> Form;

    /// What was bound.
    fn receipt(&self) -> &Receipt;

    /// A row of K elements as it enters the products: rounded to BF16, and quantised where the implementation does that too;
    /// for tests and gates.
    fn operand(&self, row: &[f32]) -> Vec<f32> {
        round_to_bf16(row)
    }

    /// The same weights once more for another seat, in memory of their own, without packing them again; none where an arm has no
    /// quicker way than to bind anew.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] or [`Refusal::Cuda`] when they cannot be copied.
    fn duplicate(&self, _seat: &str) -> Result<Option<Box<dyn BoundProj>>, Refusal> {
        Ok(None)
    }

    /// Rows `features` of the weights as it multiplies them, in canonical order, `[len, K]`; for receipts and tests.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] for features past N, [`Refusal::Cuda`] when they cannot be read back from the device.
    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal>;
}

impl LinearProj for Box<dyn BoundProj> {
    fn n(&self) -> usize {
        (**self).n()
    }

    fn k(&self) -> usize {
        (**self).k()
    }

    fn project(&mut self, x: Rows<'_>, y: RowsMut<'_>) -> Result<(), Refusal> {
        (**self).project(x, y)
    }

    fn project_with(
        &mut self,
        x: Rows<'_>,
        y: RowsMut<'_>,
        others: &mut [Option<Together<'_>>],
    ) -> Result<(), Refusal> {
        (**self).project_with(x, y, others)
    }

    fn gated(&mut self) -> Option<&mut dyn GatedProj> {
        (**self).gated()
    }
}

impl BoundProj for Box<dyn BoundProj> {
    fn form(&self) -> Form {
        (**self).form()
    }

    fn receipt(&self) -> &Receipt {
        (**self).receipt()
    }

    fn operand(&self, row: &[f32]) -> Vec<f32> {
        (**self).operand(row)
    }

    fn duplicate(&self, seat: &str) -> Result<Option<Box<dyn BoundProj>>, Refusal> {
        (**self).duplicate(seat)
    }

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        (**self).dequantized(features)
    }
}

/// Checks the rows of a call against N and K, and against each other.
///
/// # Errors
/// [`Refusal::ShapeMismatch`], [`Refusal::WrongDevice`] or [`Refusal::DTypeOutside`] that names the side.
pub fn check_call(seat: &str, n: usize, k: usize, x: &Rows<'_>, y: &RowsMut<'_>) -> Result<(), Refusal> {
    let mismatch = |side: &str, expected: [usize; 2], got: [usize; 2]| Refusal::ShapeMismatch {
        what: format!("{seat}: {side}"),
        expected: expected.to_vec(),
        got: got.to_vec(),
    };
    if x.width() != k {
        return Err(mismatch("input rows", [x.rows(), k], [x.rows(), x.width()]));
    }
    if (y.rows(), y.width()) != (x.rows(), n) {
        return Err(mismatch("output rows", [x.rows(), n], [y.rows(), y.width()]));
    }
    if y.place() != x.place() {
        return Err(Refusal::WrongDevice {
            what: format!("{seat}: output"),
            rows: y.place().to_string(),
            seat: x.place().to_string(),
        });
    }
    if y.dtype() != x.dtype() {
        return Err(Refusal::DTypeOutside {
            what: format!("{seat}: output rows"),
            dtype: y.dtype().to_string(),
            accepted: DType::list(&[x.dtype()]),
        });
    }
    Ok(())
}

/// Refuses more rows than an implementation serves: who calls it directly has no host form to dispatch to.
pub(crate) fn check_band(seat: &str, m: usize, band: Band) -> Result<(), Refusal> {
    if band.takes(m) {
        return Ok(());
    }
    Err(Refusal::BandExceeded { what: seat.to_string(), m, band })
}

/// Checks that `features` lie below N.
pub(crate) fn check_features(features: &Range<usize>, n: usize) -> Result<(), Refusal> {
    if features.start <= features.end && features.end <= n {
        return Ok(());
    }
    let what = "features to dequantise".to_string();
    Err(Refusal::ShapeMismatch { what, expected: vec![0, n], got: vec![features.start, features.end] })
}

/// The form of call that an arm of `entry` with K input features serves.
pub(crate) fn form(entry: &Registration, width: usize, place: Place) -> Form {
    let band = entry.envelope.band;
    Form { dtypes: entry.envelope.row_dtypes, width, place, band, fallback: entry.fallback }
}
