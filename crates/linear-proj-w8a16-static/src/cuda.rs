//! The CUDA arm: the safe wrapper of the launchers. Nothing else touches the ffi.
#![allow(unsafe_code, reason = "the launchers are C functions")]

use std::ffi::CStr;
use std::ops::Range;
use std::ptr;

use device::{Buffer, Stream};
use linear_proj::{BoundProj, LinearProj, Rows, RowsData, RowsMut, RowsMutData, check_call, decode_band};
use structure_core::{DType, Form, Place, Receipt, Refusal};

use crate::pack::{Quantized, TILE, TILE_K, TILE_N, check_features, dequantize, pack, unpack};
use crate::{DTYPES, ENTRY, ENVELOPE, ffi};

/// Packed weights in device memory.
pub(crate) struct CudaArm {
    n: usize,
    k: usize,
    /// `[ceil(N / 16), ceil(K / 32), 512]`.
    weights: Buffer<i8>,
    /// `[N]`.
    scales: Buffer<f32>,
    /// `[N]`.
    bias: Option<Buffer<f32>>,
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
        let (n, k) = (quantized.n, quantized.k);
        let packed = pack(quantized);
        let floats = n * (1 + usize::from(bias.is_some()));
        stream.device().require(&receipt.seat, (packed.len() + floats * size_of::<f32>()) as u64)?;
        stream.device().make_current()?;
        // SAFETY: the device's context is current.
        check("w8a16_static_prepare", unsafe { ffi::w8a16_static_prepare() })?;
        Ok(CudaArm {
            n,
            k,
            weights: Buffer::from_host(stream, &packed, &[n.div_ceil(TILE_N), k.div_ceil(TILE_K), TILE])?,
            scales: Buffer::from_host(stream, &quantized.scales, &[n])?,
            bias: bias.map(|bias| Buffer::from_host(stream, bias, &[n])).transpose()?,
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
            DType::F32 => ffi::W8A16_STATIC_F32,
            DType::F16 => ffi::W8A16_STATIC_F16,
            DType::BF16 => ffi::W8A16_STATIC_BF16,
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
        let call = ffi::w8a16_static_call {
            weights: self.weights.view().pointer() as *const _,
            scales: self.scales.view().pointer() as *const _,
            bias: self.bias.as_ref().map_or(ptr::null(), |bias| bias.view().pointer() as *const _),
            x: input.pointer() as *const _,
            y: output.pointer() as *mut _,
            m: x.rows() as i64,
            n: self.n as i64,
            k: self.k as i64,
            dtype: dtype as i32,
            slices: self.slices as i32,
        };
        gpu.make_current()?;
        // SAFETY: the pointers are device memory of this device with the lengths that `check_call` and the buffers' shapes
        // give; `x` and `y` are borrowed for the call, and a view's contract holds until the stream's work is done.
        check("w8a16_static_project", unsafe { ffi::w8a16_static_project(&call, stream.raw().cast()) })
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

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        check_features(&features, self.n)?;
        // Whole groups of 16 features are read back, then those before and after are dropped.
        let groups = features.start / TILE_N..features.end.div_ceil(TILE_N);
        let group_len = self.k.div_ceil(TILE_K) * TILE;
        let mut packed = vec![0i8; groups.len() * group_len];
        self.weights.copy_range_to_host(&self.stream, groups.start * group_len, &mut packed)?;
        let mut scales = vec![0f32; features.len()];
        self.scales.copy_range_to_host(&self.stream, features.start, &mut scales)?;
        let first = (features.start - groups.start * TILE_N) * self.k;
        let codes = unpack(&packed, self.k);
        Ok(dequantize(&codes[first..first + features.len() * self.k], &scales, self.k))
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
    let name = unsafe { CStr::from_ptr(ffi::w8a16_static_error(code)) };
    Err(Refusal::Cuda { call: call.to_string(), problem: name.to_string_lossy().into_owned() })
}
