//! The host: hybrid decoders of the Qwen3.5 class, from Hugging Face checkpoints, with a seat at every projection.
//!
//! Layers mix tokens by the gated delta rule or by full attention (partial rotary, q/k norm, output gate), and have a dense
//! feed-forward or sparse experts with a shared one. A checkpoint may be one file or shards with an index, BF16, F16, F32,
//! FP8 in 128x128 blocks or NVFP4 as compressed-tensors or ModelOpt write it, experts one by one or fused, alone or beside a vision tower, with or without an MTP layer.
//! Weights are mapped, arithmetic is FP32 throughout.
//!
//! Every projection is a [`Seat`](linear_proj::Seat), named by its path in the checkpoint and served by the host until an
//! implementation is bound to it; [`Host`](linear_proj::Host) finds them.
//!
//! ```
//! use std::ops::ControlFlow;
//!
//! use decode_loop::{Arm, Door, LoopOptions, Request, Sampler, Sequence};
//! use linear_proj::Host;
//! use qwen3_5::{CpuModel, Model};
//!
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/tiny-dense");
//! let mut model = Model::load(folder)?;
//! let mut host = CpuModel::new(&mut model);
//! let options = LoopOptions { sequence: Sequence { window: 16, ..Sequence::default() } };
//! let mut decode = Door::of(&decode_loop_whole_step::ENTRY)?.build(Arm::Cpu(&mut host), &options)?;
//! let request = Request { prompt: &[401, 1210, 1034], max_new: 3, stop: &[], sampler: Sampler::Greedy };
//! let generation = decode.generate(&request, &mut |_| ControlFlow::Continue(()))?;
//! assert_eq!(generation.tokens.len(), 3);
//! drop(decode);
//!
//! let paths: Vec<&str> = model.seats().iter().map(|seat| seat.path()).collect();
//! assert_eq!(paths[0], "model.layers.0.linear_attn.in_proj_qkv");
//! # Ok::<(), structure_core::Refusal>(())
//! ```

mod attention;
mod calibrate;
mod checkpoint;
mod config;
mod config_json;
mod conv;
mod cpu_model;
#[cfg(kernels_built)]
pub mod cuda;
mod delta_rule;
mod dense;
mod experts;
#[cfg(kernels_built)]
mod ffi;
mod ffn;
mod fold;
mod gated_delta;
#[cfg(kernels_built)]
mod gpu;
mod header;
mod hidden;
mod layer;
mod loader;
mod math;
mod model;
mod mtp;
mod norm;
mod perplexity;
mod preset;
mod random;
mod rope;
mod router;
mod seats;
mod state;
mod tensor;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

pub use config::{Config, FfnConfig, LayerType, SparseFfnConfig};
pub use cpu_model::CpuModel;
pub use experts::Bank;
pub use fold::NormFeed;
#[cfg(kernels_built)]
pub use gpu::{CudaModel, StepBytes};
pub use hidden::Hidden;
pub use model::Model;
pub use perplexity::Perplexity;
pub use preset::Preset;
pub use state::State;
