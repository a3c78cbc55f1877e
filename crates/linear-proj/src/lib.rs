//! The structure `linear_proj`: `y[m, n] = sum over k of w[n, k] * x[m, k] + bias[n]`, one projection of a model.
//!
//! - [`LinearProj`] is anything that projects rows; [`BoundProj`] is an implementation's, with its receipt.
//! - [`Door`] is the typed way from a registration to a bind: it checks the envelope, the device and the weights, then
//!   calls the implementation's [`Factory`].
//! - [`Seat`] is the place in a model where a projection happens. It holds the host's own form, takes an
//!   implementation, guards every call, and gives the host form back on detach.
//! - [`CpuArm`] and [`CudaArm`] are what the arms of all implementations share: an implementation brings its [`CpuWeights`] and
//!   its [`CudaWeights`].
//! - [`Calibration`] is what the input channels of seats reached on sample texts, for variants that need it.
//! - [`mod@reference`] is the structure in FP64, [`gates`] hold implementations to it.
//!
//! ```
//! use linear_proj::{DenseWeights, Rows, RowsMut, reference};
//!
//! // Two output features of three inputs each, and one row.
//! let weights = DenseWeights::from_f32(2, 3, &[1.0, 2.0, 3.0, -1.0, 0.5, 0.0])?;
//! let x = [1.0f32, 2.0, 4.0];
//! let y = reference::project(&weights, None, &x)?;
//! assert_eq!(y, [17.0, 0.0]);
//! # Ok::<(), structure_core::Refusal>(())
//! ```

mod calibration;
mod cpu_arm;
mod cuda_arm;
pub mod decode_band;
mod door;
mod dot;
pub mod gates;
mod host;
mod options;
mod proj;
pub mod reference;
mod rows;
mod seat;
mod staged;
mod weights;

pub use calibration::Calibration;
pub use cpu_arm::{CpuArm, CpuWeights, Entered};
pub use cuda_arm::{CudaArm, CudaCall, CudaMatrix, CudaWeights, RowType};
pub use door::{Bind, BindFn, Door, Factory, Packing, STRUCTURE};
pub use dot::dot;
pub use host::Host;
pub use number_formats::nvfp4::ScaleMode;
pub use options::{InverseBalance, Options, fold_inverse};
pub use proj::{BoundProj, GatedProj, LinearProj, Together, check_call};
pub use rows::{Elements, ElementsMut, Rows, RowsData, RowsMut, RowsMutData};
pub use seat::{Seat, SeatState};
pub use staged::Staged;
pub use weights::{DenseWeights, Fp8Blocks};
