use linear_proj::{CpuWeights, Entered};

use crate::{Quantized, RowQuantiser};

/// Weights in host memory and how rows meet them.
#[derive(Clone, Debug)]
pub struct CpuForm {
    /// In canonical order.
    pub weights: Quantized,
    /// Of the rows.
    pub rows: RowQuantiser,
}

impl CpuWeights for CpuForm {
    fn n(&self) -> usize {
        self.weights.n
    }

    fn k(&self) -> usize {
        self.weights.k
    }

    fn numbers(&self, n: usize, row: &mut [f32]) {
        self.weights.decode(n, 1.0, row);
    }

    fn scale(&self, _: usize) -> f32 {
        self.weights.global
    }

    fn enter(&self, x: Vec<f32>) -> Entered {
        self.rows.quantise(x, self.weights.k)
    }
}
