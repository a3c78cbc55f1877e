use std::ops::Range;

use linear_proj::{Bind, DenseWeights, Packing};
use number_formats::RelativeL2;
use number_formats::nvfp4::{self, BLOCK, Nvfp4View, ScaleMode};
use rayon::prelude::*;
use structure_core::{Formats, Refusal};

use crate::RowQuantiser;

/// E2M1 codes `[N, K / 2]` and UE4M3 scales `[N, K / 16]` under one global scale, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Output features.
    pub n: usize,
    /// Input features, a multiple of 16.
    pub k: usize,
    /// Two codes a byte, the even element in the low nibble.
    pub codes: Vec<u8>,
    /// One scale a block of 16.
    pub scales: Vec<u8>,
    /// A multiplier.
    pub global: f32,
    /// Relative L2 distance from the source, times its balance if it has one, over the whole tensor.
    pub conversion_error: f64,
}

impl Quantized {
    /// Takes weights that are NVFP4 over as they are: codes, scales and global. Others are quantised, see
    /// [`quantise`](Self::quantise).
    ///
    /// # Errors
    /// As [`quantise`](Self::quantise).
    pub fn new(bind: &Bind<'_>, mode: ScaleMode, balance: Option<&[f32]>) -> Result<Self, Refusal> {
        match Self::adoptable(&bind.weights, balance) {
            Some(view) => Ok(Quantized {
                n: view.n(),
                k: view.k(),
                codes: view.codes().to_vec(),
                scales: view.scales().to_vec(),
                global: view.global(),
                conversion_error: 0.0,
            }),
            None => Self::quantise(bind, mode, balance),
        }
    }

    /// The weights as they are, if they are NVFP4 and nothing has to be multiplied into them.
    fn adoptable<'a>(weights: &DenseWeights<'a>, balance: Option<&[f32]>) -> Option<Nvfp4View<'a>> {
        let unbalanced = balance.is_none_or(|balance| balance.iter().all(|&s| s == 1.0));
        weights.nvfp4().filter(|_| unbalanced)
    }

    /// Quantises row by row, after a pass for the largest magnitude; the source is decoded one row at a time. With a balance,
    /// `[K]`, what is quantised is `w[n, k] * balance[k]`, rounded to FP32.
    ///
    /// # Errors
    /// [`Refusal::NonFinite`] when a balanced weight leaves FP32's range.
    pub fn quantise(bind: &Bind<'_>, mode: ScaleMode, balance: Option<&[f32]>) -> Result<Self, Refusal> {
        let (n, k) = (bind.weights.n(), bind.weights.k());
        let source = Source { weights: &bind.weights, balance };
        let global = mode.global(source.amax(bind.seat)?);
        let mut codes = vec![0u8; n * k / 2];
        let mut scales = vec![0u8; n * k / BLOCK];
        let errors: Vec<RelativeL2> = codes
            .par_chunks_mut(k / 2)
            .zip(scales.par_chunks_mut(k / BLOCK))
            .enumerate()
            .map_init(
                || (vec![0f32; k], vec![0f32; k]),
                |(row, back), (n, (codes, scales))| {
                    source.row(n, row);
                    nvfp4::quantize_row_under(row, global, codes, scales);
                    nvfp4::dequantize_row(codes, scales, global, back);
                    let mut error = RelativeL2::new();
                    row.iter().zip(back.iter()).for_each(|(&source, &back)| error.push(source, back));
                    error
                },
            )
            .collect();
        // Added in row order, so that the figure does not depend on how rayon split the rows.
        let total = errors.into_iter().fold(RelativeL2::new(), RelativeL2::merge);
        Ok(Quantized { n, k, codes, scales, global, conversion_error: total.value() })
    }

    /// The format that [`new`](Self::new) gives weights, as receipts say it.
    pub fn format(weights: &DenseWeights<'_>, mode: ScaleMode, balance: Option<&[f32]>) -> &'static str {
        match (Self::adoptable(weights, balance), mode) {
            (Some(_), _) => "NVFP4 as packed",
            (None, ScaleMode::TwoLevel) => "NVFP4 two-level",
            (None, ScaleMode::SingleLevel) => "NVFP4 single-level",
        }
    }

    /// What a receipt says of them, their [`format`](Self::format) given, and of the rows that meet them.
    pub fn packing(&self, format: &'static str, rows: &RowQuantiser) -> Packing {
        let formats = Formats { weights: format, activations: rows.format() };
        let bytes = self.codes.len() + self.scales.len() + size_of_val(&self.global);
        Packing { formats, bytes, conversion_error: self.conversion_error }
    }

    /// Rows `features`, which lie below N, as the numbers they stand for, `[len, K]`, times `global`.
    pub fn dequantized(&self, features: Range<usize>, global: f32) -> Vec<f32> {
        let mut weights = vec![0f32; features.len() * self.k];
        for (row, n) in weights.chunks_mut(self.k).zip(features) {
            self.decode(n, global, row);
        }
        weights
    }

    /// One row as the numbers it stands for, times `global`.
    pub fn decode(&self, n: usize, global: f32, row: &mut [f32]) {
        let codes = &self.codes[n * self.k / 2..(n + 1) * self.k / 2];
        let scales = &self.scales[n * self.k / BLOCK..(n + 1) * self.k / BLOCK];
        nvfp4::dequantize_row(codes, scales, global, row);
    }
}

/// What is quantised.
struct Source<'a> {
    weights: &'a DenseWeights<'a>,
    balance: Option<&'a [f32]>,
}

impl Source<'_> {
    fn row(&self, n: usize, row: &mut [f32]) {
        self.weights.decode_row(n, row);
        if let Some(balance) = self.balance {
            row.iter_mut().zip(balance).for_each(|(w, balance)| *w *= balance);
        }
    }

    /// The largest magnitude; the weights themselves are finite.
    fn amax(&self, seat: &str) -> Result<f32, Refusal> {
        let (n, k) = (self.weights.n(), self.weights.k());
        let by_row: Vec<f32> = (0..n)
            .into_par_iter()
            .map_init(
                || vec![0f32; k],
                |row, n| {
                    self.row(n, row);
                    row.iter().fold(0f32, |amax, w| amax.max(w.abs()))
                },
            )
            .collect();
        let Some(n) = by_row.iter().position(|amax| !amax.is_finite()) else {
            return Ok(by_row.into_iter().fold(0f32, f32::max));
        };
        let mut row = vec![0f32; k];
        self.row(n, &mut row);
        let first = row.iter().position(|w| !w.is_finite()).unwrap_or_default();
        let what = format!("{seat}: weights times their balance");
        Err(Refusal::NonFinite { what, index: n * k + first, value: row[first] })
    }
}
