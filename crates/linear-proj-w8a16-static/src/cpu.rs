//! The CPU arm: the same numerics as the kernel, readable first, and the oracle the kernel is held to.

use std::ops::Range;

use half::bf16;
use linear_proj::{BoundProj, LinearProj, Rows, RowsData, RowsMut, RowsMutData, check_call, dot};
use rayon::prelude::*;
use structure_core::{Form, Place, Receipt, Refusal};

use crate::pack::{Quantized, check_features, dequantize};
use crate::{DTYPES, ENTRY, ENVELOPE};

/// Weights in canonical order, in host memory.
pub(crate) struct CpuArm {
    pub weights: Quantized,
    pub bias: Option<Vec<f32>>,
    pub receipt: Receipt,
}

impl CpuArm {
    /// `y[m, n]` for every m, `x` being BF16 values `[M, K]`: the codes of one row meet all rows of `x`.
    fn feature(&self, n: usize, x: &[f32], codes: &mut [f32], y: &mut [bf16]) {
        let k = self.weights.k;
        for (code, &q) in codes.iter_mut().zip(&self.weights.codes[n * k..]) {
            *code = f32::from(q);
        }
        let scale = self.weights.scales[n];
        for (y, x) in y.iter_mut().zip(x.chunks_exact(k)) {
            // Multiplied and added as two operations with a rounding each, as the kernel does.
            let scaled = scale * dot(codes, x);
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
        // [N, M], turned around while it is written.
        let mut by_feature = vec![bf16::ZERO; n * m];
        by_feature
            .par_chunks_mut(m)
            .enumerate()
            .for_each_init(|| vec![0f32; k], |codes, (n, y)| self.feature(n, &x, codes, y));
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

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        let Quantized { n, k, codes, scales, .. } = &self.weights;
        check_features(&features, *n)?;
        Ok(dequantize(&codes[features.start * k..features.end * k], &scales[features], *k))
    }
}
