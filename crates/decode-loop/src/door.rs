use structure_core::{Refusal, Registration};

use crate::{Arm, DecodeLoop, KvFactory, Sequence};

/// The structure's name in the registry.
pub const STRUCTURE: &str = "decode_loop";

/// How a loop is built over a host.
#[derive(Clone, Copy, Default)]
pub struct LoopOptions<'a> {
    /// What is allocated for the sequence.
    pub sequence: Sequence<'a>,
}

/// Builds a loop: everything is allocated, and refused, here.
pub type LoopFn = for<'a> fn(Arm<'a>, &LoopOptions<'_>) -> Result<Box<dyn DecodeLoop + 'a>, Refusal>;

/// What an implementation gives its registration.
pub enum Factory {
    /// A loop.
    Loop(LoopFn),
    /// A store of keys and values that a loop is built with.
    Kv(KvFactory),
}

/// The typed way to an implementation of `decode_loop`.
#[derive(Clone, Copy)]
pub struct Door {
    registration: &'static Registration,
    factory: &'static Factory,
}

impl Door {
    /// The door of a registration.
    ///
    /// # Errors
    /// [`Refusal::ForeignFactory`] when it is not an implementation of `decode_loop` of this version.
    pub fn of(registration: &'static Registration) -> Result<Self, Refusal> {
        Ok(Door { registration, factory: registration.factory_of(STRUCTURE)? })
    }

    /// What the implementation says of itself.
    pub fn registration(&self) -> &'static Registration {
        self.registration
    }

    /// Builds a loop over a host.
    ///
    /// # Errors
    /// [`Refusal::KernelsNotBuilt`] or [`Refusal::ArchUnsupported`] for a device it has no code for, [`Refusal::ValueOutside`] when
    /// this is a store and no loop, and what the host and the implementation refuse.
    pub fn build<'a>(
        &self,
        host: Arm<'a>,
        options: &LoopOptions<'_>,
    ) -> Result<Box<dyn DecodeLoop + 'a>, Refusal> {
        let Factory::Loop(build) = self.factory else { return Err(self.other_kind("a loop")) };
        if let Arm::Cuda(host) = &host {
            let device = host.stream().device().compute_capability();
            self.registration.kernels.check(self.registration.id, device)?;
        }
        build(host, options)
    }

    /// The maker of stores.
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`] when this is a loop and no store.
    pub fn kv(&self) -> Result<&'static KvFactory, Refusal> {
        match self.factory {
            Factory::Kv(factory) => Ok(factory),
            Factory::Loop(_) => Err(self.other_kind("a store of keys and values")),
        }
    }

    fn other_kind(&self, bound: &str) -> Refusal {
        let (what, value) = ("the implementation".to_string(), self.registration.id.to_string());
        Refusal::ValueOutside { what, value, bound: bound.to_string() }
    }
}
