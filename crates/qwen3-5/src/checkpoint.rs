//! A checkpoint folder: its shards mapped, its tensors found by name, and each of them read or reported.

use std::collections::btree_map::Entry as Slot;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::MappedFile;
use linear_proj::DenseWeights;
use number_formats::{fp8_block, nvfp4};
use safetensors::Dtype;
use serde::Deserialize;
use structure_core::{Bound, DType, Refusal};

use crate::header;
use crate::tensor::Weights;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Some checkpoints ship the draft head in a file that their index does not name.
const SIDECAR: &str = "mtp.safetensors";
/// The vision tower: this host reads text alone.
const NOT_OURS: &[&str] = &["model.visual.", "visual."];
/// What the name of an FP8 tensor gets appended for the scales of its blocks.
const SCALES: &str = "_scale_inv";

/// How a checkpoint names the tensors of an NVFP4 projection, after its path: codes U8 `[N, K / 2]`, scales E4M3 `[N, K / 16]`,
/// and one FP32 global scale.
struct Nvfp4Names {
    codes: &'static str,
    scales: &'static str,
    global: &'static str,
    /// Whether the global scale divides, or multiplies.
    divides: bool,
    /// The global scale that activations had when they were calibrated; may be absent.
    activations: &'static str,
}

const COMPRESSED_TENSORS: Nvfp4Names = Nvfp4Names {
    codes: "weight_packed",
    scales: "weight_scale",
    global: "weight_global_scale",
    divides: true,
    activations: "input_global_scale",
};

const MODELOPT: Nvfp4Names = Nvfp4Names {
    codes: "weight",
    scales: "weight_scale",
    global: "weight_scale_2",
    divides: false,
    activations: "input_scale",
};

/// The types a tensor of the model may have, as a person would write them.
pub(crate) fn accepted() -> String {
    DType::list(&[DType::BF16, DType::F16, DType::F32, DType::F8_E4M3])
}

/// An opened checkpoint.
pub(crate) struct Checkpoint {
    folder: PathBuf,
    tensors: BTreeMap<String, Entry>,
}

struct Entry {
    file: Arc<MappedFile>,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
    read: bool,
}

impl Checkpoint {
    /// Maps the shards that the index names, or the single file, and the sidecar if there is one.
    pub fn open(folder: &Path) -> Result<Self, Refusal> {
        let mut checkpoint = Checkpoint { folder: folder.to_path_buf(), tensors: BTreeMap::new() };
        let index = folder.join(INDEX);
        let mut shards = BTreeSet::new();
        if index.exists() {
            let map = read_index(&index)?;
            shards.extend(map.values().cloned());
            for shard in &shards {
                checkpoint.add(shard)?;
            }
            for (tensor, shard) in map {
                let path = folder.join(shard);
                match checkpoint.tensors.get(&tensor) {
                    Some(entry) if entry.file.path() == path => {}
                    _ => return Err(Refusal::MissingTensor { path: path.display().to_string(), tensor }),
                }
            }
        } else if folder.join(SINGLE).exists() {
            checkpoint.add(SINGLE)?;
        } else {
            return Err(Refusal::file(folder, format!("holds neither {INDEX} nor {SINGLE}")));
        }
        if !shards.contains(SIDECAR) && folder.join(SIDECAR).exists() {
            checkpoint.add(SIDECAR)?;
        }
        Ok(checkpoint)
    }

