//! What the NVFP4 implementations of `linear_proj` share. Nothing is registered here, and no kernel is compiled.
//!
//! - [`Quantized`]: weights in canonical order, [`tiles`] the order in which the kernels stream them, [`native_tiles`] that of the
//!   kernels of sm_120a, which are compiled and not run yet;
//! - [`RowQuantiser`]: how rows become NVFP4, with or without an inverse balance;
//! - [`CpuForm`]: both together, for a [`CpuArm`](linear_proj::CpuArm);
//! - [`CudaForm`]: both together on a device, for a [`CudaArm`](linear_proj::CudaArm); an implementation's `cuda.rs` brings its
//!   launchers as a [`Launcher`].
//!
//! With `w` and `xq` standing for E2M1 times E4M3:
//!
//! `y[m, n] = bf16(global * globals[m] * sum over k of w[n, k] * xq[m, k] + bias[n])`
//!
//! ```
//! use device::Device;
//! use linear_proj::{Bind, DenseWeights, ScaleMode};
//! use linear_proj_nvfp4::Quantized;
//!
//! let w: Vec<f32> = (0..32 * 64).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
//! let weights = DenseWeights::from_f32(32, 64, &w)?;
//! let bind = Bind { seat: "demo", weights, bias: None, device: &Device::Cpu };
//! let quantized = Quantized::new(&bind, ScaleMode::TwoLevel, None)?;
//! assert_eq!((quantized.codes.len(), quantized.scales.len()), (32 * 32, 32 * 4));
//! assert!(quantized.conversion_error < 0.12);
//! # Ok::<(), structure_core::Refusal>(())
//! ```

mod cpu;
mod cuda_form;
pub mod native_tiles;
mod quantized;
mod rows;
pub mod tiles;

use number_formats::nvfp4::BLOCK;
use structure_core::{Band, Bound, DType, DimBound, Envelope};

pub use cpu::CpuForm;
pub use cuda_form::{Call, CudaForm, Launcher, Matrix};
pub use quantized::Quantized;
pub use rows::RowQuantiser;

/// Types that rows and weights may come in.
const DTYPES: &[DType] = &[DType::BF16, DType::F16, DType::F32];

/// What the implementations take: any N, whole blocks along K, and any number of rows. The upper bounds keep a CUDA grid and 64-bit
/// offsets far from their ends.
pub const ENVELOPE: Envelope = Envelope {
    dims: &[
        DimBound { name: "N", bound: Bound { min: 1, max: 1 << 31, multiple_of: 1 } },
        DimBound { name: "K", bound: Bound { min: BLOCK as u64, max: 1 << 24, multiple_of: BLOCK as u64 } },
    ],
    weight_dtypes: DTYPES,
    row_dtypes: DTYPES,
    band: Band { min: 1, max: 1 << 20 },
};
