//! `linear_proj/nvfp4_balance`: NVFP4 weights and activations, with a balance of the input channels from a calibration.
//!
//! [`nvfp4_dynamic`](https://docs.rs/linear-proj-nvfp4-dynamic) loses accuracy where one channel of a block of 16 is far larger than
//! its neighbours, which then get few of E2M1's steps. Here channel k of the activations is divided by [`balance`]`[k]` and the
//! weights are multiplied by it, which changes no product:
//!
//! `s[k] = clamp((a[k] / mean(a))^(1/2), 1/4, 4)` with `a = max(amax, 1e-6)`
//!
//! - weights: `w[n, k] * s[k]` in FP32, then quantised;
//! - rows: rounded to BF16, times `1 / s[k]` in FP32, then the row's largest magnitude is taken and the row quantised;
//! - the rest is that of `nvfp4_dynamic`, to which it is equal bit for bit where all of `s` is 1.
//!
//! `amax` is the largest magnitude of each input channel on sample texts ([`linear_proj::Calibration`]); a bind without refuses.
//! Where a norm makes the rows, its weight can be divided by `s` instead ([`linear_proj::fold_inverse`]), and the bind told so
//! ([`InverseBalance::InProducer`](linear_proj::InverseBalance)). All who read the norm's rows must have that one `s`: they do when
//! they come from one calibration, as `s` depends on the rows alone.
//!
//! The host form is kept whole: detaching gives its bits back.
//!
//! On compute capability 12.0, where sm_120a is among the architectures built, codes and scales enter the tensor cores as they
//! are. That path is compiled and has not run on any device yet.
//!
//! ```
//! use device::Device;
//! use linear_proj::{Bind, DenseWeights, Door, Options, Rows, RowsMut, Seat};
//!
//! let w: Vec<f32> = (0..32 * 64).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
//! let door = Door::of(&linear_proj_nvfp4_balance::ENTRY)?;
//! let bind = Bind {
//!     seat: "demo",
//!     weights: DenseWeights::from_f32(32, 64, &w)?,
//!     bias: None,
//!     device: &Device::Cpu,
//! };
//! assert!(door.bind(&bind).is_err(), "it is not calibrated");
//!
//! // Channel 5 is larger than the others.
//! let mut x = [1.0f32; 64];
//! x[5] = 30.0;
//! let options = Options { amax: Some(&x), ..Options::default() };
//! let mut seat = Seat::without_host("demo", door.bind_with(&bind, &options)?);
//!
//! let mut y = [0.0f32; 32];
//! seat.project(Rows::host(&x[..], 1, 64)?, RowsMut::host(&mut y[..], 1, 32)?)?;
//! let exact: f32 = w[..64].iter().zip(&x).map(|(w, x)| w * x).sum();
//! assert!((y[0] - exact).abs() < 3.0, "{} {exact}", y[0]);
//! # Ok::<(), structure_core::Refusal>(())
//! ```

mod balance;
mod bind;
mod cpu;
#[cfg(kernels_built)]
mod cuda;
#[cfg(kernels_built)]
mod ffi;

use linear_proj::{Factory, STRUCTURE};
use linear_proj_nvfp4::ENVELOPE;
use structure_core::{Fallback, Formats, Registration, StructureId, register};

pub use balance::balance;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// This implementation's id.
pub const ID: StructureId = StructureId { structure: STRUCTURE, variant: "nvfp4_balance" };

static FACTORY: Factory = Factory { bind: bind::bind };

/// The registration, for explicit registration where `inventory` does not reach.
pub static ENTRY: Registration = Registration {
    id: ID,
    summary: "NVFP4 weights and activations, input channels balanced by a calibration",
    envelope: ENVELOPE,
    formats: Formats { weights: "NVFP4, balanced", activations: "NVFP4 per row, balanced" },
    calibrated: true,
    fallback: Fallback::HostForm,
    kernels: &KERNELS,
    factory: &FACTORY,
};

register!(ENTRY);
