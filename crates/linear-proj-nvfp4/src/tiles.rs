//! Tiles of 16 features by 64 k. Lane `4g + t` of a warp has the blocks at `k = 16t` of features g and g + 8: 8 bytes of
//! codes each, and their two scales. The bits lie as `cuda/nvfp4_weights.cuh` decodes them with the fewest operations.

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

/// Where the kernel finds the bits of one pair of elements: it rotates a word right by so many bits, then takes those of
/// [`PAIR`]. The word is the first or the second of a block, or, for the last two pairs, what is left of both together.
struct Place {
    word: Word,
    rotation: u32,
}

enum Word {
    First,
    Second,
    Rest,
}

/// Bits of a pair, for the even element; those of the odd one are 16 higher: the E2M1 code's sign, then its other three bits.
const PAIR: [u32; 4] = [15, 8, 7, 6];

/// Of the eight pairs of a block. A shift left by 6 is a rotation right by 26 of which no bit goes round.
const PLACES: [Place; BLOCK / 2] = [
    Place { word: Word::First, rotation: 0 },
    Place { word: Word::First, rotation: 26 },
    Place { word: Word::First, rotation: 6 },
    Place { word: Word::Second, rotation: 0 },
    Place { word: Word::Second, rotation: 26 },
    Place { word: Word::Second, rotation: 6 },
    Place { word: Word::Rest, rotation: 30 },
    Place { word: Word::Rest, rotation: 4 },
];

/// Bits of the rest that are the first word's own; the others are the second word's, two to the right.
const REST_OF_FIRST: u32 = 0x0c18_0c18;

/// Which bit of a block's two words is bit `bit`, 3 for the sign, of the code of element `element`.
fn bit_of_code(element: usize, bit: usize) -> (usize, u32) {
    let Place { word, rotation } = &PLACES[element / 2];
    let at = (PAIR[3 - bit] + 16 * (element % 2) as u32 + rotation) % 32;
    match word {
        Word::First => (0, at),
        Word::Second => (1, at),
        Word::Rest if REST_OF_FIRST >> at & 1 == 1 => (0, at),
        Word::Rest => (1, at - 2),
    }
}

/// A block's 8 bytes of codes as two words.
fn words(codes: &[u8]) -> [u32; 2] {
    let mut words = [0; 2];
    for element in 0..BLOCK {
        for bit in 0..4 {
            let (word, at) = bit_of_code(element, bit);
            words[word] |= u32::from(codes[element / 2] >> (element % 2 * 4 + bit) & 1) << at;
        }
    }
    words
}

/// The inverse of [`words`].
fn codes(words: [u32; 2]) -> [u8; BLOCK / 2] {
    let mut codes = [0; BLOCK / 2];
    for element in 0..BLOCK {
        for bit in 0..4 {
            let (word, at) = bit_of_code(element, bit);
            codes[element / 2] |= ((words[word] >> at & 1) as u8) << (element % 2 * 4 + bit);
        }
    }
    codes
}

/// The exponent that a packed scale of 1.0 has. With five bits of it E4M3's subnormal numbers are normal ones.
const SCALE_BIAS: u32 = 22;

/// A UE4M3 scale with five exponent bits above its three mantissa bits; zero stays zero.
fn pack_scale(code: u8) -> u8 {
    let (exponent, mantissa) = (u32::from(code >> 3), u32::from(code & 7));
    let packed = match (exponent, mantissa) {
        (0, 0) => 0,
        // mantissa * 2^-9, the highest bit taken as the one before the point
        (0, _) => {
            let top = mantissa.ilog2();
            (SCALE_BIAS - 9 + top) << 3 | (mantissa << (3 - top) & 7)
        }
        _ => (exponent + SCALE_BIAS - 7) << 3 | mantissa,
    };
    packed as u8
}

/// The inverse of [`pack_scale`].
fn unpack_scale(packed: u8) -> u8 {
    let (exponent, mantissa) = (u32::from(packed >> 3), u32::from(packed & 7));
    let code = match exponent + 7 {
        7 => 0,
        exponent if exponent <= SCALE_BIAS => (8 | mantissa) >> (SCALE_BIAS + 1 - exponent),
        exponent => (exponent - SCALE_BIAS) << 3 | mantissa,
    };
    code as u8
}

/// The codes of a block as they are packed under its scale: what a scale of zero makes of them are zeros with their signs.
fn codes_under(scale: u8, codes: &[u8]) -> [u8; BLOCK / 2] {
    std::array::from_fn(|byte| if scale == 0 { codes[byte] & 0x88 } else { codes[byte] })
}

/// A tile's codes and scales.
type Tile<'a> = (&'a [u8], &'a [u8]);
type TileMut<'a> = (&'a mut [u8], &'a mut [u8]);
/// A block's codes and scale.
type Block = ([u8; BLOCK / 2], u8);

