//! `linear_proj/w8a16_static`: INT8 weights with one FP32 scale per output channel, BF16 activations.
//!
//! Half the bytes of BF16 weights, so half the time of a decode step that waits for them. With
//! `s[n] = max(max over k of |w[n, k]| / 127, 1e-12)` and `q = clamp(round(w / s), -127, 127)`, ties to even:
//!
//! `y[m, n] = bf16(s[n] * sum over k of q[n, k] * bf16(x[m, k]) + bias[n])`
//!
//! with FP32 sums in one fixed order and one rounding. Serves M of 1 to 16 itself, row-invariantly: the bits of a row do
//! not depend on M or on the other rows. Larger M are for the host form.
//!
//! ```
//! use device::Device;
//! use linear_proj::{Bind, DenseWeights, Door, Rows, RowsMut, Seat};
//!
//! let w: Vec<f32> = (0..32 * 64).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
//! let door = Door::of(&linear_proj_w8a16_static::ENTRY)?;
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
//! assert!((y[0] - exact).abs() < 0.1);
//! # Ok::<(), structure_core::Refusal>(())
//! ```

mod bind;
mod cpu;
#[cfg(kernels_built)]
mod cuda;
#[cfg(kernels_built)]
mod ffi;
mod pack;

use linear_proj::{Factory, STRUCTURE};
use structure_core::{
    Band, Bound, DType, DimBound, Envelope, Fallback, Formats, Registration, StructureId, register,
};

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// This implementation's id.
pub const ID: StructureId = StructureId { structure: STRUCTURE, variant: "w8a16_static" };

/// Types that rows and weights may come in.
const DTYPES: &[DType] = &[DType::BF16, DType::F16, DType::F32];

/// What it takes: any N, any K; K is padded to tiles of 32 inside. The upper bounds keep a CUDA grid and a row's 64-bit
/// offsets far from their ends.
const ENVELOPE: Envelope = Envelope {
    dims: &[
        DimBound { name: "N", bound: Bound { min: 1, max: 1 << 31, multiple_of: 1 } },
        DimBound { name: "K", bound: Bound { min: 1, max: 1 << 24, multiple_of: 1 } },
    ],
    weight_dtypes: DTYPES,
    row_dtypes: DTYPES,
    band: Band { min: 1, max: 16 },
};

static FACTORY: Factory = Factory { bind: bind::bind };

/// The registration, for explicit registration where `inventory` does not reach.
pub static ENTRY: Registration = Registration {
    id: ID,
    summary: "INT8 weights, one scale per output channel; BF16 activations",
    envelope: ENVELOPE,
    formats: Formats { weights: "INT8 per channel", activations: "BF16" },
    calibrated: false,
    fallback: Fallback::HostForm,
    kernels: &KERNELS,
    factory: &FACTORY,
};

register!(ENTRY);
