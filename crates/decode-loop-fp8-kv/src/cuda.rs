//! The store on a GPU: the safe wrapper of the launchers. Nothing else touches the ffi.
#![allow(unsafe_code, reason = "the launchers are C functions")]

use std::ffi::CStr;

use decode_loop::{Attend, KvOptions, KvRows, KvShape, KvStore};
use device::{Buffer, Stream};
use structure_core::{DType, Refusal};

use crate::store::{bytes, check as check_shape, page_size, scales};
use crate::{ENTRY, ffi};

/// Keys and values of all layers in pages of E4M3.
pub struct Fp8Kv {
    shape: KvShape,
    page_size: usize,
    pages: usize,
    /// `[layers, pages, kv_heads, page_size, head_dim]`.
    keys: Buffer<u8>,
    /// `[layers, pages, kv_heads, page_size, head_dim]`.
    values: Buffer<u8>,
    /// `[pages]`: the page of each run of positions, of all layers.
    table: Buffer<i32>,
    /// `[layers, kv_heads]`.
    k_scales: Buffer<f32>,
    /// `[layers, kv_heads]`.
    v_scales: Buffer<f32>,
    /// What the splits of a call leave for its second kernel. Calls on one stream follow one another.
    scratch: Buffer<u8>,
}

impl Fp8Kv {
    /// Allocates a store, its pages in order, and loads the kernels.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] with the bytes asked and free before anything is allocated; a refusal of the shape and the options;
    /// [`Refusal::KernelsNotBuilt`], [`Refusal::ArchUnsupported`] or [`Refusal::Cuda`].
    pub fn new(stream: &Stream, shape: &KvShape, options: &KvOptions<'_>) -> Result<Self, Refusal> {
        check_shape(shape, options)?;
        ENTRY.kernels.check(ENTRY.id, stream.device().compute_capability())?;
        stream.device().require("fp8_kv", bytes(shape, options))?;
        stream.device().make_current()?;
        // SAFETY: the device's context is current.
        check("fp8_kv_prepare", unsafe { ffi::fp8_kv_prepare() })?;

        let KvShape { layers, heads, kv_heads, head_dim, window } = *shape;
        let page_size = page_size(options);
        let pages = window.div_ceil(page_size);
        let codes = [layers, pages, kv_heads, page_size, head_dim];
        let in_order: Vec<i32> = (0..pages as i32).collect();
        let scales = scales(shape, options);
        let [k_scales, v_scales] = [
            scales.iter().map(|scale| scale.k).collect::<Vec<_>>(),
            scales.iter().map(|scale| scale.v).collect::<Vec<_>>(),
        ];
        // SAFETY: the function touches no memory.
        let scratch = unsafe {
            ffi::fp8_kv_scratch_bytes(window as i64, heads as i32, kv_heads as i32, head_dim as i32)
        };
        Ok(Fp8Kv {
            shape: *shape,
            page_size,
            pages,
            keys: Buffer::zeros(stream, &codes)?,
            values: Buffer::zeros(stream, &codes)?,
            table: Buffer::from_host(stream, &in_order, &[pages])?,
            k_scales: Buffer::from_host(stream, &k_scales, &[layers, kv_heads])?,
            v_scales: Buffer::from_host(stream, &v_scales, &[layers, kv_heads])?,
            scratch: Buffer::zeros(stream, &[scratch as usize])?,
        })
    }

    /// Positions of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Says in which page each run of positions lies, and waits until the device knows. What was stored stays in its pages.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when there are not as many entries as pages, [`Refusal::ValueOutside`] for a page that there is
    /// not or that stands twice, and [`Refusal::Cuda`].
    pub fn assign_pages(&mut self, stream: &Stream, table: &[usize]) -> Result<(), Refusal> {
        if table.len() != self.pages {
            let (expected, got) = (vec![self.pages], vec![table.len()]);
            return Err(Refusal::ShapeMismatch { what: "fp8_kv: page table".to_string(), expected, got });
        }
        let mut taken = vec![false; self.pages];
        for &page in table {
            if taken.get(page).copied().unwrap_or(true) {
                let (what, value) = ("fp8_kv: a page of the table".to_string(), page.to_string());
                let bound = format!("one of the {} pages, and each once", self.pages);
                return Err(Refusal::ValueOutside { what, value, bound });
            }
            taken[page] = true;
        }
        let table: Vec<i32> = table.iter().map(|&page| page as i32).collect();
        self.table.copy_from_host(stream, &table)
    }

    /// Overwrites every code of every page, in the order of the stream.
    ///
    /// # Errors
    /// [`Refusal::Cuda`].
    pub fn fill(&mut self, stream: &Stream, code: u8) -> Result<(), Refusal> {
        self.keys.fill_bytes(stream, code)?;
        self.values.fill_bytes(stream, code)
    }