/// How blocks lie within a tile.
pub struct Layout {
    /// Puts a block of a feature, by its number in the tile, into the tile's codes and scales.
    pub(crate) put: fn(tile: TileMut<'_>, feature: usize, block: usize, codes: &[u8], scale: u8),
    /// The inverse: codes and scale.
    pub(crate) take: fn(tile: Tile<'_>, feature: usize, block: usize) -> Block,
}

/// As the kernels that convert to BF16 have them. Codes under a scale of zero come back as zeros with their signs.
pub const CONVERTED: Layout = Layout {
    put: |(packed, scales), feature, block, codes, scale| {
        let at = block_in_tile(feature, block);
        scales[at] = pack_scale(scale);
        let [first, second] = words(&codes_under(scale, codes));
        packed[at * 8..at * 8 + 4].copy_from_slice(&first.to_le_bytes());
        packed[at * 8 + 4..at * 8 + 8].copy_from_slice(&second.to_le_bytes());
    },
    take: |(packed, scales), feature, block| {
        let at = block_in_tile(feature, block);
        let word =
            |word: usize| u32::from_le_bytes(std::array::from_fn(|byte| packed[at * 8 + word * 4 + byte]));
        (codes([word(0), word(1)]), unpack_scale(scales[at]))
    },
};

impl Layout {
    /// Codes `[ceil(N / 16), ceil(K / 64), 512]` and scales `[ceil(N / 16), ceil(K / 64), 64]`, zero past N and K.
    pub fn pack(&self, quantized: &Quantized) -> (Vec<u8>, Vec<u8>) {
        let (n, blocks) = (quantized.n, quantized.k / BLOCK);
        let (groups, tiles) = (n.div_ceil(GROUP), quantized.k.div_ceil(TILE_K));
        let mut packed = vec![0u8; groups * tiles * CODES];
        let mut scales = vec![0u8; groups * tiles * SCALES];
        let by_group = packed.par_chunks_mut(tiles * CODES).zip(scales.par_chunks_mut(tiles * SCALES));
        by_group.enumerate().for_each(|(group, (packed, scales))| {
            for feature in 0..GROUP.min(n - group * GROUP) {
                let row = (group * GROUP + feature) * blocks;
                for block in 0..blocks {
                    let tile = block / 4;
                    let tile = (&mut packed[tile * CODES..][..CODES], &mut scales[tile * SCALES..][..SCALES]);
                    let codes = &quantized.codes[(row + block) * 8..(row + block + 1) * 8];
                    (self.put)(tile, feature, block % 4, codes, quantized.scales[row + block]);
                }
            }
        });
        (packed, scales)
    }

    /// The inverse of [`pack`](Self::pack) for whole groups of 16 features.
    pub fn unpack(&self, packed: &[u8], packed_scales: &[u8], k: usize, global: f32) -> Quantized {
        let (blocks, tiles) = (k / BLOCK, k.div_ceil(TILE_K));
        let n = packed.len() / (tiles * CODES) * GROUP;
        let (mut codes, mut scales) = (Vec::with_capacity(n * k / 2), Vec::with_capacity(n * blocks));
        for feature in 0..n {
            for block in 0..blocks {
                let tile = feature / GROUP * tiles + block / 4;
                let tile = (&packed[tile * CODES..][..CODES], &packed_scales[tile * SCALES..][..SCALES]);
                let (of_block, scale) = (self.take)(tile, feature % GROUP, block % 4);
                codes.extend(of_block);
                scales.push(scale);
            }
        }
        Quantized { n, k, codes, scales, global, conversion_error: 0.0 }
    }
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
            let (packed, packed_scales) = CONVERTED.pack(&quantized);
            let mut unpacked = CONVERTED.unpack(&packed, &packed_scales, k, 1.0);
            assert!(unpacked.codes.split_off(n * k / 2).iter().all(|&padding| padding == 0));
            assert!(unpacked.scales.split_off(n * k / 16).iter().all(|&padding| padding == 0));
            assert_eq!(unpacked.codes, quantized.codes, "N = {n}, K = {k}");
            assert_eq!(unpacked.scales, quantized.scales, "N = {n}, K = {k}");
            let nonzero = |scales: &[u8]| scales.iter().filter(|&&scale| scale != 0).count();
            assert_eq!(nonzero(&packed_scales), nonzero(&quantized.scales));
        }
    }

    #[test]
    fn every_bit_of_a_block_has_a_place_of_its_own() {
        let mut taken = [0u32; 2];
        for element in 0..BLOCK {
            for bit in 0..4 {
                let (word, at) = bit_of_code(element, bit);
                assert_eq!(taken[word] >> at & 1, 0, "element {element}, bit {bit}");
                taken[word] |= 1 << at;
            }
        }
        assert_eq!(taken, [u32::MAX; 2]);
    }

    /// The kernel's own steps, `e2m1_pairs` in cuda/nvfp4_weights.cuh.
    fn pairs([first, second]: [u32; 2]) -> [u32; 8] {
        let rest = first & 0x0c18_0c18 | second << 2 & !0x0c18_0c18;
        [
            first,
            first << 6,
            first.rotate_right(6),
            second,
            second << 6,
            second.rotate_right(6),
            rest << 2,
            rest.rotate_right(4),
        ]
        .map(|pair| pair & 0x81c0_81c0)
    }

    #[test]
    fn the_kernels_steps_find_each_code() {
        for seed in 0..1000u64 {
            let bytes = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed << 7).to_le_bytes();
            for (pair, bits) in pairs(words(&bytes)).into_iter().enumerate() {
                for (half, code) in [bytes[pair] & 0xf, bytes[pair] >> 4].into_iter().enumerate() {
                    // BF16 times 2^126 is the number; half is a subnormal.
                    let number = f32::from_bits((bits >> (16 * half)) << 16) * 2f32.powi(126);
                    assert_eq!(number, number_formats::e2m1::decode(code), "seed {seed}, pair {pair}");
                }
            }
        }
    }

    #[test]
    fn every_scale_keeps_its_value() {
        for code in 0..127u8 {
            let packed = u32::from(pack_scale(code));
            assert_eq!(unpack_scale(packed as u8), code);
            // The kernel's own step: sixteen times the byte below three set bits, as BF16 a multiple of the scale by 2^119.
            let value = f32::from_bits((packed << 4 | 0x7000) << 16);
            if code > 0 {
                assert_eq!(f64::from(value), f64::from(number_formats::e4m3::decode(code)) * 2f64.powi(119));
            }
        }
    }
}
