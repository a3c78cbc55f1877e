//! The registry and front door: which implementations are linked, what they take, and which seat is served by which.
//!
//! - [`get`] and [`list`] look into the registry; a refusal says what exists.
//! - [`linear_proj()`] and [`decode_loop()`] are the typed doors to implementations of those structures.
//! - [`bind`] puts implementations into a host's seats by [`Rule`], and returns a [`Plan`] that [`Plan::table`] prints: bound,
//!   dispatched, kept at the host, refused, each with its reason. [`explain`] says the same of a host as it stands.
//!
//! Each implementation is a feature of this crate. A program that depends on an implementation crate directly names it
//! once, `use linear_proj_w8a16_static as _;`, or the linker drops it and the registry does not see it.
//!
//! ```
//! let registration = structures::get("linear_proj", "w8a16_static")?;
//! assert_eq!(registration.id.to_string(), "linear_proj/w8a16_static");
//! assert!(registration.envelope.band.takes(16));
//!
//! let refusal = structures::get("linear_proj", "nope").unwrap_err();
//! assert_eq!(refusal.to_string(), "unknown variant `nope` of linear_proj; linked here: nvfp4_balance, nvfp4_dynamic, w8a16_static");
//! # Ok::<(), structure_core::Refusal>(())
//! ```

mod bind;
mod linked;
mod plan;
mod rule;
mod table;

use linear_proj::Door;
use structure_core::{Refusal, Registration};

pub use bind::{BindOptions, bind, explain};
pub use plan::{Outcome, Plan, PlanRow, PlanSummary};
pub use rule::{Rule, Target};
pub use table::registrations_table;

/// Every linked implementation, sorted by id.
///
/// # Errors
/// [`Refusal::DuplicateRegistration`] when two linked crates register the same id.
pub fn list() -> Result<Vec<&'static Registration>, Refusal> {
    structure_core::registrations()
}

/// The registration of one implementation.
///
/// # Errors
/// [`Refusal::UnknownStructure`] or [`Refusal::UnknownVariant`], with what exists.
pub fn get(structure: &str, variant: &str) -> Result<&'static Registration, Refusal> {
    structure_core::find(&list()?, structure, variant)
}

/// The door to a variant of `linear_proj`.
///
/// # Errors
/// As [`get`], and [`Refusal::ForeignFactory`] when the crate was built against another version of `linear-proj`.
pub fn linear_proj(variant: &str) -> Result<Door, Refusal> {
    Door::of(get(linear_proj::STRUCTURE, variant)?)
}

/// The door to a variant of `decode_loop`.
///
/// # Errors
/// As [`get`], and [`Refusal::ForeignFactory`] when the crate was built against another version of `decode-loop`.
pub fn decode_loop(variant: &str) -> Result<decode_loop::Door, Refusal> {
    decode_loop::Door::of(get(decode_loop::STRUCTURE, variant)?)
}

/// The README's example, kept compiling and running.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
