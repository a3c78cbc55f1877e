use std::marker::PhantomData;
use std::ops::Range;

use cudarc::driver::result;
use half::{bf16, f16};
use structure_core::{DType, Place, Refusal};

use crate::driver::Named;
use crate::{CudaDevice, Stream};

mod sealed {
    pub trait Sealed {}
}

/// A type whose values device memory can hold: plain bits, all patterns valid, zero among them.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// Its name at run time.
    const DTYPE: DType;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),* $(,)?) => {
        $(impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}

element!(f32 => F32, f16 => F16, bf16 => BF16, i8 => I8, i32 => I32, u8 => U8);

/// Device memory of one element type and shape, row-major.
///
/// Memory is taken and given back by the driver's synchronous calls: a buffer may be dropped while kernels that use it are
/// still queued, and it is never allocated in a hot call.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    device: CudaDevice,
    pointer: u64,
    shape: Vec<usize>,
    elements: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// A buffer of zero bits, written in the order of `stream` and waited for.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] before anything is taken when too little is free, [`Refusal::Cuda`] otherwise.
    pub fn zeros(stream: &Stream, shape: &[usize]) -> Result<Self, Refusal> {
        let mut buffer = Self::uninitialised(stream.device(), shape)?;
        buffer.fill_bytes(stream, 0)?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// A buffer with these elements, copied in the order of `stream` and waited for.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when the slice is not as long as the shape says; otherwise as [`Buffer::zeros`].
    pub fn from_host(stream: &Stream, elements: &[T], shape: &[usize]) -> Result<Self, Refusal> {
        let mut buffer = Self::uninitialised(stream.device(), shape)?;
        buffer.copy_from_host(stream, elements)?;
        Ok(buffer)
    }

    fn uninitialised(device: &CudaDevice, shape: &[usize]) -> Result<Self, Refusal> {
        let elements = shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        let bytes = elements.and_then(|elements| elements.checked_mul(T::DTYPE.size())).unwrap_or(usize::MAX);
        let free = device.memory()?.free;
        let what = || format!("a {} buffer of shape {shape:?}", T::DTYPE);
        if bytes as u64 > free {
            return Err(Refusal::OutOfMemory { what: what(), asked: bytes as u64, free });
        }
        device.make_current()?;
        // The driver has no allocation of zero bytes.
        // SAFETY: the context is current; the memory is freed once, in `drop`.
        let pointer = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|_| Refusal::OutOfMemory {
            what: what(),
            asked: bytes as u64,
            free,
        })?;
        Ok(Buffer { device: device.clone(), pointer, shape: shape.to_vec(), elements: PhantomData })
    }

    /// Elements per dimension, slowest first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Elements in all.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes in all.
    pub fn bytes(&self) -> usize {
        self.len() * T::DTYPE.size()
    }

    /// Overwrites every byte, in the order of `stream`.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver refuses.
    pub fn fill_bytes(&mut self, stream: &Stream, byte: u8) -> Result<(), Refusal> {
        if self.is_empty() {
            return Ok(());
        }
        self.device.make_current()?;
        let raw = stream.inner().cu_stream();
        // SAFETY: the pointer and the length are this buffer's own, and it is borrowed mutably.
        unsafe { result::memset_d8_async(self.pointer, byte, self.bytes(), raw) }.named("cuMemsetD8Async")
    }

    /// Overwrites all elements and waits, so that the slice may be reused at once.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when the lengths differ, [`Refusal::Cuda`] when the driver refuses.
    pub fn copy_from_host(&mut self, stream: &Stream, elements: &[T]) -> Result<(), Refusal> {
        self.expect_len(elements.len())?;
        if self.is_empty() {
            return Ok(());
        }
        self.device.make_current()?;
        // SAFETY: source and destination hold the same number of bytes; the stream is waited for below.
        unsafe { result::memcpy_htod_async(self.pointer, elements, stream.inner().cu_stream()) }
            .named("cuMemcpyHtoDAsync")?;
        stream.synchronize()
    }

    /// Overwrites the elements from `first` on and waits, so that the slice may be reused at once.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when the buffer ends before, [`Refusal::Cuda`] when the driver refuses.
    pub fn copy_range_from_host(
        &mut self,
        stream: &Stream,
        first: usize,
        elements: &[T],
    ) -> Result<(), Refusal> {
        let to = self.address_of(first, elements.len())?;
        if elements.is_empty() {
            return Ok(());
        }
        self.device.make_current()?;
        // SAFETY: the range checked above lies inside this buffer; the stream is waited for below.
        unsafe { result::memcpy_htod_async(to, elements, stream.inner().cu_stream()) }
            .named("cuMemcpyHtoDAsync")?;
        stream.synchronize()
    }

    /// A second buffer with the same elements, copied on the device in the order of `stream` and waited for.
    ///
    /// # Errors
    /// As [`Buffer::zeros`].
    pub fn duplicate(&self, stream: &Stream) -> Result<Self, Refusal> {
        let copy = Self::uninitialised(&self.device, &self.shape)?;
        if self.is_empty() {
            return Ok(copy);
        }
        self.device.make_current()?;
        // SAFETY: both buffers hold these bytes, and the stream is waited for while both are borrowed.
        unsafe {
            result::memcpy_dtod_async(copy.pointer, self.pointer, self.bytes(), stream.inner().cu_stream())
        }
        .named("cuMemcpyDtoDAsync")?;
        stream.synchronize()?;
        Ok(copy)
    }

    /// All elements, after all work so far on `stream`.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when that work or the copy failed.
    pub fn to_host(&self, stream: &Stream) -> Result<Vec<T>, Refusal> {
        let mut elements = vec![T::default(); self.len()];
        self.copy_to_host(stream, &mut elements)?;
        Ok(elements)
    }

    /// As [`Buffer::to_host`], into a slice of the same length.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when the lengths differ, [`Refusal::Cuda`] when the work or the copy failed.
    pub fn copy_to_host(&self, stream: &Stream, elements: &mut [T]) -> Result<(), Refusal> {
        self.expect_len(elements.len())?;
        self.copy_range_to_host(stream, 0, elements)
    }

    /// The elements from `first` on, as many as the slice holds, after all work so far on `stream`.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when the buffer ends before, [`Refusal::Cuda`] when the work or the copy failed.
    pub fn copy_range_to_host(
        &self,
        stream: &Stream,
        first: usize,
        elements: &mut [T],
    ) -> Result<(), Refusal> {
        let from = self.address_of(first, elements.len())?;
        if elements.is_empty() {
            return Ok(());
        }
        self.device.make_current()?;
        // SAFETY: the range checked above lies inside this buffer; the stream is waited for below.
        unsafe { result::memcpy_dtoh_async(elements, from, stream.inner().cu_stream()) }
            .named("cuMemcpyDtoHAsync")?;
        stream.synchronize()
    }

    /// All elements, to read on the device.
    pub fn view(&self) -> View<'_> {
        View {
            pointer: self.pointer,
            len: self.len(),
            dtype: T::DTYPE,
            ordinal: self.device.ordinal(),
            borrow: PhantomData,
        }
    }

    /// All elements, to write on the device.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut {
            pointer: self.pointer,
            len: self.len(),
            dtype: T::DTYPE,
            ordinal: self.device.ordinal(),
            borrow: PhantomData,
        }
    }

    /// Where element `first` lies, if `len` elements from there on are this buffer's.
    fn address_of(&self, first: usize, len: usize) -> Result<u64, Refusal> {
        if first.checked_add(len).is_none_or(|end| end > self.len()) {
            let what = format!("elements from {first} on of a {} buffer", T::DTYPE);
            return Err(Refusal::ShapeMismatch { what, expected: self.shape.clone(), got: vec![len] });
        }
        Ok(self.pointer + (first * T::DTYPE.size()) as u64)
    }

    fn expect_len(&self, len: usize) -> Result<(), Refusal> {
        if len == self.len() {
            return Ok(());
        }
        let what = format!("a copy to or from a {} buffer", T::DTYPE);
        Err(Refusal::ShapeMismatch { what, expected: self.shape.clone(), got: vec![len] })
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        // Nothing can be reported from a drop; a driver that refuses to free is reported by the next call.
        if self.device.make_current().is_ok() {
            // SAFETY: the pointer came from `malloc_sync` and is freed here alone.
            let _ = unsafe { result::free_sync(self.pointer) };
        }
    }
}

