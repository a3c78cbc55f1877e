//! The number formats of quantised LLM weights and activations: encode, decode, pack. Pure Rust, no device.
//!
//! - [`e4m3`] and [`e2m1`], the FP8 and FP4 codes;
//! - [`int8_channel`], INT8 codes with one FP32 scale per output channel;
//! - [`fp8_block`], E4M3 codes with one scale per 128x128 block, as FP8 checkpoints store them;
//! - [`nvfp4`], E2M1 codes in blocks of 16, each with a UE4M3 scale, under one FP32 global scale;
//! - [`RelativeL2`], how far a conversion is from its source.
//!
//! # Reproducible on a GPU
//!
//! Every formula here is a fixed sequence of IEEE 754 binary32 operations, each rounded to nearest, ties to even: where
//! the documentation writes `a / b`, it means the correctly rounded division (`__fdiv_rn`, or `/` in a kernel compiled
//! without fast math), never a product with a reciprocal. Nothing is contracted into a fused multiply-add, and subnormal
//! numbers are kept. A kernel that does the same operations writes the same bytes.
//!
//! The FP16 and BF16 conversions are those of the `half` crate.
//!
//! ```
//! use number_formats::nvfp4::{Nvfp4Tensor, ScaleMode};
//! use number_formats::relative_l2;
//!
//! // Two output features of 16 inputs each.
//! let weights: Vec<f32> = (0..32).map(|i| (i as f32 - 15.5) * 1e-3).collect();
//! let packed = Nvfp4Tensor::quantize_weight(&weights, 2, 16, ScaleMode::TwoLevel)?;
//! assert_eq!((packed.codes().len(), packed.scales().len()), (16, 2));
//!
//! let mut back = vec![0.0; 32];
//! packed.dequantize(&mut back)?;
//! assert!(relative_l2(weights, back) < 0.12);
//! # Ok::<(), number_formats::FormatError>(())
//! ```

mod amax;
pub mod e2m1;
pub mod e4m3;
mod error;
pub mod fp8_block;
pub mod int8_channel;
mod metrics;
pub mod nvfp4;
#[cfg(test)]
mod oracle;

pub use error::FormatError;
pub use metrics::{RelativeL2, relative_l2};
