use std::any::Any;

use serde::Serialize;

use crate::{Arch, ComputeCapability, Envelope, Refusal, StructureId};

/// What a crate's build compiled; its build script writes one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Kernels {
    /// The architectures there is machine code for; empty when nothing was built.
    pub built: &'static [Arch],
    /// Why nothing was built; empty when something was.
    pub why_not: &'static str,
    /// sha256 of the crate's kernel sources and the shared headers, in hex.
    pub source_digest: &'static str,
}

impl Kernels {
    /// Checks that there is machine code at all; needs no device.
    ///
    /// # Errors
    /// [`Refusal::KernelsNotBuilt`].
    pub fn check_built(&self, id: StructureId) -> Result<(), Refusal> {
        if self.built.is_empty() {
            return Err(Refusal::KernelsNotBuilt { id, reason: self.why_not.to_string() });
        }
        Ok(())
    }

    /// Checks that there is machine code for a device.
    ///
    /// # Errors
    /// [`Refusal::KernelsNotBuilt`] or [`Refusal::ArchUnsupported`].
    pub fn check(&self, id: StructureId, device: ComputeCapability) -> Result<(), Refusal> {
        self.check_built(id)?;
        if !self.built.iter().any(|arch| arch.runs_on(device)) {
            return Err(Refusal::arch_unsupported(id, self.built, device));
        }
        Ok(())
    }
}

/// The number formats on both sides of an implementation's arithmetic, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Formats {
    /// How weights are stored.
    pub weights: &'static str,
    /// How activations enter the products.
    pub activations: &'static str,
}

/// What happens to a call that is well-formed but not of the bound form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fallback {
    /// It goes to the host form, counted and warned about.
    HostForm,
    /// It is refused.
    Refuse,
}

/// A structure's own factory type, seen from here without its type.
pub type Factory = &'static (dyn Any + Send + Sync);

/// What an implementation crate says of itself: plain data, known before any device is touched.
#[derive(Clone, Copy)]
pub struct Registration {
    /// The structure and the variant.
    pub id: StructureId,
    /// One line for people.
    pub summary: &'static str,
    /// What it takes.
    pub envelope: Envelope,
    /// Its number formats.
    pub formats: Formats,
    /// Whether a bind needs calibration data.
    pub calibrated: bool,
    /// What happens to calls that are not of the bound form.
    pub fallback: Fallback,
    /// What was compiled.
    pub kernels: &'static Kernels,
    /// The structure's factory type; its trait crate has the typed door.
    pub factory: Factory,
}

impl Registration {
    /// Its factory, if it is of the type that a structure's door expects.
    ///
    /// # Errors
    /// [`Refusal::ForeignFactory`] when it implements another structure, or this one in another version.
    pub fn factory_of<F: Any>(&'static self, structure: &'static str) -> Result<&'static F, Refusal> {
        self.factory.downcast_ref::<F>().ok_or(Refusal::ForeignFactory { id: self.id, structure })
    }
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registration({})", self.id)
    }
}

/// What [`register!`](crate::register) hands to `inventory`.
pub struct Submission(pub &'static Registration);

inventory::collect!(Submission);

/// Submits an implementation's `pub static ENTRY: Registration` to the registry.
///
/// Linkers drop crates that no code names: a user of one implementation crate writes `use its_crate as _;`.
#[macro_export]
macro_rules! register {
    ($entry:ident) => {
        $crate::inventory::submit! { $crate::Submission(&$entry) }
    };
}

/// Every linked registration, sorted by id.
///
/// # Errors
/// [`Refusal::DuplicateRegistration`] when an id stands twice.
pub fn registrations() -> Result<Vec<&'static Registration>, Refusal> {
    sorted(inventory::iter::<Submission>.into_iter().map(|submission| submission.0).collect())
}

