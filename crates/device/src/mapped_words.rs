use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::AtomicU64;

use cudarc::driver::{result, sys};
use structure_core::{DType, Refusal};

use crate::driver::Named;
use crate::{CudaDevice, ViewMut};

/// 64-bit words in host memory that kernels write and the host reads meanwhile, without a copy. Zero at first.
///
/// A kernel stores a whole word at once, so that the host sees all of it or nothing; between words there is no order.
#[derive(Debug)]
pub struct MappedWords {
    device: CudaDevice,
    words: NonNull<AtomicU64>,
    pointer: u64,
    len: usize,
}

// SAFETY: the memory is reached through atomics alone, and the driver frees it from any thread.
unsafe impl Send for MappedWords {}

impl MappedWords {
    /// Pins and maps so many words.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver refuses.
    pub fn zeros(device: &CudaDevice, len: usize) -> Result<Self, Refusal> {
        device.make_current()?;
        let bytes = len.max(1).saturating_mul(size_of::<AtomicU64>());
        // SAFETY: the context is current; the memory is freed once, in `drop`.
        let words =
            unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) }.named("cuMemHostAlloc")?;
        let Some(words) = NonNull::new(words.cast::<AtomicU64>()) else {
            return Err(Refusal::Cuda {
                call: "cuMemHostAlloc".to_string(),
                problem: "no memory".to_string(),
            });
        };
        let mut mapped = MappedWords { device: device.clone(), words, pointer: 0, len };
        // SAFETY: the memory is as long as that, and any bits are a word.
        unsafe { words.as_ptr().write_bytes(0, len) };
        // SAFETY: the memory was allocated to be mapped, and `pointer` is a live integer, which the driver writes.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut mapped.pointer, words.as_ptr().cast(), 0) }
            .result()
            .named("cuMemHostGetDevicePointer")?;
        Ok(mapped)
    }

    /// The words as the host sees them now.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the memory is that long, aligned to pages and initialised, and lives as long as `self`.
        unsafe { slice::from_raw_parts(self.words.as_ptr(), self.len) }
    }

    /// The words as bytes, to write on the device.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        // SAFETY: the device address of that many bytes, aligned to pages, which live as long as the borrow.
        unsafe {
            ViewMut::from_raw(self.pointer, self.len * size_of::<u64>(), DType::U8, self.device.ordinal())
        }
    }
}

impl Drop for MappedWords {
    fn drop(&mut self) {
        // Nothing can be reported from a drop; a driver that refuses to free is reported by the next call.
        if self.device.make_current().is_ok() {
            // SAFETY: the pointer came from `malloc_host` and is freed here alone.
            let _ = unsafe { result::free_host(self.words.as_ptr().cast()) };
        }
    }
}
