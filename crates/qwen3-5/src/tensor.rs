//! The weights of one projection, where the checkpoint left them.

use std::ops::Range;
use std::sync::Arc;

use device::MappedFile;
use linear_proj::{DenseWeights, Fp8Blocks};
use number_formats::nvfp4::{self, Nvfp4View};
use structure_core::{DType, Refusal};

/// Weights `[N, K]`, row-major: a range of a mapped file, with the scales beside it where it holds FP8 blocks or NVFP4. Clones
/// share the memory.
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
    /// NVFP4 codes, and which feature of their scales is the first of these.
    Nvfp4(Arc<Nvfp4Tensor>, usize),
    /// Elements that exist nowhere else.
    Owned(Arc<Vec<half::bf16>>),
}

struct Fp8Tensor {
    file: Arc<MappedFile>,
    scale_inv: Vec<f32>,
    features: usize,
}

/// What belongs to NVFP4 codes; the scales may be in another file.
struct Nvfp4Tensor {
    file: Arc<MappedFile>,
    scales_file: Arc<MappedFile>,
    scales: Range<usize>,
    global: f32,
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

    /// The E2M1 codes and the UE4M3 scales at the given bytes of two files, under a global scale that multiplies.
    pub fn nvfp4(
        n: usize,
        k: usize,
        (file, codes): (Arc<MappedFile>, Range<usize>),
        (scales_file, scales): (Arc<MappedFile>, Range<usize>),
        global: f32,
    ) -> Result<Self, Refusal> {
        let storage = Storage::Nvfp4(Arc::new(Nvfp4Tensor { file, scales_file, scales, global }), 0);
        Weights { n, k, dtype: DType::U8, storage, bytes: codes }.checked()
    }

    /// Elements that exist nowhere else.
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
            Storage::Nvfp4(tensor, first) => {
                let Nvfp4Tensor { file, scales_file, scales, global } = &**tensor;
                let blocks = self.k / nvfp4::BLOCK;
                let scales = scales_file.get(scales.clone()).unwrap_or(&[]);
                let scales = scales.get(first * blocks..(first + self.n) * blocks).unwrap_or(&[]);
                Nvfp4View::new(self.bytes_of(file), scales, self.n, self.k, *global)
                    .map(DenseWeights::from_nvfp4)
                    .map_err(|error| Refusal::file(file.path(), error))
            }
            Storage::Owned(elements) => DenseWeights::from_bf16(self.n, self.k, elements),
        }
    }

    fn bytes_of<'a>(&self, file: &'a MappedFile) -> &'a [u8] {
        file.get(self.bytes.clone()).unwrap_or(&[])
    }

    /// Output features `features` alone, over the same memory.
    pub fn features(&self, features: Range<usize>) -> Result<Self, Refusal> {
        let stride = match self.storage {
            Storage::Nvfp4(..) => self.k / 2,
            _ => self.k * self.dtype.size(),
        };
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
        if let Storage::Fp8(_, first) | Storage::Nvfp4(_, first) = &mut part.storage {
            *first += features.start;
        }
        part.checked()
    }
}
