//! The safe wrapper of the streaming read.
#![allow(unsafe_code, reason = "the launcher is a C function")]

use std::ffi::CStr;

use device::{Buffer, Stream};
use structure_core::Refusal;

use crate::ffi;

/// Queues one read of the whole buffer.
pub(crate) fn stream_read(stream: &Stream, data: &Buffer<u8>, sink: &mut Buffer<u8>) -> Result<(), Refusal> {
    let gpu = stream.device();
    gpu.make_current()?;
    let data = data.view();
    let (from, bytes) = (data.pointer() as *const _, (data.len() / 16 * 16) as i64);
    let sink = sink.view_mut().pointer() as *mut _;
    // SAFETY: both buffers are on the stream's device and as long as the launcher asks; the context is current.
    let code = unsafe { ffi::stream_read(from, bytes, sink, stream.raw().cast()) };
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the runtime returns a static, NUL-terminated name for every code.
    let name = unsafe { CStr::from_ptr(ffi::stream_read_error(code)) };
    Err(Refusal::Cuda { call: "stream_read".to_string(), problem: name.to_string_lossy().into_owned() })
}
