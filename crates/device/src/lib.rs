//! Devices and memory: the one small door to CUDA, and the only crate besides the implementations' `cuda.rs` files
//! with `unsafe` in it.
//!
//! - [`Device`] is the CPU or one GPU; [`CudaDevice::open`] probes for the driver before it touches anything, so a
//!   program starts on a machine without one and gets a [`Refusal`](structure_core::Refusal) it can print.
//! - [`Buffer`] owns device memory and knows its element type and shape; [`View`] and [`ViewMut`] borrow it, or wrap
//!   memory that another library owns.
//! - [`Stream`], [`Event`] and [`Graph`] order, time and replay work.
//! - [`MappedWords`] is host memory that a kernel writes while the host looks on.
//! - [`MappedFile`] maps a checkpoint's shard instead of reading it.
//!
//! Nothing here allocates, frees or synchronises behind the caller's back: allocation is [`Buffer::zeros`] and
//! [`Buffer::from_host`], waiting is [`Stream::synchronize`] and the copies that say so.
//!
//! ```no_run
//! use device::{Buffer, CudaDevice};
//! # fn main() -> Result<(), structure_core::Refusal> {
//! let gpu = CudaDevice::open(0)?;
//! let stream = gpu.new_stream()?;
//! let rows = Buffer::from_host(&stream, &[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//! assert_eq!(rows.to_host(&stream)?, [1.0, 2.0, 3.0, 4.0]);
//! # Ok(())
//! # }
//! ```
#![allow(unsafe_code, reason = "this crate is the door to CUDA and to mapped files")]

mod buffer;
mod cuda;
mod driver;
mod event;
mod graph;
mod mapped;
mod mapped_words;
mod stream;
mod workspace;

use std::fmt;

use structure_core::Place;

pub use buffer::{Buffer, Element, View, ViewMut};
pub use cuda::{CudaDevice, MemoryInfo};
pub use event::Event;
pub use graph::Graph;
pub use mapped::MappedFile;
pub use mapped_words::MappedWords;
pub use stream::{RawStream, Stream};
pub use workspace::Workspace;

/// Where something runs.
#[derive(Clone, Debug)]
pub enum Device {
    /// The CPU arm.
    Cpu,
    /// One GPU.
    Cuda(CudaDevice),
}

impl Device {
    /// The same without a handle: comparable and printable.
    pub fn place(&self) -> Place {
        match self {
            Device::Cpu => Place::Cpu,
            Device::Cuda(gpu) => Place::Cuda(gpu.ordinal()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(gpu) => write!(f, "cuda:{} ({})", gpu.ordinal(), gpu.name()),
        }
    }
}
