//! The weights of one projection, where the checkpoint left them.

use std::ops::Range;
use std::sync::Arc;

use device::MappedFile;
use half::bf16;
use linear_proj::DenseWeights;
use structure_core::{DType, Refusal};

/// Weights `[N, K]`, row-major: a range of a mapped file, or the BF16 values of FP8 blocks. Clones share the memory.
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
    Owned(Arc<Vec<bf16>>),
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

    /// Elements that exist nowhere else.
    pub fn owned(n: usize, k: usize, elements: Vec<bf16>) -> Result<Self, Refusal> {
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
        let all: &[u8] = match &self.storage {
            Storage::Mapped(file) => file,
            Storage::Owned(elements) => bytemuck::cast_slice(elements),
        };
        DenseWeights::new(self.n, self.k, self.dtype, all.get(self.bytes.clone()).unwrap_or(&[]))
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
        Weights { n: features.len(), bytes, ..self.clone() }.checked()
    }
}
