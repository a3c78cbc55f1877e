use std::ops::Range;

use device::{Buffer, Stream};
use structure_core::{Form, Place, Receipt, Refusal};

use crate::proj::{check_band, check_call};
use crate::{BoundProj, LinearProj, Rows, RowsData, RowsMut, RowsMutData};

/// An implementation on a GPU, for a host whose rows are in host memory: every call copies up, projects and copies down.
///
/// Calls of many rows go in parts. The copies cost more than a projection; this is for hosts that are not on the GPU themselves, and
/// for tests.
pub struct Staged<P> {
    proj: P,
    stream: Stream,
    x: Buffer<f32>,
    y: Buffer<f32>,
}

/// Rows that are staged at a time, of bands that have more.
const MAX_ROWS: usize = 64;

impl<P: BoundProj> Staged<P> {
    /// Stages calls on `stream`.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] when the staging buffers do not fit.
    pub fn new(proj: P, stream: &Stream) -> Result<Self, Refusal> {
        let rows = proj.form().band.max.min(MAX_ROWS);
        Self::with_rows(proj, stream, rows)
    }

    /// As [`new`](Self::new), with so many rows at a time.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_rows(proj: P, stream: &Stream, rows: usize) -> Result<Self, Refusal> {
        let x = Buffer::zeros(stream, &[rows, proj.k()])?;
        let y = Buffer::zeros(stream, &[rows, proj.n()])?;
        Ok(Staged { proj, stream: stream.clone(), x, y })
    }

    /// The implementation, without the staging.
    pub fn into_inner(self) -> P {
        self.proj
    }
}

impl<P: BoundProj> LinearProj for Staged<P> {
    fn n(&self) -> usize {
        self.proj.n()
    }

    fn k(&self) -> usize {
        self.proj.k()
    }

    fn project(&mut self, x: Rows<'_>, mut y: RowsMut<'_>) -> Result<(), Refusal> {
        let Staged { proj, stream, x: staged_x, y: staged_y } = self;
        check_call(&proj.receipt().seat, proj.n(), proj.k(), &x, &y)?;
        let (RowsData::Host(elements), RowsMutData::Host(out)) = (x.data(), y.data()) else {
            return Err(Refusal::WrongDevice {
                what: proj.receipt().seat.clone(),
                rows: x.place().to_string(),
                seat: "staged from host memory".to_string(),
            });
        };
        check_band(&proj.receipt().seat, x.rows(), proj.form().band)?;
        let (n, k) = (proj.n(), proj.k());
        let mut projected = Vec::with_capacity(x.rows() * n);
        for part in elements.to_f32().chunks(staged_x.len()) {
            let m = part.len() / k;
            let mut host_x = part.to_vec();
            host_x.resize(staged_x.len(), 0.0);
            staged_x.copy_from_host(stream, &host_x)?;
            let rows = Rows::device(staged_x.view().first(m * k)?, stream, m, k)?;
            let results = RowsMut::device(staged_y.view_mut().first(m * n)?, m, n)?;
            proj.project(rows, results)?;
            projected.extend_from_slice(&staged_y.to_host(stream)?[..m * n]);
        }
        out.write_f32(projected.into_iter());
        Ok(())
    }
}

impl<P: BoundProj> BoundProj for Staged<P> {
    fn form(&self) -> Form {
        Form { place: Place::Cpu, ..self.proj.form() }
    }

    fn receipt(&self) -> &Receipt {
        self.proj.receipt()
    }

    fn operand(&self, row: &[f32]) -> Vec<f32> {
        self.proj.operand(row)
    }

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        self.proj.dequantized(features)
    }
}
