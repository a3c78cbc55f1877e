//! Root-mean-square normalisation.

use linear_proj::{dot, fold_inverse};
use structure_core::Refusal;

use crate::loader::Loader;

/// `x / sqrt(mean(x^2) + eps) * scale`, over rows as wide as the scale.
pub(crate) struct RmsNorm {
    scale: Vec<f32>,
    /// The scale divided by the balance of those who read the rows, if one is folded in.
    folded: Option<Vec<f32>>,
    eps: f32,
}

impl RmsNorm {
    /// A norm whose scale is `1 + w`, which is every norm of the model but the gated one.
    pub fn load(loader: &mut Loader<'_>, path: &str, width: usize) -> Result<Self, Refusal> {
        let mut norm = Self::load_plain(loader, path, width)?;
        norm.scale.iter_mut().for_each(|w| *w += 1.0);
        Ok(norm)
    }

    /// A norm whose scale is `w`.
    pub fn load_plain(loader: &mut Loader<'_>, path: &str, width: usize) -> Result<Self, Refusal> {
        let scale = loader.checkpoint.vector(&format!("{path}.weight"), &[width])?;
        Ok(RmsNorm { scale, folded: None, eps: loader.config.rms_norm_eps })
    }

    /// What rows are multiplied by once they are normalised, a folded balance among it.
    #[cfg(kernels_built)]
    pub fn scale(&self) -> &[f32] {
        self.folded.as_ref().unwrap_or(&self.scale)
    }

    /// What is added to the mean of squares.
    #[cfg(kernels_built)]
    pub fn eps(&self) -> f32 {
        self.eps
    }

    /// Divides the rows by a balance from now on, or by none.
    pub fn fold(&mut self, balance: Option<&[f32]>) -> Result<(), Refusal> {
        let folded = balance.map(|balance| {
            let mut scale = self.scale.clone();
            fold_inverse(&mut scale, balance).map(|()| scale)
        });
        self.folded = folded.transpose()?;
        Ok(())
    }

    /// Normalises every row.
    pub fn apply(&self, rows: &[f32]) -> Vec<f32> {
        let mut out = rows.to_vec();
        out.chunks_exact_mut(self.scale.len()).for_each(|row| self.apply_in_place(row));
        out
    }

    /// Normalises one row.
    pub fn apply_in_place(&self, row: &mut [f32]) {
        let mean = dot(row, row) / row.len() as f32;
        let inverse = 1.0 / (mean + self.eps).sqrt();
        for (x, scale) in row.iter_mut().zip(self.folded.as_ref().unwrap_or(&self.scale)) {
            *x = *x * inverse * scale;
        }
    }
}

/// Scales a row to unit length, its squares summed with 1e-6: what the delta rule does to queries and keys.
pub(crate) fn l2_normalise(row: &mut [f32]) {
    let inverse = 1.0 / (dot(row, row) + 1e-6).sqrt();
    row.iter_mut().for_each(|x| *x *= inverse);
}
