//! The host's kernels on a GPU: the safe wrappers of their launchers, and nothing else. One call a function, shapes in the call's
//! type.
//!
//! Every wrapper checks that its views lie on the stream's device, hold the elements that the shape says and have the right type;
//! what a kernel does is in its header, `cuda/*.h`.
#![allow(unsafe_code, reason = "the launchers are C functions")]

mod bf16_kv;
mod bf16_linear;
mod experts;
mod gated_delta;
mod rows;

use std::ffi::CStr;

use device::{Stream, View, ViewMut};
use structure_core::{Bound, DType, Refusal};

use crate::ffi;

pub use bf16_kv::Bf16Kv;
pub use bf16_linear::Bf16Linear;
pub use experts::{ExpertsDown, ExpertsGateUp, ExpertsShape, Route};
pub use gated_delta::{DeltaLayer, DeltaParameters, DeltaRows, DeltaShape, DeltaState};
pub use rows::{AddNorm, Embed, Norm, OutputGate, QkNormRope, SiluMul};

/// Loads the kernels of rows and experts, which nothing is made for beforehand, into the context of a stream's device, so that no later call does.
///
/// # Errors
/// [`Refusal::Cuda`].
pub fn prepare(stream: &Stream) -> Result<(), Refusal> {
    stream.device().make_current()?;
    // SAFETY: the device's context is current, for all of these.
    check("qwen3_5_rows_prepare", unsafe { ffi::qwen3_5_rows_prepare() })?;
    // SAFETY: as above.
    check("qwen3_5_experts_prepare", unsafe { ffi::qwen3_5_experts_prepare() })
}

/// Refuses a width that is not one of 8, 16, ... `most`.
fn eights(what: &str, dim: &'static str, value: usize, most: usize) -> Result<(), Refusal> {
    takes(what, dim, value, Bound { min: 8, max: most as u64, multiple_of: 8 })
}

/// Refuses a dimension outside of `least..=most`.
fn within(what: &str, dim: &'static str, value: usize, least: usize, most: usize) -> Result<(), Refusal> {
    takes(what, dim, value, Bound { min: least as u64, max: most as u64, multiple_of: 1 })
}

fn takes(what: &str, dim: &'static str, value: usize, bound: Bound) -> Result<(), Refusal> {
    let value = value as u64;
    if bound.takes(value) {
        return Ok(());
    }
    Err(Refusal::DimOutside { what: what.to_string(), dim, value, bound })
}

/// The address of a view that a call on `stream` reads, if it has the type and the elements that the call needs.
fn input<T>(
    what: &str,
    view: View<'_>,
    dtype: DType,
    len: usize,
    stream: &Stream,
) -> Result<*const T, Refusal> {
    view.expect(what, dtype, len, stream)?;
    Ok(view.pointer() as *const T)
}

/// As [`input`], of a view that the call writes.
fn output<T>(
    what: &str,
    view: &ViewMut<'_>,
    dtype: DType,
    len: usize,
    stream: &Stream,
) -> Result<*mut T, Refusal> {
    view.expect(what, dtype, len, stream)?;
    Ok(view.pointer() as *mut T)
}

fn check(call: &str, code: i32) -> Result<(), Refusal> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the runtime returns a static, NUL-terminated name for every code, known or not.
    let name = unsafe { CStr::from_ptr(ffi::qwen3_5_error(code)) };
    Err(Refusal::Cuda { call: call.to_string(), problem: name.to_string_lossy().into_owned() })
}
