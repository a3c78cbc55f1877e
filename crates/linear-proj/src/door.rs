use device::Device;
use structure_core::{Formats, Receipt, Refusal, Registration, Smoke};

use crate::{BoundProj, DenseWeights, Options};

/// The structure's name in the registry.
pub const STRUCTURE: &str = "linear_proj";

/// What a bind is given.
#[derive(Clone, Copy, Debug)]
pub struct Bind<'a> {
    /// The seat's path, for receipts and refusals.
    pub seat: &'a str,
    /// Dense weights `[N, K]`.
    pub weights: DenseWeights<'a>,
    /// N elements added in FP32 before the one rounding, or none.
    pub bias: Option<&'a [f32]>,
    /// Where it is to run.
    pub device: &'a Device,
}

/// What packing made of the weights, for the receipt.
#[derive(Clone, Copy, Debug)]
pub struct Packing {
    /// How weights and activations are held.
    pub formats: Formats,
    /// Bytes of packed weights and scales.
    pub bytes: usize,
    /// Relative L2 distance of the packed weights from their source.
    pub conversion_error: f64,
}

impl Bind<'_> {
    /// The receipt of this bind before its smoke; `version` is the implementation crate's.
    pub fn receipt(&self, entry: &Registration, packing: Packing, version: &str) -> Receipt {
        let bias_bytes = self.bias.map_or(0, size_of_val);
        Receipt {
            id: entry.id,
            seat: self.seat.to_string(),
            device: self.device.to_string(),
            dims: [self.weights.n(), self.weights.k()],
            bias: self.bias.is_some(),
            source_dtype: self.weights.dtype(),
            formats: packing.formats,
            weight_bytes: (packing.bytes + bias_bytes) as u64,
            conversion_error: packing.conversion_error,
            band: entry.envelope.band,
            smoke: Smoke { rows: 0, worst: 0.0 },
            kernel_source: entry.kernels.source_digest.to_string(),
            version: version.to_string(),
        }
    }
}

/// How an implementation binds: packs the weights, runs the smoke, writes the receipt. The door has checked the bind against the
/// envelope.
pub type BindFn = fn(&Bind<'_>, &Options<'_>) -> Result<Box<dyn BoundProj>, Refusal>;

/// What an implementation gives its registration.
pub struct Factory {
    /// Called for every bind.
    pub bind: BindFn,
}

/// The typed way to an implementation of `linear_proj`.
#[derive(Clone, Copy)]
pub struct Door {
    registration: &'static Registration,
    factory: &'static Factory,
}

impl Door {
    /// The door of a registration.
    ///
    /// # Errors
    /// [`Refusal::ForeignFactory`] when it is not an implementation of `linear_proj` of this version.
    pub fn of(registration: &'static Registration) -> Result<Self, Refusal> {
        Ok(Door { registration, factory: registration.factory_of(STRUCTURE)? })
    }

    /// What the implementation says of itself.
    pub fn registration(&self) -> &'static Registration {
        self.registration
    }

    /// [`bind_with`](Self::bind_with) the default options.
    ///
    /// # Errors
    /// As [`bind_with`](Self::bind_with).
    pub fn bind(&self, bind: &Bind<'_>) -> Result<Box<dyn BoundProj>, Refusal> {
        self.bind_with(bind, &Options::default())
    }

    /// Binds weights: all checks first, then the implementation.
    ///
    /// # Errors
    /// [`Refusal::DimOutside`], [`Refusal::DTypeOutside`], [`Refusal::ShapeMismatch`] or [`Refusal::NonFinite`] for
    /// weights, a bias or a calibration outside the envelope; [`Refusal::NotCalibrated`] for a variant that needs a
    /// calibration and got none; [`Refusal::KernelsNotBuilt`] or [`Refusal::ArchUnsupported`] for a
    /// device it has no code for; [`Refusal::OutOfMemory`], [`Refusal::GateFailed`] or [`Refusal::Cuda`] from the
    /// implementation.
    pub fn bind_with(&self, bind: &Bind<'_>, options: &Options<'_>) -> Result<Box<dyn BoundProj>, Refusal> {
        let Registration { id, envelope, kernels, .. } = self.registration;
        let (n, k) = (bind.weights.n(), bind.weights.k());
        envelope.check(bind.seat, &[("N", n as u64), ("K", k as u64)], bind.weights.dtype())?;
        if let Device::Cuda(gpu) = bind.device {
            kernels.check(*id, gpu.compute_capability())?;
        }
        if let Some(bias) = bind.bias {
            check_bias(bind.seat, bias, n)?;
        }
        options.check(bind.seat, self.registration, k)?;
        bind.weights.check_finite(&format!("{}: weights", bind.seat))?;
        (self.factory.bind)(bind, options)
    }
}

fn check_bias(seat: &str, bias: &[f32], n: usize) -> Result<(), Refusal> {
    let what = format!("{seat}: bias");
    if bias.len() != n {
        return Err(Refusal::ShapeMismatch { what, expected: vec![n], got: vec![bias.len()] });
    }
    match bias.iter().position(|b| !b.is_finite()) {
        Some(index) => Err(Refusal::NonFinite { what, index, value: bias[index] }),
        None => Ok(()),
    }
}