macro_rules! view {
    ($name:ident, $borrow:ty, $doc:literal, $aliasing:literal) => {
        #[doc = $doc]
        #[derive(Debug)]
        pub struct $name<'a> {
            pointer: u64,
            len: usize,
            dtype: DType,
            ordinal: usize,
            borrow: PhantomData<$borrow>,
        }

        impl<'a> $name<'a> {
            /// Wraps device memory that another library owns.
            ///
            /// # Safety
            /// `pointer` is the device address of `len` elements of `dtype` on the device `ordinal`, aligned to 16 bytes,
            /// and stays so until all work that uses the view is done.
            #[doc = $aliasing]
            pub unsafe fn from_raw(pointer: u64, len: usize, dtype: DType, ordinal: usize) -> Self {
                Self { pointer, len, dtype, ordinal, borrow: PhantomData }
            }

            /// The device address.
            pub fn pointer(&self) -> u64 {
                self.pointer
            }

            /// Elements.
            pub fn len(&self) -> usize {
                self.len
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// The elements' type.
            pub fn dtype(&self) -> DType {
                self.dtype
            }

            /// The device's ordinal.
            pub fn ordinal(&self) -> usize {
                self.ordinal
            }

            /// Refuses a view that a call on `stream` cannot take: of another type than `dtype`, of fewer than `len` elements, or on
            /// another device. `what` names it.
            ///
            /// # Errors
            /// [`Refusal::DTypeOutside`], [`Refusal::ShapeMismatch`] or [`Refusal::WrongDevice`].
            pub fn expect(
                &self,
                what: &str,
                dtype: DType,
                len: usize,
                stream: &Stream,
            ) -> Result<(), Refusal> {
                let what = || what.to_string();
                if self.dtype != dtype {
                    let (dtype, accepted) = (self.dtype.to_string(), dtype.to_string());
                    return Err(Refusal::DTypeOutside { what: what(), dtype, accepted });
                }
                if self.len < len {
                    return Err(Refusal::ShapeMismatch {
                        what: what(),
                        expected: vec![len],
                        got: vec![self.len],
                    });
                }
                let device = stream.device().ordinal();
                if self.ordinal != device {
                    let (rows, seat) =
                        (Place::Cuda(self.ordinal).to_string(), Place::Cuda(device).to_string());
                    return Err(Refusal::WrongDevice { what: what(), rows, seat });
                }
                Ok(())
            }

            /// The first `len` elements.
            ///
            /// # Errors
            /// [`Refusal::ShapeMismatch`] when there are fewer.
            pub fn first(self, len: usize) -> Result<Self, Refusal> {
                if len > self.len {
                    let what = format!("the first elements of a {} view", self.dtype);
                    return Err(Refusal::ShapeMismatch { what, expected: vec![self.len], got: vec![len] });
                }
                Ok(Self { len, ..self })
            }

            /// The same bits as elements of another type.
            ///
            /// # Errors
            /// [`Refusal::ShapeMismatch`] when they are not whole elements of it.
            pub fn bits_as(self, dtype: DType) -> Result<Self, Refusal> {
                let bytes = self.len * self.dtype.size();
                if bytes % dtype.size() != 0 {
                    let what = format!("bytes of a {} view as {dtype}", self.dtype);
                    return Err(Refusal::ShapeMismatch {
                        what,
                        expected: vec![dtype.size()],
                        got: vec![bytes],
                    });
                }
                Ok(Self { len: bytes / dtype.size(), dtype, ..self })
            }

            /// The elements of a range; its start must lie on 16 bytes.
            ///
            /// # Errors
            /// [`Refusal::ShapeMismatch`] when there are fewer, [`Refusal::ValueOutside`] for another start.
            pub fn range(self, range: Range<usize>) -> Result<Self, Refusal> {
                let offset = range.start * self.dtype.size();
                if range.start > range.end || range.end > self.len {
                    let what = format!("a range of a {} view", self.dtype);
                    let got = vec![range.start, range.end];
                    return Err(Refusal::ShapeMismatch { what, expected: vec![0, self.len], got });
                }
                if offset % 16 != 0 {
                    return Err(Refusal::ValueOutside {
                        what: format!("the start of a range of a {} view", self.dtype),
                        value: format!("{offset} bytes"),
                        bound: "a multiple of 16 bytes".to_string(),
                    });
                }
                Ok(Self { pointer: self.pointer + offset as u64, len: range.len(), ..self })
            }
        }
    };
}

