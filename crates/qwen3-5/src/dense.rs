//! The host's own form of a projection: FP32 sums over the weights as the checkpoint holds them.

use std::borrow::Cow;
use std::sync::{Arc, PoisonError, RwLock};

use linear_proj::{DenseWeights, LinearProj, Rows, RowsData, RowsMut, RowsMutData, check_call, dot};
use rayon::prelude::*;
use structure_core::{Place, Refusal};

use crate::tensor::Weights;

/// The most FP32 weights decoded at a time: they stay in the second-level cache while every row of the input passes.
const BLOCK_WEIGHTS: usize = 1 << 15;
/// Below this many products, waking another thread takes longer than they do.
const SERIAL_PRODUCTS: usize = 1 << 15;

/// One projection, served by the host.
///
/// Rows are taken as they are, products are summed in FP32, and every output is one dot product in a fixed order: a row's
/// result does not depend on the rows beside it.
pub(crate) struct HostLinear {
    path: String,
    weights: Weights,
    row_scale: RowScale,
}

/// What the rows of a seat are multiplied by before the host projects them, `[K]`: they were divided by it on their way. Shared
/// with the table of seats, as a host form is out of reach inside its seat.
#[derive(Clone, Default)]
pub(crate) struct RowScale(Arc<RwLock<Option<Vec<f32>>>>);

impl RowScale {
    pub fn set(&self, scale: Option<&[f32]>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = scale.map(<[f32]>::to_vec);
    }

    /// The rows multiplied, or as they are.
    fn apply<'a>(&self, x: &'a [f32]) -> Cow<'a, [f32]> {
        match &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            None => Cow::Borrowed(x),
            Some(scale) => {
                Cow::Owned(x.iter().zip(scale.iter().cycle()).map(|(x, scale)| x * scale).collect())
            }
        }
    }
}

impl HostLinear {
    pub fn new(path: String, weights: Weights) -> Self {
        HostLinear { path, weights, row_scale: RowScale::default() }
    }

    pub fn row_scale(&self) -> RowScale {
        self.row_scale.clone()
    }
}

impl LinearProj for HostLinear {
    fn n(&self) -> usize {
        self.weights.n()
    }

    fn k(&self) -> usize {
        self.weights.k()
    }

    fn project(&mut self, x: Rows<'_>, mut y: RowsMut<'_>) -> Result<(), Refusal> {
        check_call(&self.path, self.n(), self.k(), &x, &y)?;
        let (RowsData::Host(elements), RowsMutData::Host(out)) = (x.data(), y.data()) else {
            return Err(Refusal::WrongDevice {
                what: self.path.clone(),
                rows: x.place().to_string(),
                seat: Place::Cpu.to_string(),
            });
        };
        let weights = self.weights.dense()?;
        if let (linear_proj::Elements::F32(x), linear_proj::ElementsMut::F32(y)) = (&elements, &mut *out) {
            project(&weights, &self.row_scale.apply(x), y);
            return Ok(());
        }
        let mut sums = vec![0.0; out.len()];
        project(&weights, &self.row_scale.apply(&elements.to_f32()), &mut sums);
        out.write_f32(sums.into_iter());
        Ok(())
    }
}

/// `y[m, n] = sum over k of w[n, k] * x[m, k]` over all cores; `x` is `[M, K]`, `y` `[M, N]`.
pub(crate) fn project(weights: &DenseWeights<'_>, x: &[f32], y: &mut [f32]) {
    let (n, k) = (weights.n(), weights.k());
    let m = y.len() / n.max(1);
    if m * n * k < SERIAL_PRODUCTS {
        return project_serial(weights, x, y);
    }
    let features = (BLOCK_WEIGHTS / k).clamp(1, n.div_ceil(2 * rayon::current_num_threads()));
    let fill = |by_feature: &mut [f32]| {
        by_feature.par_chunks_mut(features * m).enumerate().for_each_init(Vec::new, |decoded, (block, y)| {
            project_block(weights, block * features, x, decoded, y)
        });
    };
    if m == 1 {
        return fill(y);
    }
    let mut by_feature = vec![0.0; n * m];
    fill(&mut by_feature);
    y.par_chunks_exact_mut(n).with_min_len(SERIAL_PRODUCTS / n).enumerate().for_each(|(row, y)| {
        for (y, sums) in y.iter_mut().zip(by_feature.chunks_exact(m)) {
            *y = sums[row];
        }
    });
}

/// [`project`] on the calling thread, with the same bits.
pub(crate) fn project_serial(weights: &DenseWeights<'_>, x: &[f32], y: &mut [f32]) {
    let (n, k) = (weights.n(), weights.k());
    let m = y.len() / n.max(1);
    let features = (BLOCK_WEIGHTS / k.max(1)).clamp(1, n.max(1));
    let mut decoded = Vec::new();
    let mut sums = vec![0.0; features * m];
    for first in (0..n).step_by(features) {
        let sums = &mut sums[..features.min(n - first) * m];
        project_block(weights, first, x, &mut decoded, sums);
        for (feature, sums) in sums.chunks_exact(m.max(1)).enumerate() {
            for (row, sum) in sums.iter().enumerate() {
                y[row * n + first + feature] = *sum;
            }
        }
    }
}

