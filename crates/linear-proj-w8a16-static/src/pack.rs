//! Quantised weights in canonical order, and in the order the kernel streams them.

use linear_proj::DenseWeights;
use number_formats::RelativeL2;
use number_formats::int8_channel;
use rayon::prelude::*;

/// INT8 codes `[N, K]` row-major with a scale for each of the N rows.
pub(crate) struct Quantized {
    pub n: usize,
    pub k: usize,
    pub codes: Vec<i8>,
    pub scales: Vec<f32>,
    /// Relative L2 distance from the source over the whole tensor.
    pub conversion_error: f64,
}

impl Quantized {
    /// Quantises row by row; the source is decoded one row at a time.
    pub fn new(weights: &DenseWeights<'_>) -> Self {
        let (n, k) = (weights.n(), weights.k());
        let mut codes = vec![0i8; n * k];
        let mut scales = vec![0f32; n];
        let squares: Vec<RelativeL2> = codes
            .par_chunks_mut(k)
            .zip(&mut scales)
            .enumerate()
            .map_init(
                || (vec![0f32; k], vec![0f32; k]),
                |(row, back), (n, (codes, scale))| {
                    weights.decode_row(n, row);
                    *scale = int8_channel::quantize_row(row, codes);
                    int8_channel::dequantize_row(codes, *scale, back);
                    let mut error = RelativeL2::new();
                    row.iter().zip(back.iter()).for_each(|(&source, &back)| error.push(source, back));
                    error
                },
            )
            .collect();
        // Added in row order, so that the figure does not depend on how rayon split the rows.
        let total = squares.into_iter().fold(RelativeL2::new(), RelativeL2::merge);
        Quantized { n, k, codes, scales, conversion_error: total.value() }
    }
}

/// Output features of a tile.
#[cfg(kernels_built)]
pub(crate) const TILE_N: usize = 16;
/// Input features of a tile.
#[cfg(kernels_built)]
pub(crate) const TILE_K: usize = 32;
/// Codes of a tile.
#[cfg(kernels_built)]
pub(crate) const TILE: usize = TILE_N * TILE_K;

/// The byte of a tile's 512 whose low seven bits are the magnitude of the code of (feature, k). Its high bit is the sign of the
/// byte's neighbour, [`neighbour`].
///
/// Lane `4g + t` of a warp loads 16 bytes: the 8 codes from `k = 8t` on of feature g, then those of feature g + 8. They are the
/// A fragments of two `mma.m16n8k16`; which k a fragment's slot stands for is free, as long as the activations agree. Codes 0 and 1
/// of four are the low bytes of a word's halves, codes 2 and 3 the high ones, as `cuda/convert.cuh` takes pairs out of a word.
#[cfg(kernels_built)]
fn offset_in_tile(feature: usize, k: usize) -> usize {
    let (g, half) = (feature % 8, feature / 8);
    let (t, i) = (k / 8, k % 8);
    (4 * g + t) * 16 + half * 8 + i / 4 * 4 + [0, 2, 1, 3][i % 4]
}

/// The other byte of a half word.
#[cfg(kernels_built)]
fn neighbour(offset: usize) -> usize {
    offset ^ 1
}

#[cfg(kernels_built)]
const SIGN: u8 = 0x80;

/// The codes as `[ceil(N / 16), ceil(K / 32), 512]`, zero where the tiles reach past N or K.
#[cfg(kernels_built)]
pub(crate) fn pack(quantized: &Quantized) -> Vec<u8> {
    let (n, k) = (quantized.n, quantized.k);
    let tiles = k.div_ceil(TILE_K);
    let mut packed = vec![0u8; n.div_ceil(TILE_N) * tiles * TILE];
    packed.par_chunks_mut(tiles * TILE).enumerate().for_each(|(group, packed)| {
        let rows = quantized.codes[group * TILE_N * k..].chunks(k).take(TILE_N);
        for (feature, row) in rows.enumerate() {
            for (k, &code) in row.iter().enumerate() {
                let offset = k / TILE_K * TILE + offset_in_tile(feature, k % TILE_K);
                packed[offset] |= code.unsigned_abs();
                packed[neighbour(offset)] |= code as u8 & SIGN;
            }
        }
    });
    packed
}

