//! Every projection of the model, in one table: parts of the model hold its handles.

use linear_proj::{DenseWeights, Rows, RowsMut, Seat};
use structure_core::Refusal;

use crate::dense::{HostLinear, RowScale};
use crate::tensor::Weights;

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeatId(pub usize);

/// The table, in the order of the checkpoint.
#[derive(Default)]
pub(crate) struct Seats {
    seats: Vec<Seat>,
    weights: Vec<Weights>,
    row_scales: Vec<RowScale>,
}

impl Seats {
    /// Adds a seat that the host serves from `weights`.
    pub fn add(&mut self, path: &str, weights: Weights) -> SeatId {
        let host = HostLinear::new(path.to_string(), weights.clone());
        self.row_scales.push(host.row_scale());
        self.seats.push(Seat::new(path, Box::new(host)));
        self.weights.push(weights);
        SeatId(self.seats.len() - 1)
    }

    pub fn path(&self, seat: SeatId) -> &str {
        self.seats[seat.0].path()
    }

    /// Tells the host form of a seat by what the rows it gets were divided.
    pub fn set_row_scale(&mut self, seat: SeatId, scale: Option<&[f32]>) {
        self.row_scales[seat.0].set(scale);
    }

    /// Projects `x` `[rows, K]`; the result is `[rows, N]`.
    pub fn project(&mut self, seat: SeatId, x: &[f32], rows: usize) -> Result<Vec<f32>, Refusal> {
        let seat = &mut self.seats[seat.0];
        let (n, k) = (seat.n(), seat.k());
        let mut y = vec![0.0; rows * n];
        seat.project(Rows::host(x, rows, k)?, RowsMut::host(y.as_mut_slice(), rows, n)?)?;
        Ok(y)
    }

    /// The paths and weights of all seats up to `last`.
    #[cfg(kernels_built)]
    pub fn projections(&self, last: SeatId) -> Vec<(String, Weights)> {
        let seats = self.seats.iter().zip(&self.weights).take(last.0 + 1);
        seats.map(|(seat, weights)| (seat.path().to_string(), weights.clone())).collect()
    }

    pub fn all(&self) -> Vec<&Seat> {
        self.seats.iter().collect()
    }

    pub fn by_path(&mut self, path: &str) -> Option<&mut Seat> {
        self.seats.iter_mut().find(|seat| seat.path() == path)
    }

    pub fn weights(&self, path: &str) -> Option<DenseWeights<'_>> {
        let seat = self.seats.iter().position(|seat| seat.path() == path)?;
        self.weights.get(seat)?.dense().ok()
    }
}