/// The output features from `first` on, as many as `by_feature` `[features, M]` holds. Each is decoded once.
fn project_block(
    weights: &DenseWeights<'_>,
    first: usize,
    x: &[f32],
    decoded: &mut Vec<f32>,
    by_feature: &mut [f32],
) {
    let k = weights.k();
    let m = x.len() / k.max(1);
    if m == 0 {
        return;
    }
    decoded.resize(by_feature.len() / m * k, 0.0);
    for (feature, row) in decoded.chunks_exact_mut(k).enumerate() {
        weights.decode_row(first + feature, row);
    }
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (sums, w) in by_feature.chunks_exact_mut(m).zip(decoded.chunks_exact(k)) {
            sums[row] = dot(w, x);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use linear_proj::reference;

    use super::*;

    /// Small numbers that BF16 and F16 hold exactly, with no period of a block's.
    fn noise(seed: usize, len: usize) -> Vec<bf16> {
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 127) as f32 / 64.0 - 1.0;
        (0..len).map(|i| bf16::from_f32(value(i))).collect()
    }

    fn host(n: usize, k: usize) -> HostLinear {
        HostLinear::new("w".to_string(), Weights::owned(n, k, noise(1, n * k)).unwrap())
    }

    fn f32s(elements: &[bf16]) -> Vec<f32> {
        elements.iter().map(|element| element.to_f32()).collect()
    }

    #[test]
    fn every_shape_is_the_reference_and_no_row_meets_another() {
        // One and several blocks of features, serial and parallel, K that is not whole lanes.
        for (n, k) in [(1, 1), (3, 17), (7, 5), (40, 300), (129, 1000), (2, 40_000)] {
            let mut host = host(n, k);
            for m in [1, 2, 5, 33] {
                let x = f32s(&noise(m, m * k));
                let mut y = vec![f32::NAN; m * n];
                host.project(Rows::host(&x[..], m, k).unwrap(), RowsMut::host(&mut y[..], m, n).unwrap())
                    .unwrap();

                let weights = host.weights.dense().unwrap();
                let expected = reference::project(&weights, None, &x).unwrap();
                let magnitude = reference::magnitude(&weights, None, &x).unwrap();
                for ((y, expected), magnitude) in y.iter().zip(expected).zip(magnitude) {
                    let bound = magnitude * f64::from(f32::EPSILON) * (k as f64).sqrt().max(8.0);
                    assert!(
                        (f64::from(*y) - expected).abs() <= bound,
                        "[{n}, {k}], M = {m}: {y}, {expected}"
                    );
                }
                let mut serial = vec![f32::NAN; m * n];
                project_serial(&weights, &x, &mut serial);
                assert_eq!(serial, y);
                for (row, x) in x.chunks_exact(k).enumerate() {
                    let mut alone = vec![f32::NAN; n];
                    project(&weights, x, &mut alone);
                    assert_eq!(alone, y[row * n..(row + 1) * n], "[{n}, {k}], row {row} of {m}");
                }
            }
        }
    }

    #[test]
    fn rows_of_other_types_are_rounded_once_on_the_way_out() {
        let (m, n, k) = (3, 40, 300);
        let mut host = host(n, k);
        let x = noise(2, m * k);
        let mut sums = vec![0.0; m * n];
        project(&host.weights.dense().unwrap(), &f32s(&x), &mut sums);

        let mut y = vec![bf16::ZERO; m * n];
        host.project(Rows::host(&x[..], m, k).unwrap(), RowsMut::host(&mut y[..], m, n).unwrap()).unwrap();
        assert_eq!(y, sums.iter().map(|&sum| bf16::from_f32(sum)).collect::<Vec<_>>());

        let x: Vec<f16> = x.iter().map(|x| f16::from_f32(x.to_f32())).collect();
        let mut y = vec![f16::ZERO; m * n];
        host.project(Rows::host(&x[..], m, k).unwrap(), RowsMut::host(&mut y[..], m, n).unwrap()).unwrap();
        assert_eq!(y, sums.iter().map(|&sum| f16::from_f32(sum)).collect::<Vec<_>>());
    }

    #[test]
    fn rows_of_another_width_are_refused() {
        let (x, mut y) = ([0f32; 6], [0f32; 4]);
        let (x, y) = (Rows::host(&x[..], 1, 6).unwrap(), RowsMut::host(&mut y[..], 1, 4).unwrap());
        let refusal = host(4, 5).project(x, y).unwrap_err().to_string();
        assert_eq!(refusal, "w: input rows: shape [1, 6], expected [1, 5]");
    }
}
