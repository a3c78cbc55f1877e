//! The model on a GPU: BF16 weights and residual stream, FP32 accumulation and norms, static buffers.
//!
//! [`CudaModel`] is made from a [`Model`](crate::Model), whose checkpoint it uploads; its seats hold the host's own BF16 form until an
//! implementation is bound to them, and their rows are on the model's stream. A [`DecodeLoop`](decode_loop::DecodeLoop) runs it:
//! it is a [`CudaHost`](decode_loop::CudaHost).

mod attention;
mod delta;
mod experts;
mod ffn;
mod layer;
mod model;
mod seats;
mod sequence;

pub use model::{CudaModel, StepBytes};
