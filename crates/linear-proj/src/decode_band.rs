//! What binding must know of `cuda/decode_band.cuh`, the form that decode kernels of all weight formats share.

use structure_core::{Band, ComputeCapability};

/// Rows of one call: two column tiles of an MMA.
pub const BAND: Band = Band { min: 1, max: 16 };

/// Output features of a row group: the row side of an MMA.
pub const GROUP: usize = 16;

/// Into how many parts K is cut, each for one block of a cluster: more where N alone gives too few blocks to keep the memory bus
/// busy. By N and the architecture alone, so that the order of a sum does not depend on M.
pub fn slices(n: usize, device: ComputeCapability) -> usize {
    // Clusters are sm_90's.
    if device.major < 9 {
        return 1;
    }
    match n.div_ceil(GROUP) {
        0..=63 => 8,
        64..=127 => 4,
        128..=2111 => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cut_goes_by_features_and_there_is_none_without_clusters() {
        let hopper = ComputeCapability { major: 9, minor: 0 };
        let cuts = [(1, 8), (1008, 8), (1009, 4), (2048, 2), (33_776, 2), (33_777, 1), (248_320, 1)];
        for (n, cut) in cuts {
            assert_eq!(slices(n, hopper), cut, "N = {n}");
            assert_eq!(slices(n, ComputeCapability { major: 8, minor: 6 }), 1);
        }
    }
}
