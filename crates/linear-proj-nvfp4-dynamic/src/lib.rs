//! `linear_proj/nvfp4_dynamic`: NVFP4 weights and NVFP4 activations, whose scales are computed at every call.
//!
//! 4.5 bits a weight, so little over a quarter of the bytes of BF16. Both sides are E2M1 codes in blocks of 16 along K under
//! UE4M3 scales, with one FP32 global scale for the weights and one for each row
//! ([`linear_proj_nvfp4`] has what it shares with other NVFP4 variants). With `w` and `xq` standing for E2M1 times E4M3:
//!
//! `y[m, n] = bf16(global * globals[m] * sum over k of w[n, k] * xq[m, k] + bias[n])`
//!
//! Products are exact, sums are FP32 in one fixed order, the global scales are multiplied in FP64, and the result is rounded to
//! FP32 before the bias and to BF16 after it. Rows are rounded to BF16 before they are quantised. A row that is not finite
//! gives a row of NaN. [`Options`](linear_proj::Options) may set all global scales to 1, and weights that are NVFP4 already are taken
//! over as they are. Serves every M itself, and M of 1 to 16 row-invariantly: more rows pass through the
//! tensor cores in a form of their own where the device has it and a [`Workspace`](device::Workspace) was given, else 16 at a time. A
//! call that is not of the bound form is refused.
//!
//! On compute capability 12.0, where sm_120a is among the architectures built, codes and scales enter the tensor cores as they
//! are. That path is compiled and has not run on any device yet.
//!
//! ```
//! use device::Device;
//! use linear_proj::{Bind, DenseWeights, Door, Rows, RowsMut, Seat};
//!
//! let w: Vec<f32> = (0..32 * 64).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
//! let door = Door::of(&linear_proj_nvfp4_dynamic::ENTRY)?;
//! let bind = Bind {
//!     seat: "demo",
//!     weights: DenseWeights::from_f32(32, 64, &w)?,
//!     bias: None,
//!     device: &Device::Cpu,
//! };
//! let mut seat = Seat::without_host("demo", door.bind(&bind)?);
//!
//! let (x, mut y) = ([1.0f32; 64], [0.0f32; 32]);
//! seat.project(Rows::host(&x[..], 1, 64)?, RowsMut::host(&mut y[..], 1, 32)?)?;
//! let exact: f32 = w[..64].iter().sum();
//! assert!((y[0] - exact).abs() < 1.0);
//! # Ok::<(), structure_core::Refusal>(())
//! ```

mod bind;
mod cpu;
#[cfg(kernels_built)]
mod cuda;
#[cfg(kernels_built)]
mod ffi;

use linear_proj::{Factory, STRUCTURE};
use linear_proj_nvfp4::ENVELOPE;
use structure_core::{Fallback, Formats, Registration, StructureId, register};

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// This implementation's id.
pub const ID: StructureId = StructureId { structure: STRUCTURE, variant: "nvfp4_dynamic" };

static FACTORY: Factory = Factory { bind: bind::bind };

/// The registration, for explicit registration where `inventory` does not reach.
pub static ENTRY: Registration = Registration {
    id: ID,
    summary: "NVFP4 weights and activations, two-level scales, activation scales per call",
    envelope: ENVELOPE,
    formats: Formats { weights: "NVFP4", activations: "NVFP4 per row" },
    calibrated: false,
    fallback: Fallback::Refuse,
    kernels: &KERNELS,
    factory: &FACTORY,
};

register!(ENTRY);
