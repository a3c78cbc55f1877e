//! Quantised weights in canonical order, and in the order the kernel streams them.

use std::ops::Range;

use linear_proj::DenseWeights;
use number_formats::RelativeL2;
use number_formats::nvfp4::{self, BLOCK, ScaleMode};
use rayon::prelude::*;
use structure_core::Refusal;

/// E2M1 codes `[N, K / 2]` and UE4M3 scales `[N, K / 16]` under one global scale.
pub(crate) struct Quantized {
    pub n: usize,
    pub k: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub global: f32,
    /// Relative L2 distance from the source over the whole tensor.
    pub conversion_error: f64,
}

impl Quantized {
    /// Quantises row by row, after a pass for the largest magnitude; the source is decoded one row at a time.
    pub fn new(weights: &DenseWeights<'_>) -> Self {
        let (n, k) = (weights.n(), weights.k());
        let global = ScaleMode::TwoLevel.global(amax(weights));
        let mut codes = vec![0u8; n * k / 2];
        let mut scales = vec![0u8; n * k / BLOCK];
        let errors: Vec<RelativeL2> = codes
            .par_chunks_mut(k / 2)
            .zip(scales.par_chunks_mut(k / BLOCK))
            .enumerate()
            .map_init(
                || (vec![0f32; k], vec![0f32; k]),
                |(row, back), (n, (codes, scales))| {
                    weights.decode_row(n, row);
                    nvfp4::quantize_row_under(row, global, codes, scales);
                    nvfp4::dequantize_row(codes, scales, global, back);
                    let mut error = RelativeL2::new();
                    row.iter().zip(back.iter()).for_each(|(&source, &back)| error.push(source, back));
                    error
                },
            )
            .collect();
        // Added in row order, so that the figure does not depend on how rayon split the rows.
        let total = errors.into_iter().fold(RelativeL2::new(), RelativeL2::merge);
        Quantized { n, k, codes, scales, global, conversion_error: total.value() }
    }

    /// Rows `features` as the numbers they stand for, `[len, K]`, times `global`.
    pub fn dequantized(&self, features: Range<usize>, global: f32) -> Result<Vec<f32>, Refusal> {
        if features.start > features.end || features.end > self.n {
            return Err(Refusal::ShapeMismatch {
                what: "features to dequantise".to_string(),
                expected: vec![0, self.n],
                got: vec![features.start, features.end],
            });
        }
        let mut weights = vec![0f32; features.len() * self.k];
        for (row, n) in weights.chunks_mut(self.k).zip(features) {
            self.decode(n, global, row);
        }
        Ok(weights)
    }

    /// One row as the numbers it stands for, times `global`.
    pub fn decode(&self, n: usize, global: f32, row: &mut [f32]) {
        let codes = &self.codes[n * self.k / 2..(n + 1) * self.k / 2];
        let scales = &self.scales[n * self.k / BLOCK..(n + 1) * self.k / BLOCK];
        nvfp4::dequantize_row(codes, scales, global, row);
    }
}

/// The largest magnitude; weights are finite.
fn amax(weights: &DenseWeights<'_>) -> f32 {
    (0..weights.n())
        .into_par_iter()
        .map_init(
            || vec![0f32; weights.k()],
            |row, n| {
                weights.decode_row(n, row);
                row.iter().fold(0f32, |amax, w| amax.max(w.abs()))
            },
        )
        .reduce(|| 0f32, f32::max)
}

#[cfg(kernels_built)]
pub(crate) mod tiles {
    //! Tiles of 16 features by 64 k. Lane `4g + t` of a warp has the blocks at `k = 16t` of features g and g + 8: 8 bytes of
    //! codes each, and their two scales.

    use linear_proj::decode_band::GROUP;
    use number_formats::nvfp4::BLOCK;
    use rayon::prelude::*;

    use super::Quantized;

    /// Input features of a tile.
    pub const TILE_K: usize = 64;
    /// Bytes of a tile's codes.
    pub const CODES: usize = GROUP * TILE_K / 2;
    /// Bytes of a tile's scales.
    pub const SCALES: usize = GROUP * TILE_K / BLOCK;

    /// Which of a tile's 64 blocks is the one of (feature, t), in the order of lanes with features g and g + 8 side by side.
    fn block_in_tile(feature: usize, t: usize) -> usize {
        (4 * (feature % 8) + t) * 2 + feature / 8
    }

    /// A block's 8 bytes of codes as two words. Pair p of a word's four is at the top of its halves after a shift by 4p: the even
    /// element in the low half, the odd one in the high half.
    fn words(codes: &[u8]) -> [u32; 2] {
        let element = |i: usize| u32::from(codes[i / 2] >> (i % 2 * 4) & 0xf);
        [0, 1].map(|word| {
            (0..4).fold(0, |bits, pair| {
                let (even, odd) = (element(word * 8 + 2 * pair), element(word * 8 + 2 * pair + 1));
                bits | even << (12 - 4 * pair) | odd << (28 - 4 * pair)
            })
        })
    }

