//! The host's own store: keys and values in BF16.

use decode_loop::{Attend, KvRows, KvShape, KvStore};
use device::{Buffer, Stream};
use half::bf16;
use structure_core::{DType, Refusal};

use super::{check, input, output, within};
use crate::ffi;

/// What refusals call it.
const WHAT: &str = "keys and values";

/// Positions that lie together for one head: a page of the attention kernel, whose pages are in order here.
const PAGE_SIZE: usize = 64;

/// The most query heads of a KV head.
const MAX_GROUP: usize = 16;

/// Keys and values of all full-attention layers in BF16.
///
/// Up to [`MAX_QUERY_ROWS`](decode_loop::MAX_QUERY_ROWS) query rows are answered row-invariantly.
pub struct Bf16Kv {
    shape: KvShape,
    /// `[layers, pages, kv_heads, page_size, head_dim]`.
    keys: Buffer<bf16>,
    /// `[layers, pages, kv_heads, page_size, head_dim]`.
    values: Buffer<bf16>,
    /// What the splits of a call leave for its second kernel. Calls on one stream follow one another.
    scratch: Buffer<u8>,
}

impl Bf16Kv {
    /// Allocates a store and loads its kernels.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] with the bytes asked and free before anything is allocated, [`Refusal::DimOutside`] or
    /// [`Refusal::ValueOutside`] for a shape that it cannot take, [`Refusal::Cuda`].
    pub fn new(stream: &Stream, shape: &KvShape) -> Result<Self, Refusal> {
        check_shape(shape)?;
        stream.device().require("the keys and values", Self::bytes_of(shape))?;
        stream.device().make_current()?;
        // SAFETY: the device's context is current.
        check("qwen3_5_bf16_kv_prepare", unsafe { ffi::qwen3_5_bf16_kv_prepare() })?;
        let pages = shape.window.div_ceil(PAGE_SIZE);
        let elements = [shape.layers, pages, shape.kv_heads, PAGE_SIZE, shape.head_dim];
        Ok(Bf16Kv {
            shape: *shape,
            keys: Buffer::zeros(stream, &elements)?,
            values: Buffer::zeros(stream, &elements)?,
            scratch: Buffer::zeros(stream, &[scratch_bytes(shape)])?,
        })
    }

    /// Bytes that a store of a shape takes.
    pub fn bytes_of(shape: &KvShape) -> u64 {
        (2 * shape.layers * layer_len(shape) * size_of::<bf16>() + scratch_bytes(shape)) as u64
    }

    /// Overwrites every byte of keys and values, in the order of the stream.
    ///
    /// # Errors
    /// [`Refusal::Cuda`].
    pub fn fill_bytes(&mut self, stream: &Stream, byte: u8) -> Result<(), Refusal> {
        self.keys.fill_bytes(stream, byte)?;
        self.values.fill_bytes(stream, byte)
    }

    fn layer(&self, layer: usize) -> Result<ffi::qwen3_5_bf16_kv_layer, Refusal> {
        self.shape.check_layer(WHAT, layer)?;
        let offset = (layer * layer_len(&self.shape) * size_of::<bf16>()) as u64;
        Ok(ffi::qwen3_5_bf16_kv_layer {
            keys: (self.keys.view().pointer() + offset) as *mut _,
            values: (self.values.view().pointer() + offset) as *mut _,
            window: self.shape.window as i64,
            page_size: PAGE_SIZE as i32,
            kv_heads: self.shape.kv_heads as i32,
            head_dim: self.shape.head_dim as i32,
        })
    }
}

/// Elements of a layer's keys, and of its values.
fn layer_len(shape: &KvShape) -> usize {
    shape.window.div_ceil(PAGE_SIZE) * PAGE_SIZE * shape.kv_heads * shape.head_dim
}

fn scratch_bytes(shape: &KvShape) -> usize {
    let KvShape { heads, kv_heads, head_dim, window, .. } = *shape;
    // SAFETY: the function touches no memory.
    let bytes = unsafe {
        ffi::qwen3_5_bf16_kv_scratch_bytes(
            window as i64,
            heads as i32,
            kv_heads.max(1) as i32,
            head_dim as i32,
        )
    };
    bytes as usize
}

fn check_shape(shape: &KvShape) -> Result<(), Refusal> {
    let KvShape { heads, kv_heads, window, .. } = *shape;
    within(WHAT, "window", window, 1, i32::MAX as usize - PAGE_SIZE)?;
    within(WHAT, "kv_heads", kv_heads, 1, 1 << 10)?;
    within(WHAT, "group", heads / kv_heads, 1, MAX_GROUP)?;
    shape.check_heads(WHAT)
}

impl KvStore for Bf16Kv {
    fn shape(&self) -> KvShape {
        self.shape
    }

    fn bytes(&self) -> u64 {
        (self.keys.bytes() + self.values.bytes() + self.scratch.bytes()) as u64
    }

    fn element_bytes(&self) -> usize {
        size_of::<bf16>()
    }

    fn append(&mut self, layer: usize, rows: &KvRows<'_>) -> Result<(), Refusal> {
        let stream = rows.stream;
        let elements = rows.rows * self.shape.kv_heads * self.shape.head_dim;
        let call = ffi::qwen3_5_bf16_kv_append_call {
            layer: self.layer(layer)?,
            keys: input("keys", rows.keys, DType::BF16, elements, stream)?,
            values: input("values", rows.values, DType::BF16, elements, stream)?,
            position: input("the position", rows.position, DType::I32, 1, stream)?,
            rows: rows.rows as i64,
            overlap: stream.overlap().into(),
        };
        check_store(&self.keys, stream)?;
        stream.device().make_current()?;
        // SAFETY: the views were checked to hold what the call reads, the pages are the store's own and borrowed mutably; a view's
        // contract holds until the stream's work is done.
        check("qwen3_5_bf16_kv_append", unsafe { ffi::qwen3_5_bf16_kv_append(&call, stream.raw().cast()) })
    }

    fn attend(&mut self, layer: usize, queries: &Attend<'_>) -> Result<(), Refusal> {
        let stream = queries.stream;
        let elements = queries.rows * self.shape.heads * self.shape.head_dim;
        let call = ffi::qwen3_5_bf16_kv_attend_call {
            layer: self.layer(layer)?,
            queries: input("queries", queries.queries, DType::BF16, elements, stream)?,
            out: output("the result of attention", queries.out, DType::BF16, elements, stream)?,
            position: input("the position", queries.position, DType::I32, 1, stream)?,
            scratch: self.scratch.view_mut().pointer() as *mut _,
            rows: queries.rows as i64,
            heads: self.shape.heads as i32,
            overlap: stream.overlap().into(),
        };
        check_store(&self.keys, stream)?;
        stream.device().make_current()?;
        // SAFETY: the views were checked to hold what the call reads and writes, pages and scratch are the store's own; a view's
        // contract holds until the stream's work is done.
        check("qwen3_5_bf16_kv_attend", unsafe { ffi::qwen3_5_bf16_kv_attend(&call, stream.raw().cast()) })
    }
}

/// Refuses a stream of another device than the store's.
fn check_store(keys: &Buffer<bf16>, stream: &Stream) -> Result<(), Refusal> {
    keys.view().expect("the store of keys and values", DType::BF16, 0, stream)
}
