//! What the parts of the model load themselves from.

use structure_core::Refusal;

use crate::Config;
use crate::checkpoint::Checkpoint;
use crate::seats::{SeatId, Seats};
use crate::tensor::Weights;

/// A checkpoint, the config that fixes its shapes, and the table that its projections go to.
pub(crate) struct Loader<'a> {
    pub config: &'a Config,
    pub checkpoint: Checkpoint,
    pub seats: Seats,
}

impl Loader<'_> {
    /// Makes the projection at `path`, `[n, k]`, a seat.
    pub fn seat(&mut self, path: &str, n: usize, k: usize) -> Result<SeatId, Refusal> {
        let weights = self.weights(path, n, k)?;
        Ok(self.seats.add(path, weights))
    }

    /// The weights of the projection at `path`, `[n, k]`.
    pub fn weights(&mut self, path: &str, n: usize, k: usize) -> Result<Weights, Refusal> {
        self.checkpoint.projection(path, n, k)
    }
}
