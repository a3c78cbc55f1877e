use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUdevice_attribute, cuDriverGetVersion};
use structure_core::{ComputeCapability, Refusal};

use crate::Stream;
use crate::driver::{Named, device_count};

/// One GPU: its primary context, shared with every other library of the process that uses it.
#[derive(Clone)]
pub struct CudaDevice {
    context: Arc<CudaContext>,
    name: Arc<str>,
    compute_capability: ComputeCapability,
}

/// Device memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes free.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
}

impl CudaDevice {
    /// Opens the device with this ordinal.
    ///
    /// Turns off cudarc's event tracking, which would put waits on events from before a capture into the capture.
    ///
    /// # Errors
    /// [`Refusal::NoDevice`] without a driver or a device of this ordinal.
    pub fn open(ordinal: usize) -> Result<Self, Refusal> {
        let count = device_count()?;
        if ordinal >= count {
            let reason = format!("device {ordinal} was asked for, the driver lists {count}");
            return Err(Refusal::NoDevice { reason });
        }
        let context = CudaContext::new(ordinal).named("cuDevicePrimaryCtxRetain")?;
        // SAFETY: our buffers are not cudarc slices, so nothing relies on the tracking; order is the caller's stream.
        unsafe { context.disable_event_tracking() };
        let name = context.name().named("cuDeviceGetName")?.into();
        let (major, minor) = context.compute_capability().named("cuDeviceGetAttribute")?;
        let compute_capability = ComputeCapability { major: major as u32, minor: minor as u32 };
        Ok(CudaDevice { context, name, compute_capability })
    }

    /// The driver's number for this device.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// The device's name, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's compute capability, such as 9.0.
    pub fn compute_capability(&self) -> ComputeCapability {
        self.compute_capability
    }

    /// Streaming multiprocessors.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver does not answer.
    pub fn multiprocessors(&self) -> Result<usize, Refusal> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(self.context.attribute(attribute).named("cuDeviceGetAttribute")? as usize)
    }

    /// Bytes of level-2 cache.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver does not answer.
    pub fn l2_bytes(&self) -> Result<usize, Refusal> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        Ok(self.context.attribute(attribute).named("cuDeviceGetAttribute")? as usize)
    }

    /// Memory free and in all.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver does not answer.
    pub fn memory(&self) -> Result<MemoryInfo, Refusal> {
        let (free, total) = self.context.mem_get_info().named("cuMemGetInfo")?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    /// The newest CUDA version that the driver supports, such as `13.0`.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver does not answer.
    pub fn driver_cuda_version(&self) -> Result<String, Refusal> {
        let mut version = 0;
        // SAFETY: the pointer is to a live integer, which the driver writes.
        unsafe { cuDriverGetVersion(&mut version) }.result().named("cuDriverGetVersion")?;
        Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
    }

    /// Refuses to go on when fewer than `bytes` are free; to be asked before the first of several allocations.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] with the bytes asked and free.
    pub fn require(&self, what: &str, bytes: u64) -> Result<(), Refusal> {
        let free = self.memory()?.free;
        if bytes > free {
            return Err(Refusal::OutOfMemory { what: what.to_string(), asked: bytes, free });
        }
        Ok(())
    }

    /// A new stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver has none to give.
    pub fn new_stream(&self) -> Result<Stream, Refusal> {
        Ok(Stream::new(self.clone(), self.context.new_stream().named("cuStreamCreate")?))
    }

    /// Makes this device's context current on the calling thread, as launchers that use the runtime API need.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver refuses.
    pub fn make_current(&self) -> Result<(), Refusal> {
        self.context.bind_to_thread().named("cuCtxSetCurrent")
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({}: {})", self.ordinal(), self.name)
    }
}
