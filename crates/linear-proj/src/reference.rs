//! The structure in FP64 over exact operands: what every implementation is held to.

use rayon::prelude::*;
use structure_core::Refusal;

use crate::DenseWeights;

/// `y[m, n] = sum over k of w[n, k] * x[m, k] + bias[n]` in FP64; `x` is `[M, K]` for any M, the result `[M, N]`.
///
/// # Errors
/// [`Refusal::ShapeMismatch`] when `x` is not a whole number of rows.
pub fn project(weights: &DenseWeights<'_>, bias: Option<&[f32]>, x: &[f32]) -> Result<Vec<f64>, Refusal> {
    map_rows(weights, x, |n, row, x| {
        let sum: f64 = row.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
        sum + bias.and_then(|bias| bias.get(n)).map_or(0.0, |&b| f64::from(b))
    })
}

/// `sum over k of |w[n, k] * x[m, k]| + |bias[n]|` in FP64: the scale that rounding errors of a sum are relative to.
///
/// # Errors
/// As [`project`].
pub fn magnitude(weights: &DenseWeights<'_>, bias: Option<&[f32]>, x: &[f32]) -> Result<Vec<f64>, Refusal> {
    map_rows(weights, x, |n, row, x| {
        let sum: f64 = row.iter().zip(x).map(|(&w, &x)| (f64::from(w) * f64::from(x)).abs()).sum();
        sum + bias.and_then(|bias| bias.get(n)).map_or(0.0, |&b| f64::from(b).abs())
    })
}

/// Each weight row is decoded once and met by every row of `x`.
fn map_rows(
    weights: &DenseWeights<'_>,
    x: &[f32],
    value: impl Fn(usize, &[f32], &[f32]) -> f64 + Sync,
) -> Result<Vec<f64>, Refusal> {
    let (n, k) = (weights.n(), weights.k());
    let m = x.len() / k.max(1);
    if m * k != x.len() {
        let what = "input rows of the reference".to_string();
        return Err(Refusal::ShapeMismatch { what, expected: vec![m, k], got: vec![x.len()] });
    }
    let by_feature: Vec<Vec<f64>> = (0..n)
        .into_par_iter()
        .map(|feature| {
            let mut row = vec![0.0; k];
            weights.decode_row(feature, &mut row);
            x.chunks_exact(k.max(1)).map(|x| value(feature, &row, x)).collect()
        })
        .collect();
    Ok((0..m).flat_map(|row| by_feature.iter().map(move |feature| feature[row])).collect())
}
