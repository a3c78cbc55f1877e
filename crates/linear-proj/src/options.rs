use number_formats::nvfp4::ScaleMode;
use structure_core::{Refusal, Registration};

/// What a bind may be told beyond the weights.
///
/// An implementation takes what concerns it and leaves the rest alone, so that one set of options can go with rules for
/// several variants. Its receipt says what it took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Whether NVFP4 weights and rows have a global scale above their block scales. Weights that are packed already keep the
    /// one they have.
    pub scale_mode: ScaleMode,
    /// The largest magnitude that each input channel had when the model was [calibrated](crate::Calibration), `[K]`. A variant
    /// whose registration is `calibrated` refuses to bind without.
    pub amax: Option<&'a [f32]>,
    /// Who divides the rows of a balanced variant by their balance.
    pub inverse_balance: InverseBalance,
}

/// Who divides the rows of a balanced variant by their balance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InverseBalance {
    /// The implementation, in FP32 inside its quantiser.
    #[default]
    InQuantiser,
    /// Whoever makes the rows: they come divided, as those of a norm do whose weight was divided ([`fold_inverse`]). The host
    /// form then sees such rows too, and must know.
    InProducer,
}

/// Divides the scale of a norm by the balance of those who read its rows, in FP32, so that the rows come divided.
///
/// # Errors
/// [`Refusal::ShapeMismatch`] when there are not as many of one as of the other.
pub fn fold_inverse(scale: &mut [f32], balance: &[f32]) -> Result<(), Refusal> {
    if scale.len() != balance.len() {
        return Err(Refusal::ShapeMismatch {
            what: "balance of a norm".to_string(),
            expected: vec![scale.len()],
            got: vec![balance.len()],
        });
    }
    scale.iter_mut().zip(balance).for_each(|(scale, balance)| *scale /= balance);
    Ok(())
}

impl Options<'_> {
    /// The calibration that an implementation needs.
    ///
    /// # Errors
    /// [`Refusal::NotCalibrated`] when there is none.
    pub fn calibrated(&self, seat: &str, entry: &Registration) -> Result<&[f32], Refusal> {
        let missing = "no calibration was given";
        let refusal = || Refusal::NotCalibrated { seat: seat.to_string(), id: entry.id, missing };
        self.amax.ok_or_else(refusal)
    }

    /// Checks the calibration of a bind of K input channels, where the implementation needs one.
    pub(crate) fn check(&self, seat: &str, entry: &Registration, k: usize) -> Result<(), Refusal> {
        if !entry.calibrated {
            return Ok(());
        }
        check_amax(&format!("{seat}: amax of input channels"), self.calibrated(seat, entry)?, k)
    }
}

/// Checks magnitudes of K channels: as many as there are channels, finite, not negative.
pub(crate) fn check_amax(what: &str, amax: &[f32], k: usize) -> Result<(), Refusal> {
    if amax.len() != k {
        return Err(Refusal::ShapeMismatch {
            what: what.to_string(),
            expected: vec![k],
            got: vec![amax.len()],
        });
    }
    if let Some(index) = amax.iter().position(|a| !a.is_finite()) {
        return Err(Refusal::NonFinite { what: what.to_string(), index, value: amax[index] });
    }
    match amax.iter().position(|&a| a < 0.0) {
        None => Ok(()),
        Some(index) => Err(Refusal::ValueOutside {
            what: format!("{what}: element {index}"),
            value: amax[index].to_string(),
            bound: "a magnitude, not negative".to_string(),
        }),
    }
}
