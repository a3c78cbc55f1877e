use std::ops::Range;

use half::bf16;
use rayon::prelude::*;
use structure_core::{Band, Form, Place, Receipt, Refusal, Registration};

use crate::proj::{check_band, check_features, form};
use crate::{Bind, BoundProj, LinearProj, Rows, RowsData, RowsMut, RowsMutData, check_call, dot, gates};

/// Weights of one format in host memory, and how rows meet them: what a CPU arm must know.
///
/// A weight is a number times the scale of its feature, an activation a number times the scale of its row:
///
/// `y[m, n] = bf16(scale(n) * x.scales[m] * sum over k of numbers(n)[k] * x.numbers[m, k] + bias[n])`
///
/// The sum is FP32 in the order of [`dot`]. The scales are multiplied in FP64, where the product of two is exact and one of
/// small ones has range enough, and the product is rounded to FP32 once; so is the sum with the bias.
pub trait CpuWeights: Send + Sync + 'static {
    /// Output features.
    fn n(&self) -> usize;

    /// Input features.
    fn k(&self) -> usize;

    /// Writes the K numbers of feature `n`.
    fn numbers(&self, n: usize, row: &mut [f32]);

    /// The scale of feature `n`.
    fn scale(&self, n: usize) -> f32;

    /// Rows as they enter the products; `x` is `[M, K]`, rounded to BF16 already.
    fn enter(&self, x: Vec<f32>) -> Entered {
        Entered { scales: vec![1.0; x.len() / self.k().max(1)], numbers: x }
    }
}

/// Rows as they enter the products: element k of row m stands for `numbers[m * K + k] * scales[m]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Entered {
    /// `[M, K]`.
    pub numbers: Vec<f32>,
    /// `[M]`.
    pub scales: Vec<f32>,
}

impl Entered {
    /// What the rows stand for, `[M, K]`.
    pub fn values(&self) -> Vec<f32> {
        let k = self.numbers.len() / self.scales.len().max(1);
        let rows = self.numbers.chunks(k.max(1)).zip(&self.scales);
        rows.flat_map(|(row, scale)| row.iter().map(move |number| number * scale)).collect()
    }
}

/// Rounds a row to BF16: what every implementation does first with rows of another type.
pub(crate) fn round_to_bf16(row: &[f32]) -> Vec<f32> {
    row.iter().map(|&x| bf16::from_f32(x).to_f32()).collect()
}

/// The CPU arm of an implementation: the numerics of its kernel, readable first, and the oracle the kernel is held to.
pub struct CpuArm<W> {
    weights: W,
    bias: Option<Vec<f32>>,
    form: Form,
    receipt: Receipt,
}

impl<W: CpuWeights> CpuArm<W> {
    /// Binds packed weights and runs the smoke; `receipt` is that of the bind.
    ///
    /// # Errors
    /// What [`gates::smoke`] says.
    pub fn bind(
        weights: W,
        bind: &Bind<'_>,
        entry: &Registration,
        receipt: Receipt,
    ) -> Result<Self, Refusal> {
        let form = form(entry, weights.k(), Place::Cpu);
        let mut arm = CpuArm { weights, bias: bind.bias.map(<[f32]>::to_vec), form, receipt };
        arm.receipt.smoke = gates::smoke(&mut arm, bind.bias)?;
        Ok(arm)
    }

    /// `y[m, n]` for every m: the numbers of one feature meet all rows.
    fn feature(&self, n: usize, x: &Entered, numbers: &mut [f32], y: &mut [bf16]) {
        self.weights.numbers(n, numbers);
        let scale = f64::from(self.weights.scale(n));
        for ((y, x), &row_scale) in y.iter_mut().zip(x.numbers.chunks_exact(numbers.len())).zip(&x.scales) {
            let scaled = (scale * f64::from(row_scale) * f64::from(dot(numbers, x))) as f32;
            *y = bf16::from_f32(self.bias.as_ref().map_or(scaled, |bias| scaled + bias[n]));
        }
    }

    fn band(&self) -> Band {
        self.form.band
    }
}

impl<W: CpuWeights> LinearProj for CpuArm<W> {
    fn n(&self) -> usize {
        self.weights.n()
    }

    fn k(&self) -> usize {
        self.weights.k()
    }

    fn project(&mut self, x: Rows<'_>, mut y: RowsMut<'_>) -> Result<(), Refusal> {
        let (n, k, m) = (self.n(), self.k(), x.rows());
        check_call(&self.receipt.seat, n, k, &x, &y)?;
        check_band(&self.receipt.seat, m, self.band())?;
        let (RowsData::Host(elements), RowsMutData::Host(out)) = (x.data(), y.data()) else {
            return Err(Refusal::WrongDevice {
                what: self.receipt.seat.clone(),
                rows: x.place().to_string(),
                seat: Place::Cpu.to_string(),
            });
        };
        let x = self.weights.enter(elements.to_bf16().into_iter().map(bf16::to_f32).collect());
        // [N, M], turned around while it is written.
        let mut by_feature = vec![bf16::ZERO; n * m];
        by_feature
            .par_chunks_mut(m)
            .enumerate()
            .for_each_init(|| vec![0f32; k], |numbers, (n, y)| self.feature(n, &x, numbers, y));
        out.write_bf16((0..m * n).map(|index| by_feature[index % n * m + index / n]));
        Ok(())
    }
}

impl<W: CpuWeights> BoundProj for CpuArm<W> {
    fn form(&self) -> Form {
        self.form
    }

    fn receipt(&self) -> &Receipt {
        &self.receipt
    }

    fn operand(&self, row: &[f32]) -> Vec<f32> {
        self.weights.enter(round_to_bf16(row)).values()
    }

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        check_features(&features, self.n())?;
        let mut values = vec![0f32; features.len() * self.k()];
        for (row, n) in values.chunks_mut(self.k()).zip(features) {
            self.weights.numbers(n, row);
            row.iter_mut().for_each(|number| *number *= self.weights.scale(n));
        }
        Ok(values)
    }
}