    /// The inverse of [`words`].
    fn codes(bytes: &[u8]) -> [u8; BLOCK / 2] {
        std::array::from_fn(|byte| {
            let (word, pair) = (byte / 4, byte % 4);
            let at = |nibble: usize| bytes[word * 4 + nibble / 2] >> (nibble % 2 * 4) & 0xf;
            at(3 - pair) | at(7 - pair) << 4
        })
    }

    /// Codes `[ceil(N / 16), ceil(K / 64), 512]` and scales `[ceil(N / 16), ceil(K / 64), 64]`, zero past N and K.
    pub fn pack(quantized: &Quantized) -> (Vec<u8>, Vec<u8>) {
        let (n, blocks) = (quantized.n, quantized.k / BLOCK);
        let (groups, tiles) = (n.div_ceil(GROUP), quantized.k.div_ceil(TILE_K));
        let mut packed = vec![0u8; groups * tiles * CODES];
        let mut scales = vec![0u8; groups * tiles * SCALES];
        packed.par_chunks_mut(tiles * CODES).zip(scales.par_chunks_mut(tiles * SCALES)).enumerate().for_each(
            |(group, (packed, scales))| {
                for feature in 0..GROUP.min(n - group * GROUP) {
                    let row = (group * GROUP + feature) * blocks;
                    for block in 0..blocks {
                        let at = block / 4 * SCALES + block_in_tile(feature, block % 4);
                        scales[at] = quantized.scales[row + block];
                        let [low, high] = words(&quantized.codes[(row + block) * 8..(row + block + 1) * 8]);
                        packed[at * 8..at * 8 + 4].copy_from_slice(&low.to_le_bytes());
                        packed[at * 8 + 4..at * 8 + 8].copy_from_slice(&high.to_le_bytes());
                    }
                }
            },
        );
        (packed, scales)
    }

    /// The inverse of [`pack`] for whole groups of 16 features.
    pub fn unpack(packed: &[u8], packed_scales: &[u8], k: usize, global: f32) -> Quantized {
        let (blocks, tiles) = (k / BLOCK, k.div_ceil(TILE_K));
        let n = packed.len() / (tiles * CODES) * GROUP;
        let mut quantized = Quantized {
            n,
            k,
            codes: Vec::with_capacity(n * k / 2),
            scales: Vec::with_capacity(n * blocks),
            global,
            conversion_error: 0.0,
        };
        for feature in 0..n {
            for block in 0..blocks {
                let tile = feature / GROUP * tiles + block / 4;
                let at = tile * SCALES + block_in_tile(feature % GROUP, block % 4);
                quantized.scales.push(packed_scales[at]);
                quantized.codes.extend(codes(&packed[at * 8..at * 8 + 8]));
            }
        }
        quantized
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn packing_loses_nothing_and_pads_with_zeros() {
            for (n, k) in [(1, 16), (16, 64), (17, 80), (40, 208)] {
                let codes: Vec<u8> = (0..n * k / 2).map(|i| (i * 37 % 256) as u8).collect();
                let scales: Vec<u8> = (0..n * k / 16).map(|i| (i % 126 + 1) as u8).collect();
                let quantized = Quantized { n, k, codes, scales, global: 1.0, conversion_error: 0.0 };
                let (packed, packed_scales) = pack(&quantized);
                let mut unpacked = unpack(&packed, &packed_scales, k, 1.0);
                assert!(unpacked.codes.split_off(n * k / 2).iter().all(|&padding| padding == 0));
                assert!(unpacked.scales.split_off(n * k / 16).iter().all(|&padding| padding == 0));
                assert_eq!(unpacked.codes, quantized.codes, "N = {n}, K = {k}");
                assert_eq!(unpacked.scales, quantized.scales, "N = {n}, K = {k}");
                let nonzero = |scales: &[u8]| scales.iter().filter(|&&scale| scale != 0).count();
                assert_eq!(nonzero(&packed_scales), nonzero(&quantized.scales));
            }
        }

        #[test]
        fn a_word_shifts_its_pairs_to_the_top() {
            // Elements 0 to 15 with their index as code: byte i holds 2i and 2i + 1.
            let bytes: Vec<u8> = (0..8).map(|i| (2 * i) | (2 * i + 1) << 4).collect();
            for (word, bits) in words(&bytes).into_iter().enumerate() {
                for pair in 0..4 {
                    let shifted = bits << (4 * pair);
                    let element = (word * 8 + 2 * pair) as u32;
                    assert_eq!((shifted >> 12 & 0xf, shifted >> 28), (element, element + 1));
                }
            }
        }
    }
}
