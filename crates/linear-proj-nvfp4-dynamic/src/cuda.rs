//! The CUDA arm: the safe wrapper of the launchers. Nothing else touches the ffi.
#![allow(unsafe_code, reason = "the launchers are C functions")]

use std::ffi::CStr;
use std::ops::Range;
use std::ptr;

use device::{Buffer, Stream};
use half::bf16;
use linear_proj::decode_band::{self, GROUP};
use linear_proj::{BoundProj, LinearProj, Rows, RowsData, RowsMut, RowsMutData, check_call};
use structure_core::{DType, Form, Place, Receipt, Refusal};

use crate::cpu::operand;
use crate::pack::Quantized;
use crate::pack::tiles::{CODES, SCALES, TILE_K, pack, unpack};
use crate::{DTYPES, ENTRY, ENVELOPE, ffi};

/// Packed weights in device memory, and the scratch of one call.
pub(crate) struct CudaArm {
    n: usize,
    k: usize,
    /// `[ceil(N / 16), ceil(K / 64), 512]`.
    codes: Buffer<u8>,
    /// `[ceil(N / 16), ceil(K / 64), 64]`.
    scales: Buffer<u8>,
    /// Of the weights.
    global: f32,
    /// `[N]`.
    bias: Option<Buffer<f32>>,
    /// Rows as they enter the products, `[16, K]`.
    quantised: Buffer<bf16>,
    /// Of the rows, `[16]`.
    globals: Buffer<f32>,
    /// Into how many parts K is cut.
    slices: usize,
    /// For reading back; calls run on the stream of their rows.
    stream: Stream,
    pub receipt: Receipt,
}

impl CudaArm {
    /// Packs and uploads; loads the kernels, so that no later call does.
    pub fn new(
        stream: &Stream,
        quantized: &Quantized,
        bias: Option<&[f32]>,
        receipt: Receipt,
    ) -> Result<Self, Refusal> {
        let (n, k, rows) = (quantized.n, quantized.k, ENVELOPE.band.max);
        let (codes, scales) = pack(quantized);
        let floats = rows + bias.map_or(0, <[f32]>::len);
        let bytes = codes.len() + scales.len() + floats * size_of::<f32>() + rows * k * size_of::<bf16>();
        stream.device().require(&receipt.seat, bytes as u64)?;
        stream.device().make_current()?;
        // SAFETY: the device's context is current.
        check("nvfp4_dynamic_prepare", unsafe { ffi::nvfp4_dynamic_prepare() })?;
        let (groups, tiles) = (n.div_ceil(GROUP), k.div_ceil(TILE_K));
        Ok(CudaArm {
            n,
            k,
            codes: Buffer::from_host(stream, &codes, &[groups, tiles, CODES])?,
            scales: Buffer::from_host(stream, &scales, &[groups, tiles, SCALES])?,
            global: quantized.global,
            bias: bias.map(|bias| Buffer::from_host(stream, bias, &[n])).transpose()?,
            quantised: Buffer::zeros(stream, &[rows, k])?,
            globals: Buffer::zeros(stream, &[rows])?,
            slices: decode_band::slices(n, stream.device().compute_capability()),
            stream: stream.clone(),
            receipt,
        })
    }
}

impl LinearProj for CudaArm {
    fn n(&self) -> usize {
        self.n
    }

    fn k(&self) -> usize {
        self.k
    }

    fn project(&mut self, x: Rows<'_>, mut y: RowsMut<'_>) -> Result<(), Refusal> {
        let seat = &self.receipt.seat;
        check_call(seat, self.n, self.k, &x, &y)?;
        if !ENVELOPE.band.takes(x.rows()) {
            return Err(Refusal::BandExceeded { what: seat.clone(), m: x.rows(), band: ENVELOPE.band });
        }
        let dtype = match x.dtype() {
            DType::F32 => ffi::NVFP4_DYNAMIC_F32,
            DType::F16 => ffi::NVFP4_DYNAMIC_F16,
            DType::BF16 => ffi::NVFP4_DYNAMIC_BF16,
            other => {
                return Err(Refusal::DTypeOutside {
                    what: format!("{seat}: input rows"),
                    dtype: other.to_string(),
                    accepted: DType::list(DTYPES),
                });
            }
        };
        let gpu = self.stream.device();
        let (RowsData::Device(input, stream), RowsMutData::Device(output)) = (x.data(), y.data()) else {
            return Err(wrong_device(seat, x.place(), gpu.ordinal()));
        };
        if input.ordinal() != gpu.ordinal() || stream.device().ordinal() != gpu.ordinal() {
            return Err(wrong_device(seat, x.place(), gpu.ordinal()));
        }
        let call = ffi::nvfp4_dynamic_call {
            codes: self.codes.view().pointer() as *const _,
            scales: self.scales.view().pointer() as *const _,
            bias: self.bias.as_ref().map_or(ptr::null(), |bias| bias.view().pointer() as *const _),
            x: input.pointer() as *const _,
            y: output.pointer() as *mut _,
            quantised: self.quantised.view_mut().pointer() as *mut _,
            globals: self.globals.view_mut().pointer() as *mut _,
            global: self.global,
            m: x.rows() as i64,
            n: self.n as i64,
            k: self.k as i64,
            dtype: dtype as i32,
            slices: self.slices as i32,
        };
        gpu.make_current()?;
        // SAFETY: the pointers are device memory of this device with the lengths that `check_call` and the buffers' shapes
        // give; the scratch is this arm's own; `x` and `y` are borrowed for the call, and a view's contract holds until the
        // stream's work is done.
        check("nvfp4_dynamic_project", unsafe { ffi::nvfp4_dynamic_project(&call, stream.raw().cast()) })
    }
}

impl BoundProj for CudaArm {
    fn form(&self) -> Form {
        let place = Place::Cuda(self.stream.device().ordinal());
        Form { dtypes: DTYPES, width: self.k, place, band: ENVELOPE.band, fallback: ENTRY.fallback }
    }

    fn receipt(&self) -> &Receipt {
        &self.receipt
    }

    fn operand(&self, row: &[f32]) -> Vec<f32> {
        operand(row)
    }

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        // Whole groups of 16 features are read back, then those before and after are dropped.
        let end = features.end.min(self.n);
        let groups = features.start / GROUP..end.div_ceil(GROUP);
        let tiles = groups.len() * self.k.div_ceil(TILE_K);
        let first_tile = groups.start * self.k.div_ceil(TILE_K);
        let (mut codes, mut scales) = (vec![0u8; tiles * CODES], vec![0u8; tiles * SCALES]);
        self.codes.copy_range_to_host(&self.stream, first_tile * CODES, &mut codes)?;
        self.scales.copy_range_to_host(&self.stream, first_tile * SCALES, &mut scales)?;
        let first = groups.start * GROUP;
        let mut quantized = unpack(&codes, &scales, self.k, self.global);
        quantized.n = self.n - first;
        quantized.dequantized(features.start - first..features.end - first, self.global)
    }
}

fn wrong_device(seat: &str, rows: Place, ordinal: usize) -> Refusal {
    let seat_place = Place::Cuda(ordinal).to_string();
    Refusal::WrongDevice { what: seat.to_string(), rows: rows.to_string(), seat: seat_place }
}

fn check(call: &str, code: i32) -> Result<(), Refusal> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the runtime returns a static, NUL-terminated name for every code, known or not.
    let name = unsafe { CStr::from_ptr(ffi::nvfp4_dynamic_error(code)) };
    Err(Refusal::Cuda { call: call.to_string(), problem: name.to_string_lossy().into_owned() })
}
