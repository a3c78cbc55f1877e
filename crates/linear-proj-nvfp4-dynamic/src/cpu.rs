//! The CPU arm: the same numerics as the kernel, readable first, and the oracle the kernel is held to.

use std::ops::Range;

use half::bf16;
use linear_proj::{BoundProj, LinearProj, Rows, RowsData, RowsMut, RowsMutData, check_call, dot};
use number_formats::nvfp4::{self, BLOCK, ScaleMode};
use rayon::prelude::*;
use structure_core::{Form, Place, Receipt, Refusal};

use crate::pack::Quantized;
use crate::{DTYPES, ENTRY, ENVELOPE};

/// Weights in canonical order, in host memory.
pub(crate) struct CpuArm {
    pub weights: Quantized,
    pub bias: Option<Vec<f32>>,
    pub receipt: Receipt,
}

/// Quantises rows of BF16 values: the numbers that enter the products, E2M1 times E4M3, and each row's global scale.
pub(crate) fn quantise(x: &[f32], k: usize) -> (Vec<f32>, Vec<f32>) {
    let mut numbers = vec![0f32; x.len()];
    let (mut codes, mut scales) = (vec![0u8; k / 2], vec![0u8; k / BLOCK]);
    let globals = x
        .chunks_exact(k)
        .zip(numbers.chunks_exact_mut(k))
        .map(|(row, numbers)| {
            let global = nvfp4::quantize_row(row, ScaleMode::TwoLevel, &mut codes, &mut scales);
            nvfp4::dequantize_row(&codes, &scales, 1.0, numbers);
            global
        })
        .collect();
    (numbers, globals)
}

/// A row as it enters the products, for gates: rounded to BF16, quantised, and the number it stands for.
pub(crate) fn operand(row: &[f32]) -> Vec<f32> {
    let rounded: Vec<f32> = row.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    let (numbers, globals) = quantise(&rounded, row.len());
    numbers.iter().map(|number| number * globals[0]).collect()
}

impl CpuArm {
    /// `y[m, n]` for every m: the numbers of one row of weights meet all rows of `x`.
    fn feature(&self, n: usize, x: &[f32], globals: &[f32], weights: &mut [f32], y: &mut [bf16]) {
        self.weights.decode(n, 1.0, weights);
        for ((y, x), &global) in y.iter_mut().zip(x.chunks_exact(self.weights.k)).zip(globals) {
            let scale = f64::from(self.weights.global) * f64::from(global);
            let scaled = (scale * f64::from(dot(weights, x))) as f32;
            *y = bf16::from_f32(self.bias.as_ref().map_or(scaled, |bias| scaled + bias[n]));
        }
    }
}

impl LinearProj for CpuArm {
    fn n(&self) -> usize {
        self.weights.n
    }

    fn k(&self) -> usize {
        self.weights.k
    }

    fn project(&mut self, x: Rows<'_>, mut y: RowsMut<'_>) -> Result<(), Refusal> {
        let Quantized { n, k, .. } = self.weights;
        check_call(&self.receipt.seat, n, k, &x, &y)?;
        let m = x.rows();
        if !ENVELOPE.band.takes(m) {
            return Err(Refusal::BandExceeded { what: self.receipt.seat.clone(), m, band: ENVELOPE.band });
        }
        let (RowsData::Host(elements), RowsMutData::Host(out)) = (x.data(), y.data()) else {
            return Err(Refusal::WrongDevice {
                what: self.receipt.seat.clone(),
                rows: x.place().to_string(),
                seat: Place::Cpu.to_string(),
            });
        };
        let x: Vec<f32> = elements.to_bf16().into_iter().map(bf16::to_f32).collect();
        let (numbers, globals) = quantise(&x, k);
        // [N, M], turned around while it is written.
        let mut by_feature = vec![bf16::ZERO; n * m];
        by_feature.par_chunks_mut(m).enumerate().for_each_init(
            || vec![0f32; k],
            |weights, (n, y)| self.feature(n, &numbers, &globals, weights, y),
        );
        out.write_bf16((0..m * n).map(|index| by_feature[index % n * m + index / n]));
        Ok(())
    }
}

impl BoundProj for CpuArm {
    fn form(&self) -> Form {
        Form {
            dtypes: DTYPES,
            width: self.weights.k,
            place: Place::Cpu,
            band: ENVELOPE.band,
            fallback: ENTRY.fallback,
        }
    }

    fn receipt(&self) -> &Receipt {
        &self.receipt
    }

    fn operand(&self, row: &[f32]) -> Vec<f32> {
        operand(row)
    }

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        self.weights.dequantized(features, self.weights.global)
    }
}
