//! The probe for a CUDA driver: cudarc panics when it is asked for a symbol and finds no library.

use std::sync::OnceLock;

use cudarc::driver::{CudaContext, DriverError};
use libloading::Library;
use structure_core::Refusal;

#[cfg(windows)]
const DRIVER: &str = "nvcuda.dll";
#[cfg(not(windows))]
const DRIVER: &str = "libcuda.so.1";

/// How many devices the driver lists.
///
/// # Errors
/// [`Refusal::NoDevice`] when there is no driver library, when it cannot start, or when it lists no device.
pub(crate) fn device_count() -> Result<usize, Refusal> {
    // The library stays loaded, as cudarc is about to use it; whether it is there does not change while we run.
    static PROBE: OnceLock<Result<Library, String>> = OnceLock::new();
    // SAFETY: loading NVIDIA's driver library runs its initialisers, which have no preconditions.
    let probe = PROBE.get_or_init(|| unsafe { Library::new(DRIVER) }.map_err(|error| error.to_string()));
    if let Err(error) = probe {
        return Err(Refusal::NoDevice {
            reason: format!("the driver library {DRIVER} cannot be loaded ({error})"),
        });
    }
    match CudaContext::device_count() {
        Ok(count) if count > 0 => Ok(count as usize),
        Ok(_) => Err(Refusal::NoDevice { reason: "the driver lists no device".to_string() }),
        Err(error) => Err(Refusal::NoDevice { reason: format!("the driver does not start ({error})") }),
    }
}

/// Names the driver call in an error of cudarc's.
pub(crate) trait Named<T> {
    fn named(self, call: &str) -> Result<T, Refusal>;
}

impl<T> Named<T> for Result<T, DriverError> {
    fn named(self, call: &str) -> Result<T, Refusal> {
        self.map_err(|error| Refusal::Cuda { call: call.to_string(), problem: error.to_string() })
    }
}