view!(View, &'a (), "Device memory that is read.", "Nothing writes it meanwhile.");
view!(ViewMut, &'a mut (), "Device memory that is written.", "Nothing else reads or writes it meanwhile.");

impl View<'_> {
    /// The first elements, as many as the slice holds, after all work so far on `stream`.
    ///
    /// # Errors
    /// [`Refusal::DTypeOutside`] for elements of another type, [`Refusal::ShapeMismatch`] when there are fewer, [`Refusal::Cuda`] when
    /// the work or the copy failed.
    pub fn copy_to_host<T: Element>(&self, stream: &Stream, elements: &mut [T]) -> Result<(), Refusal> {
        check_copy::<T>(self.dtype, self.len, elements.len())?;
        if elements.is_empty() {
            return Ok(());
        }
        stream.device().make_current()?;
        // SAFETY: the view holds this many elements of the type; the stream is waited for while it is borrowed.
        unsafe { result::memcpy_dtoh_async(elements, self.pointer, stream.inner().cu_stream()) }
            .named("cuMemcpyDtoHAsync")?;
        stream.synchronize()
    }
}

impl ViewMut<'_> {
    /// Overwrites the first elements and waits, so that the slice may be reused at once.
    ///
    /// # Errors
    /// As [`View::copy_to_host`].
    pub fn copy_from_host<T: Element>(&mut self, stream: &Stream, elements: &[T]) -> Result<(), Refusal> {
        check_copy::<T>(self.dtype, self.len, elements.len())?;
        if elements.is_empty() {
            return Ok(());
        }
        stream.device().make_current()?;
        // SAFETY: the view holds this many elements of the type and is borrowed mutably; the stream is waited for.
        unsafe { result::memcpy_htod_async(self.pointer, elements, stream.inner().cu_stream()) }
            .named("cuMemcpyHtoDAsync")?;
        stream.synchronize()
    }

    /// The same memory, to read.
    pub fn view(&self) -> View<'_> {
        let ViewMut { pointer, len, dtype, ordinal, .. } = *self;
        View { pointer, len, dtype, ordinal, borrow: PhantomData }
    }
}

/// Refuses a copy of `asked` elements of type `T` to or from a view.
fn check_copy<T: Element>(dtype: DType, len: usize, asked: usize) -> Result<(), Refusal> {
    let what = || format!("a copy to or from a {dtype} view");
    if dtype != T::DTYPE {
        let (dtype, accepted) = (T::DTYPE.to_string(), dtype.to_string());
        return Err(Refusal::DTypeOutside { what: what(), dtype, accepted });
    }
    if asked > len {
        return Err(Refusal::ShapeMismatch { what: what(), expected: vec![len], got: vec![asked] });
    }
    Ok(())
}

impl Clone for View<'_> {
    fn clone(&self) -> Self {
        *self
    }
}

impl Copy for View<'_> {}
