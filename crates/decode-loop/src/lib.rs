//! The structure `decode_loop`: from a prompt to tokens.
//!
//! - [`DecodeLoop`] is a loop over one host; an implementation's [`Factory`] builds it, [`Door`] finds it.
//! - [`Request`] is what it is asked, [`Sampler`] how tokens are chosen.
//! - [`CpuHost`] and [`CudaHost`] are what a loop asks of a model: a static sequence, a prompt pass, one step.
//! - [`KvStore`] and [`CpuKv`] are what a host asks of a store of keys and values; [`KvFactory`] makes one.
//!
//! The host ends at FP32 logits. What is chosen from them, whether the text ends and what the next step reads belongs to the loop,
//! which does it on the device: a step is one captured graph.

mod door;
mod generate;
mod host;
mod kv;
mod philox;
mod sampler;

pub use door::{Door, Factory, LoopFn, LoopOptions, STRUCTURE};
pub use generate::{DecodeLoop, Finish, Generation, Progress, Request};
pub use host::{Arm, CpuHost, CudaHost, HostShape, Sequence, StepBuffers};
pub use kv::{
    Attend, CpuKv, CpuKvFn, CudaKvFn, KvChoice, KvFactory, KvOptions, KvRows, KvScale, KvShape, KvStore,
    MAX_QUERY_ROWS,
};
pub use sampler::{Draw, Sampler};
