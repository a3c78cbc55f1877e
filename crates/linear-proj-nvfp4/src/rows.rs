use half::bf16;
use linear_proj::Entered;
use number_formats::nvfp4::{self, BLOCK, ScaleMode};

/// How rows become NVFP4 on either arm.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowQuantiser {
    /// Whether a row has a global scale of its own, or 1.
    pub mode: ScaleMode,
    /// What element k of every row is multiplied by in FP32, after its rounding to BF16 and before the row's amax is taken,
    /// `[K]`; none for nothing.
    pub inverse_balance: Option<Vec<f32>>,
}

impl RowQuantiser {
    /// Quantises rows of K BF16 values each: numbers are E2M1 times E4M3, scales the rows' globals.
    pub fn quantise(&self, mut x: Vec<f32>, k: usize) -> Entered {
        let (mut codes, mut scales) = (vec![0u8; k / 2], vec![0u8; k / BLOCK]);
        let globals = x
            .chunks_exact_mut(k)
            .map(|row| {
                if let Some(inverse) = &self.inverse_balance {
                    row.iter_mut().zip(inverse).for_each(|(x, inverse)| *x *= inverse);
                }
                let global = nvfp4::quantize_row(row, self.mode, &mut codes, &mut scales);
                nvfp4::dequantize_row(&codes, &scales, 1.0, row);
                global
            })
            .collect();
        Entered { numbers: x, scales: globals }
    }

    /// The rows' format as receipts say it.
    pub fn format(&self) -> &'static str {
        match (self.mode, &self.inverse_balance) {
            (ScaleMode::TwoLevel, None) => "NVFP4 two-level per row",
            (ScaleMode::SingleLevel, None) => "NVFP4 single-level per row",
            (ScaleMode::TwoLevel, Some(_)) => "NVFP4 two-level per row, balanced",
            (ScaleMode::SingleLevel, Some(_)) => "NVFP4 single-level per row, balanced",
        }
    }

    /// A row of any values as it enters the products, for gates: rounded to BF16, quantised, and the numbers it stands for.
    pub fn operand(&self, row: &[f32]) -> Vec<f32> {
        let rounded = row.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        self.quantise(rounded, row.len()).values()
    }
}
