//! Tiles of 16 features by 64 k. Lane `4g + t` of a warp has the blocks at `k = 16t` of features g and g + 8: 8 bytes of
//! codes each, and their two scales.

use linear_proj::decode_band::GROUP;
use number_formats::nvfp4::BLOCK;
use rayon::prelude::*;

use crate::Quantized;

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
