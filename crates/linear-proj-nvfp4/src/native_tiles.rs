//! Tiles of 16 features by 64 k as the block-scaled tensor core of sm_120a takes them: the A fragment of PTX's `mma.m16n8k64` for
//! E2M1, and UE4M3 scales as they are. Tiles lie as those of [`tiles`](crate::tiles) do and have as many bytes.
//!
//! Eight codes make a word, the lowest k in the lowest bits. Lane `4g + t` of a warp has four words: at `k = 8t` of features g and
//! g + 8, then at `k = 32 + 8t` of both. Scales are feature by feature, four of each in the order of k.

use number_formats::nvfp4::BLOCK;

use crate::tiles::Layout;

/// Bytes of a word of codes, the elements of one feature that a lane has in a row.
const WORD: usize = 4;
/// Words of a block.
const WORDS: usize = BLOCK / 2 / WORD;

/// Which of a tile's 128 words has elements `8 * word` on of a feature.
fn word_in_tile(feature: usize, word: usize) -> usize {
    let (lane, upper_k) = (4 * (feature % 8) + word % 4, word / 4);
    4 * lane + 2 * upper_k + feature / 8
}

/// Which of a tile's 64 scales is the one of a feature's block.
fn scale_in_tile(feature: usize, block: usize) -> usize {
    4 * feature + block
}

/// As the block-scaled tensor core has them.
pub const NATIVE: Layout = Layout {
    put: |(packed, scales), feature, block, codes, scale| {
        scales[scale_in_tile(feature, block)] = scale;
        for (word, codes) in codes.chunks_exact(WORD).enumerate() {
            let at = word_in_tile(feature, block * WORDS + word) * WORD;
            packed[at..at + WORD].copy_from_slice(codes);
        }
    },
    take: |(packed, scales), feature, block| {
        let code =
            |byte: usize| packed[word_in_tile(feature, block * WORDS + byte / WORD) * WORD + byte % WORD];
        (std::array::from_fn(code), scales[scale_in_tile(feature, block)])
    },
};

#[cfg(test)]
mod tests {
    use linear_proj::decode_band::GROUP;
    use number_formats::{e2m1, e4m3, nvfp4};

    use super::*;
    use crate::Quantized;
    use crate::tiles::{CODES, SCALES, TILE_K};

    const SHAPES: [(usize, usize); 4] = [(1, 16), (16, 64), (17, 80), (40, 208)];

    /// Codes and scales of every kind, in no order: 37 and 55 share no factor with 256 and 127.
    fn quantized(n: usize, k: usize, seed: usize) -> Quantized {
        let codes = (0..n * k / 2).map(|i| ((i + seed) * 37 % 256) as u8).collect();
        let scales = (0..n * k / BLOCK).map(|i| ((i + seed) * 55 % 127) as u8).collect();
        Quantized { n, k, codes, scales, global: 1.0, conversion_error: 0.0 }
    }

    #[test]
    fn packing_loses_nothing_and_pads_with_zeros() {
        for (n, k) in SHAPES {
            let quantized = quantized(n, k, 1);
            let (packed, packed_scales) = NATIVE.pack(&quantized);
            let mut unpacked = NATIVE.unpack(&packed, &packed_scales, k, 1.0);
            assert!(unpacked.codes.split_off(n * k / 2).iter().all(|&padding| padding == 0));
            assert!(unpacked.scales.split_off(n * k / BLOCK).iter().all(|&padding| padding == 0));
            assert_eq!(unpacked.codes, quantized.codes, "N = {n}, K = {k}");
            assert_eq!(unpacked.scales, quantized.scales, "N = {n}, K = {k}");
            let nonzero = |bytes: &[u8]| bytes.iter().filter(|&&byte| byte != 0).count();
            assert_eq!(nonzero(&packed), nonzero(&quantized.codes));
            assert_eq!(nonzero(&packed_scales), nonzero(&quantized.scales));
        }
    }

    /// The operands of one `mma.sync.m16n8k64` of `kind::mxf4nvf4` with `scale_vec::4X` and selectors of zero: what each lane of
    /// a warp passes.
    struct Operands {
        a: [[u32; 4]; 32],
        scale_a: [u32; 32],
        b: [[u32; 2]; 32],
        scale_b: [u32; 32],
    }

