//! The contract between structures, their implementations and the engines that use them.
//!
//! A *structure* is a region of a model with a boundary (one linear projection, say), an *implementation* is one
//! executable form of it. This crate holds what all of them share and nothing that runs on a device:
//!
//! - [`StructureId`], printed `linear_proj/w8a16_static`, and [`Registration`], what an implementation says of itself;
//! - [`Envelope`], the shapes and types an implementation takes, checked by one function;
//! - [`Refusal`], the one error of the workspace: the thing, the value it had and the bound it broke;
//! - [`Guard`], which admits or turns away each call of a bound seat, and [`SeatLedger`], which counts them;
//! - [`Receipt`], what was bound where, with a digest.
//!
//! ```
//! use structure_core::{Band, Bound, DType, DimBound, Envelope, Refusal};
//!
//! const ENVELOPE: Envelope = Envelope {
//!     dims: &[DimBound { name: "K", bound: Bound { min: 16, max: 1 << 20, multiple_of: 16 } }],
//!     weight_dtypes: &[DType::BF16],
//!     row_dtypes: &[DType::BF16],
//!     band: Band { min: 1, max: 16 },
//! };
//! let refusal = ENVELOPE.check("layer.0", &[("K", 40)], DType::BF16).unwrap_err();
//! assert_eq!(refusal.to_string(), "layer.0: K = 40 is outside 16..=1048576 in steps of 16");
//! ```

mod arch;
mod dtype;
mod envelope;
mod guard;
mod id;
mod ledger;
mod receipt;
mod refusal;
mod registration;

pub use arch::{Arch, ComputeCapability};
pub use dtype::DType;
pub use envelope::{Band, Bound, DimBound, Envelope};
pub use guard::{Decision, Form, Guard, GuardMode, MISSES_BEFORE_DETACH, Offer, Place};
pub use id::StructureId;
pub use ledger::{Ledger, LedgerSummary, SeatLedger};
pub use receipt::{Receipt, Smoke};
pub use refusal::Refusal;
pub use registration::{Factory, Fallback, Formats, Kernels, Registration, Submission, find, registrations};

#[doc(hidden)]
pub use inventory;
