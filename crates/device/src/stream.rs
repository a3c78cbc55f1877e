use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaStream, sys};
use structure_core::Refusal;

use crate::CudaDevice;
use crate::driver::Named;

/// A `cudaStream_t` or `CUstream` as launchers take it.
pub type RawStream = *mut c_void;

/// Work in order on one device.
#[derive(Clone)]
pub struct Stream {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    overlap: Arc<AtomicBool>,
}

impl Stream {
    pub(crate) fn new(device: CudaDevice, stream: Arc<CudaStream>) -> Self {
        Stream { device, stream, overlap: Arc::new(AtomicBool::new(true)) }
    }

    /// Wraps a stream that another library owns, so that our work joins its order.
    ///
    /// # Safety
    /// `raw` is a live stream of `device`'s primary context and outlives every clone of the result.
    pub unsafe fn from_raw(device: &CudaDevice, raw: RawStream) -> Self {
        // SAFETY: the caller's promise is exactly what cudarc asks for.
        let stream = unsafe { device.context().wrap_borrowed_stream(raw.cast()) };
        Stream::new(device.clone(), stream)
    }

    /// The device it runs on.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// The raw handle, for a launcher. The device's context must be current: see [`CudaDevice::make_current`].
    pub fn raw(&self) -> RawStream {
        self.stream.cu_stream().cast()
    }

    /// Whether kernels may start before the one before them in the stream is over (programmatic dependent launch, sm_90 on). They
    /// then load weights early and wait before they touch anything that a kernel writes, so results are the same. Of all clones
    /// of the stream; at first they may.
    pub fn set_overlap(&self, overlap: bool) {
        self.overlap.store(overlap, Ordering::Relaxed);
    }

    /// What [`set_overlap`](Self::set_overlap) said last, for a launcher.
    pub fn overlap(&self) -> bool {
        self.overlap.load(Ordering::Relaxed)
    }

    /// Waits until all work so far is done.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when that work failed; a fault in a kernel is reported here.
    pub fn synchronize(&self) -> Result<(), Refusal> {
        self.stream.synchronize().named("cuStreamSynchronize")
    }

    /// Whether all work so far is done, without waiting for it.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when that work failed.
    pub fn is_idle(&self) -> Result<bool, Refusal> {
        self.device.make_current()?;
        // SAFETY: the stream is live and its context is current.
        match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => other.result().named("cuStreamQuery").map(|()| true),
        }
    }

    pub(crate) fn inner(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?} on {:?})", self.raw(), self.device)
    }
}