fn sorted(mut entries: Vec<&'static Registration>) -> Result<Vec<&'static Registration>, Refusal> {
    entries.sort_by_key(|entry| entry.id);
    match entries.windows(2).find(|pair| pair[0].id == pair[1].id) {
        Some(pair) => Err(Refusal::DuplicateRegistration { id: pair[0].id }),
        None => Ok(entries),
    }
}

/// The entry of `entries` with this structure and variant.
///
/// Takes the entries as an argument so that a caller without `inventory` (a Rust staticlib linked by a C linker) can
/// pass the `ENTRY` statics of the crates it uses.
///
/// # Errors
/// [`Refusal::UnknownStructure`] or [`Refusal::UnknownVariant`], each with what exists.
pub fn find(
    entries: &[&'static Registration],
    structure: &str,
    variant: &str,
) -> Result<&'static Registration, Refusal> {
    let mut of_structure = entries.iter().filter(|entry| entry.id.structure == structure).peekable();
    if of_structure.peek().is_none() {
        let mut known: Vec<&str> = entries.iter().map(|entry| entry.id.structure).collect();
        known.dedup();
        return Err(Refusal::UnknownStructure { asked: structure.to_string(), known: list(&known) });
    }
    of_structure.clone().find(|entry| entry.id.variant == variant).copied().ok_or_else(|| {
        let known: Vec<&str> = of_structure.map(|entry| entry.id.variant).collect();
        Refusal::UnknownVariant {
            structure: structure.to_string(),
            asked: variant.to_string(),
            known: list(&known),
        }
    })
}

fn list(names: &[&str]) -> String {
    if names.is_empty() { "none".to_string() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Band, DType};

    static NOT_BUILT: Kernels = Kernels { built: &[], why_not: "no nvcc", source_digest: "" };
    static HOPPER: Kernels = Kernels { built: &[Arch::new(90, true)], why_not: "", source_digest: "" };

    const fn entry(structure: &'static str, variant: &'static str) -> Registration {
        Registration {
            id: StructureId { structure, variant },
            summary: "",
            envelope: Envelope {
                dims: &[],
                weight_dtypes: &[DType::BF16],
                row_dtypes: &[DType::BF16],
                band: Band { min: 1, max: 1 },
            },
            formats: Formats { weights: "", activations: "" },
            calibrated: false,
            fallback: Fallback::Refuse,
            kernels: &NOT_BUILT,
            factory: &(),
        }
    }

    static B: Registration = entry("s", "b");
    static A: Registration = entry("s", "a");
    static OTHER: Registration = entry("r", "a");

    #[test]
    fn entries_are_sorted_and_found_and_what_exists_is_said() {
        let entries = sorted(vec![&B, &OTHER, &A]).unwrap();
        let ids: Vec<String> = entries.iter().map(|entry| entry.id.to_string()).collect();
        assert_eq!(ids, ["r/a", "s/a", "s/b"]);
        assert_eq!(find(&entries, "s", "b").unwrap().id, B.id);
        let unknown = find(&entries, "s", "nope").unwrap_err().to_string();
        assert_eq!(unknown, "unknown variant `nope` of s; linked here: a, b");
        let unknown = find(&entries, "t", "a").unwrap_err().to_string();
        assert!(unknown.starts_with("unknown structure `t`; linked here: r, s ("), "{unknown}");
        assert!(find(&[], "t", "a").unwrap_err().to_string().contains("linked here: none"));
    }

    #[test]
    fn the_same_id_twice_is_an_error() {
        assert_eq!(sorted(vec![&A, &B, &A]).unwrap_err(), Refusal::DuplicateRegistration { id: A.id });
    }

    #[test]
    fn kernels_say_why_they_do_not_run() {
        let device = ComputeCapability { major: 9, minor: 0 };
        let ampere = ComputeCapability { major: 8, minor: 0 };
        let not_built = NOT_BUILT.check(A.id, device).unwrap_err().to_string();
        assert_eq!(not_built, "s/a is linked but its kernels are not built: no nvcc");
        assert_eq!(HOPPER.check(A.id, device), Ok(()));
        let elsewhere = HOPPER.check(A.id, ampere).unwrap_err().to_string();
        assert_eq!(elsewhere, "s/a is built for sm_90a, the device is 8.0");
    }
}
