//! What binding must know of `cuda/decode_band.cuh`, the form that decode kernels of all weight formats share.

use structure_core::Band;

/// Rows of one call: two column tiles of an MMA. Within them a row's bits do not depend on the others.
pub const BAND: Band = Band { min: 1, max: 16 };

/// Output features of a row group: the row side of an MMA.
pub const GROUP: usize = 16;

/// Matrices of one launch.
pub const MAX_MATRICES: usize = 4;
