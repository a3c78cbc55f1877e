//! The weights of one projection, where the checkpoint left them.

use std::ops::Range;
use std::sync::Arc;

use device::MappedFile;
use linear_proj::{DenseWeights, Fp8Blocks};
use structure_core::{DType, Refusal};

/// Weights `[N, K]`, row-major: a range of a mapped file, with the scales beside it where it holds FP8 blocks. Clones share the
/// memory.
#[derive(Clone)]
pub(crate) struct Weights {
    n: usize,
    k: usize,
    dtype: DType,
    storage: Storage,
    bytes: Range<usize>,
}

#[derive(Clone)]
enum Storage {
    Mapped(Arc<MappedFile>),
    /// FP8 blocks, and which feature of their tensor is the first of these.
    Fp8(Arc<Fp8Tensor>, usize),
    #[cfg(test)]
    Owned(Arc<Vec<half::bf16>>),
}

struct Fp8Tensor {
    file: Arc<MappedFile>,
    scale_inv: Vec<f32>,
    features: usize,
}

impl Weights {
    /// The elements at `bytes` of a file.
    pub fn mapped(
        n: usize,
        k: usize,
        dtype: DType,
        file: Arc<MappedFile>,
        bytes: Range<usize>,
    ) -> Result<Self, Refusal> {
        Weights { n, k, dtype, storage: Storage::Mapped(file), bytes }.checked()
    }

    /// The E4M3 codes at `bytes` of a file, in 128x128 blocks; `features` are those of one matrix, of which there may be
    /// several under each other.
    pub fn fp8(
        n: usize,
        k: usize,
        file: Arc<MappedFile>,
        bytes: Range<usize>,
        scale_inv: Vec<f32>,
        features: usize,
    ) -> Result<Self, Refusal> {
        let storage = Storage::Fp8(Arc::new(Fp8Tensor { file, scale_inv, features }), 0);
        Weights { n, k, dtype: DType::F8_E4M3, storage, bytes }.checked()
    }

    /// Elements that exist nowhere else.
    #[cfg(test)]
    pub fn owned(n: usize, k: usize, elements: Vec<half::bf16>) -> Result<Self, Refusal> {
        let bytes = 0..size_of_val(elements.as_slice());
        Weights { n, k, dtype: DType::BF16, storage: Storage::Owned(Arc::new(elements)), bytes }.checked()
    }

    fn checked(self) -> Result<Self, Refusal> {
        self.dense()?;
        Ok(self)
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The weights as the structure `linear_proj` takes them.
    pub fn dense(&self) -> Result<DenseWeights<'_>, Refusal> {
        match &self.storage {
            Storage::Mapped(file) => DenseWeights::new(self.n, self.k, self.dtype, self.bytes_of(file)),
            Storage::Fp8(tensor, first) => {
                let Fp8Tensor { file, scale_inv, features } = &**tensor;
                let blocks =
                    Fp8Blocks { codes: self.bytes_of(file), scale_inv, features: *features, first: *first };
                DenseWeights::from_fp8_blocks(self.n, self.k, blocks)
            }
            #[cfg(test)]
            Storage::Owned(elements) => DenseWeights::from_bf16(self.n, self.k, elements),
        }
    }

    fn bytes_of<'a>(&self, file: &'a MappedFile) -> &'a [u8] {
        file.get(self.bytes.clone()).unwrap_or(&[])
    }

    /// Output features `features` alone, over the same memory.
    pub fn features(&self, features: Range<usize>) -> Result<Self, Refusal> {
        let stride = self.k * self.dtype.size();
        let start = self.bytes.start + features.start * stride;
        let bytes = start..start + features.len() * stride;
        if features.end > self.n {
            return Err(Refusal::ShapeMismatch {
                what: format!("features {features:?}"),
                expected: vec![self.n, self.k],
                got: vec![features.end, self.k],
            });
        }
        let mut part = Weights { n: features.len(), bytes, ..self.clone() };
        if let Storage::Fp8(_, first) = &mut part.storage {
            *first += features.start;
        }
        part.checked()
    }
}
