//! What every implementation must pass: close to the FP64 reference, and row-invariant to the bit.
//!
//! Gates take host rows. An implementation on a GPU goes through [`Staged`](crate::Staged).

use std::ops::Range;

use structure_core::{Refusal, Smoke};

use crate::{BoundProj, DenseWeights, Rows, RowsMut, decode_band, reference};

/// How far a result may be from the exact one, by the length of its sum.
///
/// A sum of `k` products in FP32 takes at most one addition a product, one more a 16-wide MMA step, and an epilogue of a
/// few operations. Tensor cores align the addends of a step to the largest and cut off, so each addition loses at most
/// one unit in the last of FP32's 24 bits, `2^-23`, of the sum of magnitudes (half that where it rounds to nearest; the
/// standard `gamma_n` bound, Higham, *Accuracy and Stability of Numerical Algorithms*, section 3.1). The one rounding to
/// BF16's 8 bits adds half a unit, `2^-8` of a result, or of the smallest subnormal, `2^-133`.
pub fn error_bound(k: usize, magnitude: f64, exact: f64) -> f64 {
    let additions = (k + k.div_ceil(16) + 32) as f64;
    let sum = additions * 2f64.powi(-23) * magnitude;
    sum + 2f64.powi(-8) * (exact.abs() + sum) + 2f64.powi(-133)
}

/// Weights are dequantised this many features at a time.
const SLAB: usize = 256;
/// Features at each end of N that the smoke compares with the reference; all are checked to be finite.
const SMOKE_FEATURES: usize = 64;

/// Projects `x` `[M, K]` and compares `features` with the FP64 reference over the implementation's own dequantised weights
/// and rows as they enter the products. Every output must be written and finite. Returns the largest error as a fraction of
/// [`error_bound`], at most 1.
///
/// # Errors
/// [`Refusal::GateFailed`] for an element outside its bound, or whatever the call says.
pub fn against_reference(
    proj: &mut dyn BoundProj,
    bias: Option<&[f32]>,
    x: &[f32],
    rows: usize,
    features: Range<usize>,
) -> Result<f64, Refusal> {
    let (n, k) = (proj.n(), proj.k());
    let results = call(proj, x, rows)?;
    if let Some(index) = results.iter().position(|result| !result.is_finite()) {
        let problem = format!("y[{}, {}] is {}", index / n, index % n, results[index]);
        return Err(failed(proj, "reference", problem));
    }
    let operands: Vec<f32> = x.chunks_exact(k).flat_map(|row| proj.operand(row)).collect();
    let mut worst = 0f64;
    for first in features.clone().step_by(SLAB) {
        let slab = first..features.end.min(first + SLAB);
        let dequantized = proj.dequantized(slab.clone())?;
        let weights = DenseWeights::from_f32(slab.len(), k, &dequantized)?;
        let bias = bias.and_then(|bias| bias.get(slab.clone()));
        let exact = reference::project(&weights, bias, &operands)?;
        let magnitude = reference::magnitude(&weights, bias, &operands)?;
        for (index, (&exact, &magnitude)) in exact.iter().zip(&magnitude).enumerate() {
            let (m, n) = (index / slab.len(), index % slab.len() + first);
            let result = results[m * proj.n() + n];
            let bound = error_bound(k, magnitude, exact);
            let error = (f64::from(result) - exact).abs();
            if error > bound {
                let problem = format!("y[{m}, {n}] is {result}, the reference {exact}, the bound {bound:e}");
                return Err(failed(proj, "reference", problem));
            }
            worst = worst.max(error / bound);
        }
    }
    Ok(worst)
}

/// What a bind does last: one row through the bound arm, every output finite, those at both ends of N held to the FP64
/// reference.
///
/// # Errors
/// As [`against_reference`].
pub fn smoke(arm: &mut dyn BoundProj, bias: Option<&[f32]>) -> Result<Smoke, Refusal> {
    let n = arm.n();
    // Both signs, no zeros, no pattern that a wrong order of k would leave unchanged.
    let x: Vec<f32> = (0..arm.k()).map(|k| ((k * 37 + k / 101) % 101) as f32 / 50.0 - 1.01).collect();
    let first = against_reference(arm, bias, &x, 1, 0..n.min(SMOKE_FEATURES))?;
    let last = against_reference(arm, bias, &x, 1, n.saturating_sub(SMOKE_FEATURES)..n)?;
    Ok(Smoke { rows: 1, worst: first.max(last) })
}

/// Checks that row m of the output has the same bits whatever M is and whatever the other rows hold.
///
/// `x` holds as many rows as the decode band takes. Each row is projected alone, then in every M of the band beside the others,
/// then in the widest M beside rows of NaN, of infinities, of the largest BF16, and of zeros.
///
/// # Errors
/// [`Refusal::GateFailed`] for the first row whose bits change, or whatever a call says.
pub fn row_invariance(proj: &mut dyn BoundProj, x: &[f32]) -> Result<(), Refusal> {
    let (n, k) = (proj.n(), proj.k());
    let rows = proj.form().band.max.min(decode_band::BAND.max);
    let alone: Vec<Vec<u32>> =
        x.chunks_exact(k).map(|row| Ok(bits(&call(proj, row, 1)?))).collect::<Result<_, Refusal>>()?;
    let same = |proj: &dyn BoundProj, row: usize, beside: &str, results: &[f32]| match results
        .iter()
        .zip(&alone[row])
        .position(|(result, &alone)| result.to_bits() != alone)
    {
        None => Ok(()),
        Some(feature) => {
            let (got, alone) = (results[feature], f32::from_bits(alone[row][feature]));
            let problem = format!("row {row}, feature {feature}: {got:e} {beside}, {alone:e} alone");
            Err(failed(proj, "row invariance", problem))
        }
    };
    for m in 1..=rows {
        let results = call(proj, &x[..m * k], m)?;
        for (row, results) in results.chunks_exact(n).enumerate() {
            same(proj, row, &format!("among M = {m}"), results)?;
        }
    }
    for neighbour in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, half::bf16::MAX.to_f32(), 0.0] {
        for row in 0..rows {
            let mut hostile = vec![neighbour; rows * k];
            hostile[row * k..(row + 1) * k].copy_from_slice(&x[row * k..(row + 1) * k]);
            let results = call(proj, &hostile, rows)?;
            same(proj, row, &format!("beside rows of {neighbour}"), &results[row * n..(row + 1) * n])?;
        }
    }
    Ok(())
}

/// One call over host rows of F32, into an output that is poisoned first.
fn call(proj: &mut dyn BoundProj, x: &[f32], rows: usize) -> Result<Vec<f32>, Refusal> {
    let (n, k) = (proj.n(), proj.k());
    let mut y = vec![f32::NAN; rows * n];
    proj.project(Rows::host(x, rows, k)?, RowsMut::host(&mut y[..], rows, n)?)?;
    Ok(y)
}

fn bits(results: &[f32]) -> Vec<u32> {
    results.iter().map(|result| result.to_bits()).collect()
}

fn failed(proj: &dyn BoundProj, gate: &'static str, problem: String) -> Refusal {
    Refusal::GateFailed { what: proj.receipt().seat.clone(), gate, problem }
}
