use crate::{DenseWeights, Seat};

/// A model with seats, as far as binding needs to know it.
pub trait Host {
    /// Every seat, in the order of the checkpoint.
    fn seats(&self) -> Vec<&Seat>;

    /// The seat with this path.
    fn seat_mut(&mut self, path: &str) -> Option<&mut Seat>;

    /// The dense weights of the seat with this path, to bind from.
    fn weights(&self, path: &str) -> Option<DenseWeights<'_>>;
}