    impl Operands {
        /// `D[16][8]` by the formulas of the PTX ISA ("Matrix Fragments for mma.m16n8k64", "Block Scaling for mma.sync"), in FP64.
        fn multiply(&self) -> [[f64; 8]; 16] {
            let (mut a, mut b) = ([[0.0; 64]; 16], [[0.0; 8]; 64]);
            for lane in 0..32 {
                let (group, thread) = (lane / 4, lane % 4);
                let code = |words: &[u32], i: usize| {
                    f64::from(e2m1::decode((words[i / 8] >> (4 * (i % 8)) & 0xf) as u8))
                };
                for i in 0..32 {
                    let row = if i < 8 || (16..24).contains(&i) { group } else { group + 8 };
                    let col = thread * 8 + (i & 7) + if i < 16 { 0 } else { 32 };
                    a[row][col] = code(&self.a[lane], i);
                }
                for i in 0..16 {
                    let row = thread * 8 + (i & 7) + if i < 8 { 0 } else { 32 };
                    b[row][group] = code(&self.b[lane], i);
                }
            }
            let scale = |word: u32, k: usize| f64::from(e4m3::decode((word >> (8 * (k / 16))) as u8));
            // Of a quad's four lanes the first two give scale_A, of its row and of the one eight below; the first gives scale_B.
            let scale_a = |row: usize, k: usize| scale(self.scale_a[row % 8 * 4 + row / 8], k);
            let scale_b = |col: usize, k: usize| scale(self.scale_b[col * 4], k);
            let product = |row: usize, col: usize, k: usize| {
                a[row][k] * scale_a(row, k) * (b[k][col] * scale_b(col, k))
            };
            std::array::from_fn(|row| {
                std::array::from_fn(|col| (0..64).map(|k| product(row, col, k)).sum::<f64>())
            })
        }
    }

    /// The bytes from `4 * word` on as a word.
    fn word(bytes: &[u8], word: usize) -> u32 {
        u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[4 * word + byte]))
    }

    /// What the quantiser in cuda/nvfp4_native.cuh leaves of eight rows for one tile, each lane's codes and scales.
    fn fragment_of_rows(rows: &Quantized, tile: usize) -> ([[u32; 2]; 32], [u32; 32]) {
        let (mut codes, mut scales) = ([[0; 2]; 32], [0; 32]);
        for m in 0..8 {
            for vector in (0..8).filter(|vector| tile * 8 + vector < rows.k / 8) {
                codes[4 * m + vector % 4][vector / 4] = word(&rows.codes, m * rows.k / 8 + tile * 8 + vector);
                if vector % 2 == 0 {
                    let scale = rows.scales[m * rows.k / BLOCK + tile * 4 + vector / 2];
                    (0..4).for_each(|t| scales[4 * m + t] |= u32::from(scale) << (8 * (vector / 2)));
                }
            }
        }
        (codes, scales)
    }

    /// Products are multiples of 2^-20 below 2^23, so their sums over K are exact in FP64 in any order.
    #[test]
    fn the_tensor_core_finds_each_code_and_its_scale() {
        for (n, k) in SHAPES {
            let (weights, rows) = (quantized(n, k, 5), quantized(8, k, 11));
            let (packed, packed_scales) = NATIVE.pack(&weights);
            let tiles = k.div_ceil(TILE_K);
            let numbers = |of: &Quantized, row: usize| {
                let (codes, scales) =
                    (row * k / 2..(row + 1) * k / 2, row * k / BLOCK..(row + 1) * k / BLOCK);
                let mut numbers = vec![0f32; k];
                nvfp4::dequantize_row(&of.codes[codes], &of.scales[scales], 1.0, &mut numbers);
                numbers
            };
            for group in 0..n.div_ceil(GROUP) {
                let mut sums = [[0f64; 8]; 16];
                for tile in 0..tiles {
                    let at = group * tiles + tile;
                    let (b, scale_b) = fragment_of_rows(&rows, tile);
                    // As Format::Cursor in cuda/nvfp4_native.cuh loads them.
                    let operands = Operands {
                        a: std::array::from_fn(|lane| {
                            std::array::from_fn(|register| {
                                word(&packed, at * CODES / 4 + lane * 4 + register)
                            })
                        }),
                        scale_a: std::array::from_fn(|lane| {
                            word(&packed_scales, at * SCALES / 4 + lane / 4 + lane % 2 * 8)
                        }),
                        b,
                        scale_b,
                    };
                    let products = operands.multiply();
                    sums.iter_mut()
                        .flatten()
                        .zip(products.iter().flatten())
                        .for_each(|(sum, product)| *sum += product);
                }
                for (feature, sums) in (group * GROUP..).zip(sums) {
                    for (m, sum) in sums.into_iter().enumerate() {
                        let expected: f64 = if feature < n {
                            let (w, x) = (numbers(&weights, feature), numbers(&rows, m));
                            w.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum()
                        } else {
                            0.0
                        };
                        assert_eq!(sum, expected, "N = {n}, K = {k}, feature {feature}, row {m}");
                    }
                }
            }
        }
    }
}
