//! What the parts of the model load themselves from.

use structure_core::Refusal;

use crate::Config;
use crate::checkpoint::Checkpoint;
use crate::random::RandomTensors;
use crate::seats::{SeatId, Seats};
use crate::tensor::Weights;

/// The tensors, the config that fixes their shapes, and the table that projections go to.
pub(crate) struct Loader<'a> {
    pub config: &'a Config,
    pub checkpoint: Source,
    pub seats: Seats,
}

/// Where tensors come from.
pub(crate) enum Source {
    Checkpoint(Checkpoint),
    Random(RandomTensors),
}

impl Loader<'_> {
    /// Makes the projection at `path`, `[n, k]`, a seat.
    pub fn seat(&mut self, path: &str, n: usize, k: usize) -> Result<SeatId, Refusal> {
        let weights = self.weights(path, n, k)?;
        Ok(self.seats.add(path, weights))
    }

    /// The weights of the projection at `path`, `[n, k]`.
    pub fn weights(&mut self, path: &str, n: usize, k: usize) -> Result<Weights, Refusal> {
        match &mut self.checkpoint {
            Source::Checkpoint(checkpoint) => checkpoint.projection(path, n, k),
            Source::Random(random) => random.projection(n, k),
        }
    }
}

impl Source {
    /// Whether there is a tensor of this name. Random experts come one by one.
    pub fn contains(&self, tensor: &str) -> bool {
        match self {
            Source::Checkpoint(checkpoint) => checkpoint.contains(tensor),
            Source::Random(_) => false,
        }
    }

    /// A tensor `[..., N, K]` as weights whose output features are all its leading dimensions.
    pub fn weights(&mut self, tensor: &str, shape: &[usize]) -> Result<Weights, Refusal> {
        match self {
            Source::Checkpoint(checkpoint) => checkpoint.weights(tensor, shape),
            Source::Random(random) => {
                let k = shape.last().copied().unwrap_or(1);
                random.projection(shape.iter().product::<usize>() / k.max(1), k)
            }
        }
    }

    /// A small tensor.
    pub fn vector(&mut self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, Refusal> {
        match self {
            Source::Checkpoint(checkpoint) => checkpoint.vector(tensor, shape),
            Source::Random(_) => Ok(RandomTensors::vector(tensor, shape.iter().product())),
        }
    }
}
