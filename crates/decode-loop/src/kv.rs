//! Stores of keys and values: what a host writes and attends to.

use device::{Stream, View, ViewMut};
use structure_core::Refusal;

/// The most query rows that are served row-invariantly; more are a prompt's.
pub const MAX_QUERY_ROWS: usize = 32;

/// The keys and values of a model's full-attention layers, for one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Full-attention layers.
    pub layers: usize,
    /// Query heads: a multiple of `kv_heads`; each KV head serves a run of them.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head: 64, 128 or 256.
    pub head_dim: usize,
    /// Positions there is room for.
    pub window: usize,
}

impl KvShape {
    /// Refuses a layer that there is not; `what` names the store.
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`].
    pub fn check_layer(&self, what: &str, layer: usize) -> Result<(), Refusal> {
        if layer < self.layers {
            return Ok(());
        }
        let (what, value) = (format!("{what}: the layer"), layer.to_string());
        Err(Refusal::ValueOutside { what, value, bound: format!("below {}", self.layers) })
    }

    /// Refuses heads that the attention kernels do not take; there is a KV head. `what` names the store.
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`] for query heads that are no multiple of the KV heads, or another head dim than 64, 128 and 256.
    pub fn check_heads(&self, what: &str) -> Result<(), Refusal> {
        let KvShape { heads, kv_heads, head_dim, .. } = *self;
        let refuse = |dim: &str, value: usize, bound: String| {
            Err(Refusal::ValueOutside { what: format!("{what}: {dim}"), value: value.to_string(), bound })
        };
        if heads % kv_heads != 0 {
            return refuse("heads", heads, format!("a multiple of the {kv_heads} KV heads"));
        }
        if ![64, 128, 256].contains(&head_dim) {
            return refuse("head_dim", head_dim, "64, 128 or 256".to_string());
        }
        Ok(())
    }
}

/// What keys and what values of one head are divided by before they are stored, and multiplied by when they are read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvScale {
    /// Of the keys.
    pub k: f32,
    /// Of the values.
    pub v: f32,
}

impl Default for KvScale {
    fn default() -> Self {
        KvScale { k: 1.0, v: 1.0 }
    }
}

/// What a store may be told beyond its shape.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvOptions<'a> {
    /// Positions of a page; the implementation's own choice if none.
    pub page_size: Option<usize>,
    /// `[layers, kv_heads]`; all ones if none.
    pub scales: Option<&'a [KvScale]>,
}

/// Rows to store. `keys` and `values` are BF16 `[rows, kv_heads, head_dim]`; row i belongs to position `position + i`.
#[derive(Clone, Copy, Debug)]
pub struct KvRows<'a> {
    /// Keys, after their norm and rotation.
    pub keys: View<'a>,
    /// Values.
    pub values: View<'a>,
    /// Rows.
    pub rows: usize,
    /// The position of the first row: I32 `[1]`, read when the call runs.
    pub position: View<'a>,
    /// Where the call is queued.
    pub stream: &'a Stream,
}

/// Queries to answer. `queries` and `out` are BF16 `[rows, heads, head_dim]`; row i sees positions 0 to `position + i`, all of
/// which have been stored. Scores are scaled by `head_dim^-1/2`.
///
/// Up to [`MAX_QUERY_ROWS`] rows the bits of a row do not depend on how many there are, nor on the others.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a> {
    /// Queries, after their norm and rotation.
    pub queries: View<'a>,
    /// The result, borrowed mutably by the caller.
    pub out: &'a ViewMut<'a>,
    /// Rows.
    pub rows: usize,
    /// The position of the first row: I32 `[1]`, read when the call runs.
    pub position: View<'a>,
    /// Where the call is queued.
    pub stream: &'a Stream,
}

/// A store on a GPU, of all full-attention layers. Layers are counted among themselves, from 0.
///
/// Positions at or past those that were stored are never read into a result, whatever lies there. Calls neither allocate nor wait,
/// so that they can be captured; a position past the window is not written.
pub trait KvStore: Send {
    /// Its shape.
    fn shape(&self) -> KvShape;

    /// Bytes that it takes on the device, page tables and scratch among them.
    fn bytes(&self) -> u64;

    /// Bytes of one element of a key or value.
    fn element_bytes(&self) -> usize;

    /// Queues storing rows.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`], [`Refusal::DTypeOutside`] or [`Refusal::WrongDevice`] for rows it cannot take, and
    /// [`Refusal::Cuda`] when a launch fails.
    fn append(&mut self, layer: usize, rows: &KvRows<'_>) -> Result<(), Refusal>;

    /// Queues answering queries.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    fn attend(&mut self, layer: usize, queries: &Attend<'_>) -> Result<(), Refusal>;
}

/// A store in host memory, of one layer, with the numerics of its GPU arm.
pub trait CpuKv: Send + Sync {
    /// Rows that are stored.
    fn seq_len(&self) -> usize;

    /// `[kv_heads, head_dim]`.
    fn shape(&self) -> [usize; 2];

    /// Bytes that it takes.
    fn bytes(&self) -> u64;

    /// Forgets all rows.
    fn clear(&mut self);

    /// Stores rows after those that are there; `keys` and `values` are `[rows, kv_heads, head_dim]`.
    fn append(&mut self, keys: &[f32], values: &[f32]);

    /// What one query of one head sees in the first `seq_len` positions, written to `out`; `query` and `out` are `[head_dim]`.
    /// `scores` is scratch.
    fn attend(&self, kv_head: usize, seq_len: usize, query: &[f32], scores: &mut Vec<f32>, out: &mut [f32]);
}

/// Makes a store on the stream's device: all of it is allocated here, and refused with the bytes asked and free.
pub type CudaKvFn = fn(&Stream, &KvShape, &KvOptions<'_>) -> Result<Box<dyn KvStore>, Refusal>;

/// Makes the store of one layer in host memory.
pub type CpuKvFn = fn(&KvShape, &KvOptions<'_>, usize) -> Result<Box<dyn CpuKv>, Refusal>;

/// How an implementation makes stores.
pub struct KvFactory {
    /// Refuses a shape or options that it cannot take; called before either of the others.
    pub check: fn(&KvShape, &KvOptions<'_>) -> Result<(), Refusal>,
    /// Bytes that a store takes on the device.
    pub bytes: fn(&KvShape, &KvOptions<'_>) -> u64,
    /// A store on a GPU.
    pub cuda: CudaKvFn,
    /// The store of a layer in host memory.
    pub cpu: CpuKvFn,
}

/// Which store a sequence is built with.
#[derive(Clone, Copy, Default)]
pub enum KvChoice<'a> {
    /// The host's own.
    #[default]
    Host,
    /// An implementation's.
    Store(&'static KvFactory, KvOptions<'a>),
}
