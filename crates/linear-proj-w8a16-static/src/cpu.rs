//! The CPU arm: codes are the numbers that are multiplied, rows enter as they are.

use linear_proj::CpuWeights;

use crate::pack::Quantized;

impl CpuWeights for Quantized {
    fn n(&self) -> usize {
        self.n
    }

    fn k(&self) -> usize {
        self.k
    }

    fn numbers(&self, n: usize, row: &mut [f32]) {
        for (number, &code) in row.iter_mut().zip(&self.codes[n * self.k..]) {
            *number = f32::from(code);
        }
    }

    fn scale(&self, n: usize) -> f32 {
        self.scales[n]
    }
}