    fn add(&mut self, shard: &str) -> Result<(), Refusal> {
        let file = Arc::new(MappedFile::open(self.folder.join(shard))?);
        for header::Tensor { name, dtype, shape, bytes } in header::read(&file)? {
            match self.tensors.entry(name) {
                Slot::Occupied(slot) => {
                    let first = slot.get().file.path().display();
                    let problem = format!("tensor `{}` is in {first} too", slot.key());
                    return Err(Refusal::file(file.path(), problem));
                }
                Slot::Vacant(slot) => {
                    slot.insert(Entry { file: Arc::clone(&file), dtype, shape, bytes, read: false });
                }
            }
        }
        Ok(())
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Whether there is a tensor whose name starts so.
    pub fn contains_under(&self, prefix: &str) -> bool {
        self.tensors.range(prefix.to_string()..).next().is_some_and(|(name, _)| name.starts_with(prefix))
    }

    /// The refusal of a checkpoint without this tensor.
    pub fn missing(&self, tensor: &str) -> Refusal {
        Refusal::MissingTensor { path: self.folder.display().to_string(), tensor: tensor.to_string() }
    }

    /// A tensor `[..., N, K]` as weights whose output features are all its leading dimensions, checked to be finite.
    ///
    /// The elements stay where they are; of FP8 blocks the scales alone are read.
    pub fn weights(&mut self, tensor: &str, shape: &[usize]) -> Result<Weights, Refusal> {
        let dtype = self.find(tensor, shape)?.dtype;
        let (k, n) = match shape.split_last() {
            Some((&k, leading)) => (k, leading.iter().product()),
            None => (1, 1),
        };
        let weights = if dtype == Dtype::F8_E4M3 {
            self.fp8_weights(tensor, shape, n, k)?
        } else {
            let entry = self.find(tensor, shape)?;
            let dtype = dense_dtype(tensor, entry.dtype)?;
            Weights::mapped(n, k, dtype, Arc::clone(&entry.file), entry.bytes.clone())?
        };
        weights.dense()?.check_finite(tensor)?;
        Ok(weights)
    }

    /// The projection at `path`, `[n, k]`, in whichever form the checkpoint has it: dense or FP8 as `PATH.weight`, or NVFP4 as
    /// compressed-tensors or ModelOpt write it; see [`Nvfp4Names`].
    pub fn projection(&mut self, path: &str, n: usize, k: usize) -> Result<Weights, Refusal> {
        let weight = format!("{path}.weight");
        let has = |suffix: &str| self.contains(&format!("{path}.{suffix}"));
        if has(COMPRESSED_TENSORS.codes) {
            return self.nvfp4_weights(path, &COMPRESSED_TENSORS, n, k);
        }
        let is_u8 = self.tensors.get(&weight).is_some_and(|entry| entry.dtype == Dtype::U8);
        if is_u8 && (has(MODELOPT.scales) || has(MODELOPT.global)) {
            return self.nvfp4_weights(path, &MODELOPT, n, k);
        }
        self.weights(&weight, &[n, k])
    }

    /// A small tensor, decoded and checked to be finite.
    pub fn vector(&mut self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, Refusal> {
        let entry = self.find(tensor, shape)?;
        let dtype = dense_dtype(tensor, entry.dtype)?;
        let bytes = entry.file.get(entry.bytes.clone()).unwrap_or(&[]);
        let dense = DenseWeights::new(1, shape.iter().product(), dtype, bytes)?;
        dense.check_finite(tensor)?;
        Ok(dense.to_f32())
    }

    /// An FP8 tensor with its scales; each matrix of its leading dimensions has blocks of its own.
    fn fp8_weights(&mut self, tensor: &str, shape: &[usize], n: usize, k: usize) -> Result<Weights, Refusal> {
        let [leading @ .., features, _] = shape else {
            return Err(Refusal::DTypeOutside {
                what: tensor.to_string(),
                dtype: DType::F8_E4M3.to_string(),
                accepted: DType::list(&[DType::BF16, DType::F16, DType::F32]),
            });
        };
        let blocks = [features.div_ceil(fp8_block::BLOCK), k.div_ceil(fp8_block::BLOCK)];
        let scales = self.vector(&format!("{tensor}{SCALES}"), &[leading, &blocks[..]].concat())?;
        let entry = self.find(tensor, shape)?;
        Weights::fp8(n, k, Arc::clone(&entry.file), entry.bytes.clone(), scales, *features)
    }

    /// An NVFP4 projection. What is kept beside it for activations is read and has no use here: a row's scales are its own.
    fn nvfp4_weights(
        &mut self,
        path: &str,
        names: &Nvfp4Names,
        n: usize,
        k: usize,
    ) -> Result<Weights, Refusal> {
        let bound = Bound { min: 0, max: 1 << 24, multiple_of: nvfp4::BLOCK as u64 };
        if !bound.takes(k as u64) {
            return Err(Refusal::DimOutside { what: path.to_string(), dim: "K", value: k as u64, bound });
        }
        let name = |suffix: &str| format!("{path}.{suffix}");
        let codes = self.bytes(&name(names.codes), &[n, k / 2], Dtype::U8)?;
        let scales = self.bytes(&name(names.scales), &[n, k / nvfp4::BLOCK], Dtype::F8_E4M3)?;
        let stored = self.scalar(&name(names.global))?;
        let (global, what) = match names.divides {
            true => (nvfp4::global_of_divisor(stored).ok(), "finite and above zero, and so must its inverse"),
            false => (Some(stored).filter(|global| *global >= 0.0), "finite and not negative"),
        };
        let global = global.ok_or_else(|| Refusal::ValueOutside {
            what: name(names.global),
            value: stored.to_string(),
            bound: what.to_string(),
        })?;
        if self.contains(&name(names.activations)) {
            self.scalar(&name(names.activations))?;
        }
        let weights = Weights::nvfp4(n, k, codes, scales, global)?;
        weights.dense()?.check_finite(path)?;
        Ok(weights)
    }

    /// The place of a tensor of one type.
    fn bytes(
        &mut self,
        tensor: &str,
        shape: &[usize],
        dtype: Dtype,
    ) -> Result<(Arc<MappedFile>, Range<usize>), Refusal> {
        let entry = self.find(tensor, shape)?;
        if entry.dtype == dtype {
            return Ok((Arc::clone(&entry.file), entry.bytes.clone()));
        }
        Err(Refusal::DTypeOutside {
            what: tensor.to_string(),
            dtype: format!("{:?}", entry.dtype),
            accepted: format!("{dtype:?}"),
        })
    }

    /// The one element of a tensor, which is written with one dimension or with none.
    fn scalar(&mut self, tensor: &str) -> Result<f32, Refusal> {
        let has_none = self.tensors.get(tensor).is_some_and(|entry| entry.shape.is_empty());
        let elements = self.vector(tensor, if has_none { &[] } else { &[1] })?;
        Ok(elements.first().copied().unwrap_or_default())
    }

    /// Finds a tensor, holds its shape to the expected one, and notes that it was read.
    fn find(&mut self, tensor: &str, shape: &[usize]) -> Result<&Entry, Refusal> {
        let missing = self.missing(tensor);
        let entry = self.tensors.get_mut(tensor).ok_or(missing)?;
        if entry.shape != shape {
            return Err(Refusal::ShapeMismatch {
                what: tensor.to_string(),
                expected: shape.to_vec(),
                got: entry.shape.clone(),
            });
        }
        entry.read = true;
        Ok(entry)
    }

    /// Refuses a checkpoint with tensors that the model did not read.
    pub fn all_read(&self) -> Result<(), Refusal> {
        let ours = |name: &str| !NOT_OURS.iter().any(|prefix| name.starts_with(prefix));
        let mut unread =
            self.tensors.iter().filter(|(name, entry)| !entry.read && ours(name)).map(|(name, _)| name);
        match unread.next() {
            None => Ok(()),
            Some(first) => Err(Refusal::UnreadTensors {
                path: self.folder.display().to_string(),
                first: first.clone(),
                count: 1 + unread.count(),
            }),
        }
    }
}

/// Which shard holds which tensor.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>, Refusal> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = std::fs::read(path).map_err(|error| Refusal::file(path, error))?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| Refusal::file(path, error))?;
    for (tensor, shard) in &index.weight_map {
        // A shard lies beside its index: a name that leads elsewhere is not a shard's.
        if Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(Refusal::file(
                path,
                format!("tensor `{tensor}` is in `{shard}`, which is not a file's name"),
            ));
        }
    }
    Ok(index.weight_map)
}

/// The types that can be multiplied as they are.
fn dense_dtype(tensor: &str, dtype: Dtype) -> Result<DType, Refusal> {
    match dtype {
        Dtype::BF16 => Ok(DType::BF16),
        Dtype::F16 => Ok(DType::F16),
        Dtype::F32 => Ok(DType::F32),
        other => Err(Refusal::DTypeOutside {
            what: tensor.to_string(),
            dtype: format!("{other:?}"),
            accepted: accepted(),
        }),
    }
}
