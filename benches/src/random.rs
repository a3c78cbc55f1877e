//! Random data: zeros and patterns run faster than real weights do.

use half::bf16;
use rayon::prelude::*;

/// `len` numbers between -1 and 1, the same for the same seed (SplitMix64, Steele, Lea and Flood, 2014).
pub fn uniform_bf16(len: usize, seed: u64) -> Vec<bf16> {
    let number = |index: usize| {
        let mut z = (index as u64).wrapping_add(seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bf16::from_f32((z >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..len).into_par_iter().map(number).collect()
}

/// `len` numbers from 0 to 1, as a calibration of input channels.
pub fn magnitudes(len: usize, seed: u64) -> Vec<f32> {
    uniform_bf16(len, seed).into_iter().map(|value| value.to_f32().abs()).collect()
}
