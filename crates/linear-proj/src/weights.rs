use half::{bf16, f16};
use number_formats::nvfp4::Nvfp4View;
use number_formats::{FormatError, fp8_block};
use structure_core::{DType, Refusal};

/// Dense weights `[N, K]`, row-major, as a checkpoint maps them: BF16, F16 or F32 elements in little-endian bytes, FP8 codes in
/// blocks, or NVFP4.
///
/// The bytes need no alignment, and rows are decoded one at a time, so a large tensor is never held twice.
#[derive(Clone, Copy, Debug)]
pub struct DenseWeights<'a> {
    n: usize,
    k: usize,
    source: Source<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    Elements(DType, &'a [u8]),
    Fp8(Fp8Blocks<'a>),
    Nvfp4(Nvfp4View<'a>),
}

/// FP8 weights with one scale per 128x128 block; see [`fp8_block`].
///
/// One tensor may hold several matrices under each other, such as those of experts, each with blocks of its own.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Blocks<'a> {
    /// E4M3 codes `[N, K]`.
    pub codes: &'a [u8],
    /// Scales of all matrices, `[matrices, ceil(features / 128), ceil(K / 128)]`.
    pub scale_inv: &'a [f32],
    /// Features of one matrix.
    pub features: usize,
    /// Which feature of the tensor the first row of `codes` is.
    pub first: usize,
}

impl<'a> Fp8Blocks<'a> {
    /// The scales of row `n` of the codes.
    fn scales(&self, n: usize, k: usize) -> &'a [f32] {
        let (matrix, feature) = ((self.first + n) / self.features, (self.first + n) % self.features);
        let blocks = k.div_ceil(fp8_block::BLOCK);
        let row = matrix * self.features.div_ceil(fp8_block::BLOCK) + feature / fp8_block::BLOCK;
        self.scale_inv.get(row * blocks..(row + 1) * blocks).unwrap_or(&[])
    }
}

impl<'a> DenseWeights<'a> {
    /// Weights over raw bytes.
    ///
    /// # Errors
    /// [`Refusal::DTypeOutside`] for another type than BF16, F16 or F32, [`Refusal::ShapeMismatch`] when there are
    /// more or fewer bytes than the shape says.
    pub fn new(n: usize, k: usize, dtype: DType, bytes: &'a [u8]) -> Result<Self, Refusal> {
        const TAKEN: &[DType] = &[DType::BF16, DType::F16, DType::F32];
        if !TAKEN.contains(&dtype) {
            return Err(Refusal::DTypeOutside {
                what: "dense weights".to_string(),
                dtype: dtype.to_string(),
                accepted: DType::list(TAKEN),
            });
        }
        check_bytes(n, k, dtype, bytes)?;
        Ok(DenseWeights { n, k, source: Source::Elements(dtype, bytes) })
    }

    /// Weights over FP8 blocks. Each value is rounded to BF16, as those who publish such checkpoints do; so is the type.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when there are more or fewer codes than the shape says, or too few scales for them.
    pub fn from_fp8_blocks(n: usize, k: usize, blocks: Fp8Blocks<'a>) -> Result<Self, Refusal> {
        check_bytes(n, k, DType::F8_E4M3, blocks.codes)?;
        if n > 0 && (blocks.features == 0 || blocks.scales(n - 1, k).len() != k.div_ceil(fp8_block::BLOCK)) {
            return Err(Refusal::ShapeMismatch {
                what: "scales of FP8 weights".to_string(),
                expected: vec![n.div_ceil(fp8_block::BLOCK), k.div_ceil(fp8_block::BLOCK)],
                got: vec![blocks.scale_inv.len()],
            });
        }
        Ok(DenseWeights { n, k, source: Source::Fp8(blocks) })
    }

    /// Weights that are NVFP4 already: an implementation of that format takes them over as they are, any other reads their values,
    /// which are FP32.
    pub fn from_nvfp4(view: Nvfp4View<'a>) -> Self {
        DenseWeights { n: view.n(), k: view.k(), source: Source::Nvfp4(view) }
    }

