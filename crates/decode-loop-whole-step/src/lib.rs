//! `decode_loop/whole_step`: a decode step is one CUDA graph, from the embedding of a token to the choice of the next one.
//!
//! Between tokens the host does nothing but replay: the next token, its position, the check for the end of the text and the sampler are on
//! the device. Tokens come back through a ring in mapped memory, so that the callback runs while the device goes on; a few replays are
//! always queued ahead. The graph is captured when the loop is built, without running anything, so the first text is as fast as all others
//! and has the same bits.
//!
//! ```
//! use std::ops::ControlFlow;
//!
//! use decode_loop::{Arm, CpuHost, Door, HostShape, LoopOptions, Request, Sampler, Sequence};
//! use structure_core::Refusal;
//!
//! /// Counts: after token n comes token n + 1.
//! struct Counter;
//!
//! impl CpuHost for Counter {
//!     fn shape(&self) -> HostShape {
//!         HostShape { vocab: 100, max_positions: 1000 }
//!     }
//!     fn begin(&mut self, _: &Sequence<'_>) -> Result<(), Refusal> {
//!         Ok(())
//!     }
//!     fn kv_bytes(&self) -> u64 {
//!         0
//!     }
//!     fn reset(&mut self) -> Result<(), Refusal> {
//!         Ok(())
//!     }
//!     fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Refusal> {
//!         let next = tokens.last().map_or(0, |token| (token + 1) % 100);
//!         Ok((0..100).map(|token| if token == next { 1.0 } else { 0.0 }).collect())
//!     }
//! }
//!
//! let mut host = Counter;
//! let options = LoopOptions { sequence: Sequence { window: 16, ..Sequence::default() } };
//! let mut decode = Door::of(&decode_loop_whole_step::ENTRY)?.build(Arm::Cpu(&mut host), &options)?;
//! let request = Request { prompt: &[7], max_new: 10, stop: &[10], sampler: Sampler::Greedy };
//! let generation = decode.generate(&request, &mut |_| ControlFlow::Continue(()))?;
//! assert_eq!(generation.tokens, [8, 9, 10]);
//! # Ok::<(), Refusal>(())
//! ```

mod bind;
mod cpu;
#[cfg(kernels_built)]
mod cuda;
#[cfg(kernels_built)]
mod ffi;
#[cfg(kernels_built)]
mod replay;
mod text;

use decode_loop::{Factory, STRUCTURE};
use structure_core::{
    Band, Bound, DType, DimBound, Envelope, Fallback, Formats, Registration, StructureId, register,
};

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// This implementation's id.
pub const ID: StructureId = StructureId { structure: STRUCTURE, variant: "whole_step" };

/// What it takes. The id of a token shares a word with its number in the text and with what went wrong; positions are I32.
const ENVELOPE: Envelope = Envelope {
    dims: &[
        DimBound { name: "vocab", bound: Bound { min: 1, max: 1 << 24, multiple_of: 1 } },
        DimBound { name: "window", bound: Bound { min: 1, max: 1 << 30, multiple_of: 1 } },
    ],
    weight_dtypes: &[],
    row_dtypes: &[DType::F32],
    band: Band { min: 1, max: 1 },
};

static FACTORY: Factory = Factory::Loop(bind::bind);

/// The registration, for explicit registration where `inventory` does not reach.
pub static ENTRY: Registration = Registration {
    id: ID,
    summary: "one captured graph a token: step, choice, end of text",
    envelope: ENVELOPE,
    formats: Formats { weights: "the host's", activations: "FP32 logits" },
    calibrated: false,
    fallback: Fallback::Refuse,
    kernels: &KERNELS,
    factory: &FACTORY,
};

register!(ENTRY);