    /// The codes of a layer's keys and values as they lie in the pages, `[pages, kv_heads, page_size, head_dim]`, after all work so
    /// far on the stream.
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`] for a layer that there is not, and [`Refusal::Cuda`].
    pub fn codes(&self, stream: &Stream, layer: usize) -> Result<[Vec<u8>; 2], Refusal> {
        self.shape.check_layer("fp8_kv", layer)?;
        let len = self.layer_len();
        let mut codes = [vec![0; len], vec![0; len]];
        for (codes, pages) in codes.iter_mut().zip([&self.keys, &self.values]) {
            pages.copy_range_to_host(stream, layer * len, codes)?;
        }
        Ok(codes)
    }

    /// Codes of a layer's keys, and of its values.
    fn layer_len(&self) -> usize {
        self.pages * self.shape.kv_heads * self.page_size * self.shape.head_dim
    }

    fn layer(&self, layer: usize) -> Result<ffi::fp8_kv_layer, Refusal> {
        self.shape.check_layer("fp8_kv", layer)?;
        let codes = (layer * self.layer_len()) as u64;
        let scales = (layer * self.shape.kv_heads * size_of::<f32>()) as u64;
        Ok(ffi::fp8_kv_layer {
            keys: (self.keys.view().pointer() + codes) as *mut _,
            values: (self.values.view().pointer() + codes) as *mut _,
            table: self.table.view().pointer() as *const _,
            k_scales: (self.k_scales.view().pointer() + scales) as *const _,
            v_scales: (self.v_scales.view().pointer() + scales) as *const _,
            window: self.shape.window as i64,
            page_size: self.page_size as i32,
            kv_heads: self.shape.kv_heads as i32,
            head_dim: self.shape.head_dim as i32,
        })
    }

    /// Refuses a stream of another device than the store's.
    fn check_stream(&self, stream: &Stream) -> Result<(), Refusal> {
        self.keys.view().expect("fp8_kv: the store", DType::U8, 0, stream)
    }
}

impl KvStore for Fp8Kv {
    fn shape(&self) -> KvShape {
        self.shape
    }

    fn bytes(&self) -> u64 {
        let floats = self.k_scales.bytes() + self.v_scales.bytes();
        let codes = self.keys.bytes() + self.values.bytes();
        (codes + self.table.bytes() + floats + self.scratch.bytes()) as u64
    }

    fn element_bytes(&self) -> usize {
        size_of::<u8>()
    }

    fn append(&mut self, layer: usize, rows: &KvRows<'_>) -> Result<(), Refusal> {
        let layer = self.layer(layer)?;
        let elements = rows.rows * self.shape.kv_heads * self.shape.head_dim;
        self.check_stream(rows.stream)?;
        rows.keys.expect("fp8_kv: keys", DType::BF16, elements, rows.stream)?;
        rows.values.expect("fp8_kv: values", DType::BF16, elements, rows.stream)?;
        rows.position.expect("fp8_kv: the position", DType::I32, 1, rows.stream)?;
        let call = ffi::fp8_kv_append_call {
            layer,
            keys: rows.keys.pointer() as *const _,
            values: rows.values.pointer() as *const _,
            position: rows.position.pointer() as *const _,
            rows: rows.rows as i64,
            overlap: rows.stream.overlap().into(),
        };
        rows.stream.device().make_current()?;
        // SAFETY: the views were checked to hold what the call reads, the pages are the store's own and borrowed mutably; a view's
        // contract holds until the stream's work is done.
        check("fp8_kv_append", unsafe { ffi::fp8_kv_append(&call, rows.stream.raw().cast()) })
    }

    fn attend(&mut self, layer: usize, queries: &Attend<'_>) -> Result<(), Refusal> {
        let layer = self.layer(layer)?;
        let elements = queries.rows * self.shape.heads * self.shape.head_dim;
        self.check_stream(queries.stream)?;
        queries.queries.expect("fp8_kv: queries", DType::BF16, elements, queries.stream)?;
        queries.out.expect("fp8_kv: the result", DType::BF16, elements, queries.stream)?;
        queries.position.expect("fp8_kv: the position", DType::I32, 1, queries.stream)?;
        let call = ffi::fp8_kv_attend_call {
            layer,
            queries: queries.queries.pointer() as *const _,
            out: queries.out.pointer() as *mut _,
            position: queries.position.pointer() as *const _,
            scratch: self.scratch.view_mut().pointer() as *mut _,
            rows: queries.rows as i64,
            heads: self.shape.heads as i32,
            overlap: queries.stream.overlap().into(),
        };
        queries.stream.device().make_current()?;
        // SAFETY: the views were checked to hold what the call reads and writes, pages and scratch are the store's own; a view's
        // contract holds until the stream's work is done.
        check("fp8_kv_attend", unsafe { ffi::fp8_kv_attend(&call, queries.stream.raw().cast()) })
    }
}

fn check(call: &str, code: i32) -> Result<(), Refusal> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the runtime returns a static, NUL-terminated name for every code, known or not.
    let name = unsafe { CStr::from_ptr(ffi::fp8_kv_error(code)) };
    Err(Refusal::Cuda { call: call.to_string(), problem: name.to_string_lossy().into_owned() })
}
