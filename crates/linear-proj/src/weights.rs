use half::{bf16, f16};
use structure_core::{DType, Refusal};

/// Dense weights `[N, K]`, row-major: BF16, F16 or F32 elements in little-endian bytes, as a checkpoint maps them.
///
/// The bytes need no alignment, and rows are decoded one at a time, so a large tensor is never held twice.
#[derive(Clone, Copy, Debug)]
pub struct DenseWeights<'a> {
    n: usize,
    k: usize,
    dtype: DType,
    bytes: &'a [u8],
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
        let expected = n.checked_mul(k).and_then(|elements| elements.checked_mul(dtype.size()));
        if expected != Some(bytes.len()) {
            return Err(Refusal::ShapeMismatch {
                what: format!("dense {dtype} weights of {} bytes", bytes.len()),
                expected: vec![n, k],
                got: vec![bytes.len() / dtype.size()],
            });
        }
        Ok(DenseWeights { n, k, dtype, bytes })
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

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The elements' type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The elements' bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Decodes row `n` into `out`, which holds K elements; exact for all three types.
    ///
    /// A row past the last one is left as zeros.
    pub fn decode_row(&self, n: usize, out: &mut [f32]) {
        let stride = self.k * self.dtype.size();
        let row = self.bytes.get(n * stride..(n + 1) * stride).unwrap_or(&[]);
        match self.dtype {
            DType::BF16 => decode(row, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            DType::F16 => decode(row, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
            _ => decode(row, out, f32::from_le_bytes),
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

    /// Refuses weights with a NaN or an infinity among them.
    ///
    /// # Errors
    /// [`Refusal::NonFinite`] with the first such element.
    pub fn check_finite(&self, what: &str) -> Result<(), Refusal> {
        use rayon::prelude::*;
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
        assert_eq!(refusal.to_string(), "w: element 17 is NaN; weights must be finite");
    }
}
