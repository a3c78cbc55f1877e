//! The CUDA arm: the safe wrapper of the launchers. Nothing else touches the ffi.
#![allow(unsafe_code, reason = "the launchers are C functions")]

use std::ffi::CStr;
use std::ops::Range;
use std::ptr;

use device::{Buffer, Stream, ViewMut};
use linear_proj::decode_band::MAX_MATRICES;
use linear_proj::{CudaCall, CudaMatrix, CudaWeights, RowType};
use structure_core::Refusal;

use crate::ffi;
use crate::pack::{Quantized, TILE, TILE_K, TILE_N, dequantize, pack, unpack};

/// Packed weights in device memory.
pub(crate) struct Packed {
    n: usize,
    k: usize,
    /// `[ceil(N / 16), ceil(K / 32), 512]`.
    weights: Buffer<u8>,
    /// `[N]`.
    scales: Buffer<f32>,
    /// `[N]`.
    bias: Option<Buffer<f32>>,
    clusters: bool,
    /// For reading back; calls run on the stream of their rows.
    stream: Stream,
}

impl Packed {
    /// Packs and uploads; loads the kernels, so that no later call does.
    pub fn new(
        stream: &Stream,
        seat: &str,
        quantized: &Quantized,
        bias: Option<&[f32]>,
    ) -> Result<Self, Refusal> {
        let (n, k) = (quantized.n, quantized.k);
        let packed = pack(quantized);
        let floats = n * (1 + usize::from(bias.is_some()));
        stream.device().require(seat, (packed.len() + floats * size_of::<f32>()) as u64)?;
        stream.device().make_current()?;
        // SAFETY: the device's context is current.
        check("w8a16_static_prepare", unsafe { ffi::w8a16_static_prepare() })?;
        Ok(Packed {
            n,
            k,
            weights: Buffer::from_host(stream, &packed, &[n.div_ceil(TILE_N), k.div_ceil(TILE_K), TILE])?,
            scales: Buffer::from_host(stream, &quantized.scales, &[n])?,
            bias: bias.map(|bias| Buffer::from_host(stream, bias, &[n])).transpose()?,
            clusters: stream.device().compute_capability().major >= 9,
            stream: stream.clone(),
        })
    }

    /// This matrix of a launch.
    fn matrix(&self, y: &ViewMut<'_>) -> ffi::w8a16_static_matrix {
        ffi::w8a16_static_matrix {
            weights: self.weights.view().pointer() as *const _,
            scales: self.scales.view().pointer() as *const _,
            bias: self.bias.as_ref().map_or(ptr::null(), |bias| bias.view().pointer() as *const _),
            y: y.pointer() as *mut _,
            n: self.n as i64,
        }
    }
}

const _: () = assert!(MAX_MATRICES == ffi::W8A16_STATIC_MAX_MATRICES as usize);

impl CudaWeights for Packed {
    fn project(matrices: &mut [CudaMatrix<'_, Self>], call: &CudaCall<'_>) -> Result<(), Refusal> {
        let dtype = match call.dtype {
            RowType::F32 => ffi::W8A16_STATIC_F32,
            RowType::F16 => ffi::W8A16_STATIC_F16,
            RowType::BF16 => ffi::W8A16_STATIC_BF16,
        };
        let Some((first, others)) = matrices.split_first() else { return Ok(()) };
        let mut arguments = ffi::w8a16_static_call {
            matrices: [first.weights.matrix(&first.y); MAX_MATRICES],
            count: 1 + others.len() as i32,
            dtype: dtype as i32,
            x: call.x.pointer() as *const _,
            m: call.rows as i64,
            k: first.weights.k as i64,
            clusters: first.weights.clusters.into(),
            overlap: call.stream.overlap().into(),
        };
        for (argument, matrix) in arguments.matrices[1..].iter_mut().zip(others) {
            *argument = matrix.weights.matrix(&matrix.y);
        }
        // SAFETY: the pointers are device memory of this device with the lengths that a `CudaCall` promises and the buffers'
        // shapes give; all rows are borrowed for the call, and a view's contract holds until the stream's work is done.
        check("w8a16_static_project", unsafe {
            ffi::w8a16_static_project(&arguments, call.stream.raw().cast())
        })
    }

    fn joins(&self, _other: &Self) -> bool {
        true
    }

    fn duplicate(&self) -> Result<Self, Refusal> {
        let stream = &self.stream;
        Ok(Packed {
            n: self.n,
            k: self.k,
            weights: self.weights.duplicate(stream)?,
            scales: self.scales.duplicate(stream)?,
            bias: self.bias.as_ref().map(|bias| bias.duplicate(stream)).transpose()?,
            clusters: self.clusters,
            stream: stream.clone(),
        })
    }

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        // Whole groups of 16 features are read back, then those before and after are dropped.
        let groups = features.start / TILE_N..features.end.div_ceil(TILE_N);
        let group_len = self.k.div_ceil(TILE_K) * TILE;
        let mut packed = vec![0u8; groups.len() * group_len];
        self.weights.copy_range_to_host(&self.stream, groups.start * group_len, &mut packed)?;
        let mut scales = vec![0f32; features.len()];
        self.scales.copy_range_to_host(&self.stream, features.start, &mut scales)?;
        let first = (features.start - groups.start * TILE_N) * self.k;
        let codes = unpack(&packed, self.k);
        Ok(dequantize(&codes[first..first + features.len() * self.k], &scales, self.k))
    }
}

fn check(call: &str, code: i32) -> Result<(), Refusal> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the runtime returns a static, NUL-terminated name for every code, known or not.
    let name = unsafe { CStr::from_ptr(ffi::w8a16_static_error(code)) };
    Err(Refusal::Cuda { call: call.to_string(), problem: name.to_string_lossy().into_owned() })
}