    /// The codes and scales, if that is what they are.
    pub fn nvfp4(&self) -> Option<Nvfp4View<'a>> {
        match self.source {
            Source::Nvfp4(view) => Some(view),
            _ => None,
        }
    }

    /// Weights over a slice of binary32.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when the slice does not hold N times K elements.
    pub fn from_f32(n: usize, k: usize, elements: &'a [f32]) -> Result<Self, Refusal> {
        Self::new(n, k, DType::F32, bytemuck::cast_slice(elements))
    }

    /// Weights over a slice of BF16.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when the slice does not hold N times K elements.
    pub fn from_bf16(n: usize, k: usize, elements: &'a [bf16]) -> Result<Self, Refusal> {
        Self::new(n, k, DType::BF16, bytemuck::cast_slice(elements))
    }

    /// Where the elements lie, N and K: equal for weights that are the same memory.
    pub fn identity(&self) -> (usize, usize, usize) {
        let elements = match self.source {
            Source::Elements(_, bytes) => bytes,
            Source::Fp8(blocks) => blocks.codes,
            Source::Nvfp4(view) => view.codes(),
        };
        (elements.as_ptr().addr(), self.n, self.k)
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The type of the values: BF16 for FP8 blocks too, F32 for NVFP4.
    pub fn dtype(&self) -> DType {
        match self.source {
            Source::Elements(dtype, _) => dtype,
            Source::Fp8(_) => DType::BF16,
            Source::Nvfp4(_) => DType::F32,
        }
    }

    /// Decodes row `n` into `out`, which holds K elements; exact for BF16, F16 and F32, rounded to BF16 for FP8 blocks, and to
    /// FP32 for NVFP4 where the global scale is no power of two.
    ///
    /// A row past the last one is left as it was.
    pub fn decode_row(&self, n: usize, out: &mut [f32]) {
        match self.source {
            Source::Nvfp4(view) => view.decode_row(n, out),
            Source::Fp8(blocks) => {
                if let Some(codes) = blocks.codes.get(n * self.k..(n + 1) * self.k) {
                    fp8_block::dequantize_row_bf16(codes, blocks.scales(n, self.k), out);
                }
            }
            Source::Elements(dtype, bytes) => {
                let stride = self.k * dtype.size();
                let row = bytes.get(n * stride..(n + 1) * stride).unwrap_or(&[]);
                match dtype {
                    // Without half's care for the payloads of NaNs this is a shift, which compiles to whole vectors.
                    DType::BF16 => {
                        decode(row, out, |bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
                    }
                    DType::F16 => decode(row, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
                    _ => decode(row, out, f32::from_le_bytes),
                }
            }
        }
    }

    /// All N rows decoded, `[N, K]`.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.n * self.k];
        for (n, row) in out.chunks_exact_mut(self.k.max(1)).enumerate() {
            self.decode_row(n, row);
        }
        out
    }

    /// All N rows rounded to BF16, `[N, K]`; over all cores, as it is for uploading whole models.
    pub fn to_bf16(&self) -> Vec<bf16> {
        use rayon::prelude::*;
        let mut out = vec![bf16::ZERO; self.n * self.k];
        out.par_chunks_exact_mut(self.k.max(1)).enumerate().for_each_init(
            || vec![0.0; self.k],
            |decoded, (n, row)| {
                self.decode_row(n, decoded);
                for (out, value) in row.iter_mut().zip(decoded) {
                    *out = bf16::from_f32(*value);
                }
            },
        );
        out
    }

    /// Refuses weights with a NaN or an infinity among them, and NVFP4 with a block scale that is no UE4M3 code.
    ///
    /// # Errors
    /// [`Refusal::NonFinite`] with the first such element, [`Refusal::ValueOutside`] with the first such scale.
    pub fn check_finite(&self, what: &str) -> Result<(), Refusal> {
        use rayon::prelude::*;
        if let Some(Err(FormatError::BlockScale { index, code })) =
            self.nvfp4().map(|view| view.check_scales())
        {
            return Err(Refusal::ValueOutside {
                what: format!("{what}: block scale {index}"),
                value: format!("{code:#04x}"),
                bound: "a UE4M3 code, at most 0x7e".to_string(),
            });
        }
        let first = (0..self.n).into_par_iter().find_map_first(|n| {
            let mut row = vec![0.0; self.k];
            self.decode_row(n, &mut row);
            row.iter().position(|w| !w.is_finite()).map(|k| (n * self.k + k, row[k]))
        });
        match first {
            Some((index, value)) => Err(Refusal::NonFinite { what: what.to_string(), index, value }),
            None => Ok(()),
        }
    }
}

/// Refuses bytes that are not those of N times K elements.
fn check_bytes(n: usize, k: usize, dtype: DType, bytes: &[u8]) -> Result<(), Refusal> {
    let expected = n.checked_mul(k).and_then(|elements| elements.checked_mul(dtype.size()));
    if expected == Some(bytes.len()) {
        return Ok(());
    }
    Err(Refusal::ShapeMismatch {
        what: format!("dense {dtype} weights of {} bytes", bytes.len()),
        expected: vec![n, k],
        got: vec![bytes.len() / dtype.size()],
    })
}

fn decode<const SIZE: usize>(row: &[u8], out: &mut [f32], element: impl Fn([u8; SIZE]) -> f32) {
    let (elements, _) = row.as_chunks::<SIZE>();
    for (out, &bytes) in out.iter_mut().zip(elements) {
        *out = element(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_decode_from_unaligned_bytes_of_every_type() {
        let values = [1.0f32, -2.5, 0.0, 65504.0, -0.125, 3.0];
        let bf16s: Vec<u8> = values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
        let f16s: Vec<u8> = values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect();
        let f32s: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        for (dtype, bytes) in [(DType::BF16, bf16s), (DType::F16, f16s), (DType::F32, f32s)] {
            let shifted: Vec<u8> = [0].into_iter().chain(bytes).collect();
            let weights = DenseWeights::new(2, 3, dtype, &shifted[1..]).unwrap();
            let expected = if dtype == DType::BF16 { 65536.0 } else { 65504.0 };
            assert_eq!(weights.to_f32(), [1.0, -2.5, 0.0, expected, -0.125, 3.0], "{dtype}");
        }
    }

    #[test]
    fn fp8_rows_take_the_scales_of_their_own_matrix() {
        // Two matrices of 130 features and 200 inputs: two rows and two columns of blocks each.
        let (features, k) = (130, 200);
        let codes: Vec<u8> = (0..2 * features * k).map(|i| (i * 11 % 120) as u8).collect();
        let scales: Vec<f32> = (0..8).map(|i| 0.5 + i as f32).collect();
        let each = [0, 1].map(|matrix| {
            let codes = &codes[matrix * features * k..(matrix + 1) * features * k];
            fp8_block::dequantize_bf16(codes, &scales[matrix * 4..matrix * 4 + 4], features, k).unwrap()
        });
        let whole: Vec<f32> = each.concat().into_iter().map(bf16::to_f32).collect();
        // The whole tensor, and a cut that starts within a block and ends in the second matrix.
        for rows in [0..2 * features, 100..2 * features - 1] {
            let codes = &codes[rows.start * k..rows.end * k];
            let blocks = Fp8Blocks { codes, scale_inv: &scales, features, first: rows.start };
            let weights = DenseWeights::from_fp8_blocks(rows.len(), k, blocks).unwrap();
            assert_eq!(weights.dtype(), DType::BF16);
            assert_eq!(weights.to_f32(), whole[rows.start * k..rows.end * k]);
        }
        let short = Fp8Blocks { codes: &codes, scale_inv: &scales[..7], features, first: 0 };
        assert!(DenseWeights::from_fp8_blocks(2 * features, k, short).is_err());
    }

    #[test]
    fn nvfp4_rows_are_codes_times_scales_times_the_global() {
        // Codes 1 and 2 (0.5 and 1) in every byte; scales 0x38 (1.0) and 0x40 (2.0); a global of 1/4.
        let (codes, scales) = ([0x21u8; 16], [0x38u8, 0x40]);
        let weights = DenseWeights::from_nvfp4(Nvfp4View::new(&codes, &scales, 2, 16, 0.25).unwrap());
        assert_eq!((weights.n(), weights.k(), weights.dtype()), (2, 16, DType::F32));
        let expected = [[0.125f32, 0.25].repeat(8), [0.25, 0.5].repeat(8)].concat();
        assert_eq!(weights.to_f32(), expected);
        assert_eq!(weights.nvfp4().unwrap().global(), 0.25);
        let mut past = [7.0; 16];
        weights.decode_row(2, &mut past);
        assert_eq!(past, [7.0; 16]);
        assert!(DenseWeights::from_f32(1, 2, &[0.0; 2]).unwrap().nvfp4().is_none());
    }

    #[test]
    fn wrong_sizes_and_types_are_refused() {
        assert!(DenseWeights::new(2, 3, DType::BF16, &[0; 11]).is_err());
        assert!(DenseWeights::new(usize::MAX, 3, DType::BF16, &[0; 12]).is_err());
        let refusal = DenseWeights::new(1, 1, DType::I8, &[0]).unwrap_err().to_string();
        assert_eq!(refusal, "dense weights: dtype I8 is not one of BF16, F16 or F32");
    }

    #[test]
    fn the_first_non_finite_element_is_named() {
        let mut values = vec![1.0f32; 64 * 8];
        values[300] = f32::NEG_INFINITY;
        values[17] = f32::NAN;
        let refusal = DenseWeights::from_f32(64, 8, &values).unwrap().check_finite("w").unwrap_err();
        assert_eq!(refusal.to_string(), "w: element 17 is NaN; it must be finite");
    }
}
