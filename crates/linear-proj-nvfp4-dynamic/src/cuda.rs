//! The CUDA arm: the safe wrapper of the launchers. Nothing else touches the ffi.
#![allow(unsafe_code, reason = "the launchers are C functions")]

use std::ffi::CStr;
use std::ptr;

use device::CudaDevice;
use linear_proj::decode_band::MAX_MATRICES;
use linear_proj::{Bind, BoundProj, CudaArm, Options, RowType};
use linear_proj_nvfp4::{Call, CudaForm, Launcher, Matrix, Quantized, RowQuantiser};
use structure_core::{Kernels, Receipt, Refusal};

use crate::{ENTRY, KERNELS, ffi};

/// Packs for a GPU, uploads and runs the smoke.
pub(crate) fn arm(
    gpu: &CudaDevice,
    weights: &Quantized,
    rows: RowQuantiser,
    bind: &Bind<'_>,
    options: &Options<'_>,
    receipt: Receipt,
) -> Result<Box<dyn BoundProj>, Refusal> {
    let stream = gpu.new_stream()?;
    let form = CudaForm::<Launchers>::new(&stream, bind, options, weights, rows)?;
    Ok(Box::new(CudaArm::bind(form, &stream, bind, &ENTRY, receipt)?))
}

const _: () = assert!(MAX_MATRICES == ffi::NVFP4_DYNAMIC_MAX_MATRICES as usize);

/// The C functions of `cuda/nvfp4_dynamic.h`.
struct Launchers;

impl Launcher for Launchers {
    const KERNELS: &'static Kernels = &KERNELS;

    fn prepare(prefill: bool, native: bool) -> Result<(), Refusal> {
        // SAFETY: the trait promises that the device's context is current.
        check("nvfp4_dynamic_prepare", unsafe { ffi::nvfp4_dynamic_prepare(prefill.into(), native.into()) })
    }

    fn scratch_bytes(m: usize, k: usize, multiprocessors: usize) -> usize {
        // SAFETY: the function computes with its arguments alone.
        unsafe { ffi::nvfp4_dynamic_scratch_bytes(m as i64, k as i64, multiprocessors as i32) as usize }
    }

    fn project(matrices: &[Matrix<'_>], call: &Call<'_>) -> Result<(), Refusal> {
        let dtype = match call.dtype {
            RowType::F32 => ffi::NVFP4_DYNAMIC_F32,
            RowType::F16 => ffi::NVFP4_DYNAMIC_F16,
            RowType::BF16 => ffi::NVFP4_DYNAMIC_BF16,
        };
        let Some((first, others)) = matrices.split_first() else { return Ok(()) };
        let mut arguments = ffi::nvfp4_dynamic_call {
            matrices: [matrix(first); MAX_MATRICES],
            count: 1 + others.len() as i32,
            dtype: dtype as i32,
            x: call.x.pointer() as *const _,
            gate: call.gate.map_or(ptr::null(), |gate| gate.pointer() as *const _),
            scratch: call.scratch.pointer() as *mut _,
            chunk: call.chunk as i64,
            m: call.m as i64,
            k: call.k as i64,
            single_level: call.single_level.into(),
            clusters: call.clusters.into(),
            multiprocessors: call.multiprocessors as i32,
            native: call.native.into(),
            overlap: call.stream.overlap().into(),
        };
        for (argument, other) in arguments.matrices[1..].iter_mut().zip(others) {
            *argument = matrix(other);
        }
        // SAFETY: the pointers are device memory of this device with the lengths that a `Matrix` and a `Call` promise; they are
        // borrowed for the call, and a view's contract holds until the stream's work is done.
        check("nvfp4_dynamic_project", unsafe {
            ffi::nvfp4_dynamic_project(&arguments, call.stream.raw().cast())
        })
    }
}

fn matrix(matrix: &Matrix<'_>) -> ffi::nvfp4_dynamic_matrix {
    ffi::nvfp4_dynamic_matrix {
        codes: matrix.codes.pointer() as *const _,
        scales: matrix.scales.pointer() as *const _,
        bias: matrix.bias.map_or(ptr::null(), |bias| bias.pointer() as *const _),
        y: matrix.y.pointer() as *mut _,
        n: matrix.n as i64,
        global: matrix.global,
    }
}

fn check(call: &str, code: i32) -> Result<(), Refusal> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the runtime returns a static, NUL-terminated name for every code, known or not.
    let name = unsafe { CStr::from_ptr(ffi::nvfp4_dynamic_error(code)) };
    Err(Refusal::Cuda { call: call.to_string(), problem: name.to_string_lossy().into_owned() })
}