/// The inverse of [`pack`] for the features of whole groups of 16: codes `[len, K]`.
#[cfg(kernels_built)]
pub(crate) fn unpack(packed: &[u8], k: usize) -> Vec<i8> {
    let tiles = k.div_ceil(TILE_K);
    let mut codes = Vec::with_capacity(packed.len());
    for group in packed.chunks(tiles * TILE) {
        for feature in 0..TILE_N {
            codes.extend((0..k).map(|k| {
                let offset = k / TILE_K * TILE + offset_in_tile(feature, k % TILE_K);
                let magnitude = (group[offset] & !SIGN) as i8;
                if group[neighbour(offset)] & SIGN == 0 { magnitude } else { -magnitude }
            }));
        }
    }
    codes
}

/// Rows of codes `[len, K]` as the numbers they stand for.
#[cfg(kernels_built)]
pub(crate) fn dequantize(codes: &[i8], scales: &[f32], k: usize) -> Vec<f32> {
    let mut weights = vec![0f32; codes.len()];
    for ((row, codes), &scale) in weights.chunks_mut(k).zip(codes.chunks(k)).zip(scales) {
        int8_channel::dequantize_row(codes, scale, row);
    }
    weights
}

#[cfg(all(test, kernels_built))]
mod tests {
    use super::*;

    #[test]
    fn a_lane_holds_the_fragments_that_the_mma_asks_for() {
        // Lane 4g + t: bytes 0 to 7 are row g, k = 8t on; bytes 8 to 15 are row g + 8, the same k.
        for lane in 0..32 {
            let (g, t) = (lane / 4, lane % 4);
            for (i, byte) in [0, 2, 1, 3, 4, 6, 5, 7].into_iter().enumerate() {
                assert_eq!(offset_in_tile(g, 8 * t + i), lane * 16 + byte);
                assert_eq!(offset_in_tile(g + 8, 8 * t + i), lane * 16 + 8 + byte);
            }
        }
    }

    /// What the kernel makes of a word: `cuda/convert.cuh` in whole numbers.
    fn pair(word: u32, above: bool) -> [i32; 2] {
        let exchanged = ((word & 0x00ff_00ff) << 8) | ((word >> 8) & 0x00ff_00ff);
        let bytes = if above { exchanged } else { word };
        [bytes & 0xffff, bytes >> 16].map(|half| {
            let magnitude = (half & 0x7f) as i32;
            if half & 0x8000 == 0 { magnitude } else { -magnitude }
        })
    }

    #[test]
    fn the_kernel_takes_pairs_out_of_words() {
        let codes: Vec<i8> = (0..16 * 32).map(|i| (i % 255 - 127) as i8).collect();
        let packed = pack(&Quantized {
            n: 16,
            k: 32,
            codes: codes.clone(),
            scales: vec![1.0; 16],
            conversion_error: 0.0,
        });
        for (index, word) in packed.chunks(4).enumerate() {
            let word = u32::from_le_bytes(word.try_into().unwrap());
            let (lane, feature_half, first) = (index / 4, index % 4 / 2, index % 2 * 4);
            let k = (lane / 4 + feature_half * 8) * 32 + lane % 4 * 8 + first;
            let expected: Vec<i32> = codes[k..k + 4].iter().map(|&code| i32::from(code)).collect();
            assert_eq!([pair(word, false), pair(word, true)].concat(), expected);
        }
    }

    #[test]
    fn packing_loses_nothing_and_pads_with_zeros() {
        for (n, k) in [(1, 1), (16, 32), (17, 33), (40, 100)] {
            let codes: Vec<i8> = (0..n * k).map(|i| (i as i32 * 7 % 255 - 127) as i8).collect();
            let scales = vec![1.0; n];
            let quantized = Quantized { n, k, codes, scales, conversion_error: 0.0 };
            let mut unpacked = unpack(&pack(&quantized), k);
            assert!(unpacked.split_off(n * k).iter().all(|&padding| padding == 0));
            assert_eq!(unpacked, quantized.codes, "N = {n}, K = {k}");
        }
    }
}
