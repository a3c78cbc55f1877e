//! Partial rotary position embedding.

use half::bf16;

use crate::Config;

/// Rotates the first elements of each head by angles that grow with the position.
///
/// Element i of the first half of the rotary part and element i of its second half are one point of a plane. Text
/// positions are the same on all three axes of the multimodal form, so one angle serves each pair.
pub(crate) struct Rope {
    /// Radians a position, for each pair.
    frequencies: Vec<f32>,
}

/// Cosines and sines of a run of positions, `[rows, pairs]` each.
pub(crate) struct Angles {
    pairs: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    pub fn new(config: &Config) -> Self {
        let dim = config.rotary_dim;
        let frequency = |pair: usize| 1.0 / config.rope_theta.powf(2.0 * pair as f32 / dim as f32);
        Rope { frequencies: (0..dim / 2).map(frequency).collect() }
    }

    /// See [`Model::round_rope_frequencies`](crate::Model::round_rope_frequencies).
    pub fn round_frequencies(&mut self) {
        for frequency in &mut self.frequencies {
            *frequency = bf16::from_f32(*frequency).to_f32();
        }
    }

    /// Radians a position, for each pair.
    #[cfg(kernels_built)]
    pub fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// The angles of `rows` positions from `position` on.
    pub fn angles(&self, position: usize, rows: usize) -> Angles {
        let angles = (position..position + rows)
            .flat_map(|position| self.frequencies.iter().map(move |frequency| position as f32 * frequency));
        let (sin, cos) = angles.map(f32::sin_cos).unzip();
        Angles { pairs: self.frequencies.len(), cos, sin }
    }
}

impl Angles {
    /// Rotates a head of row `row`.
    pub fn rotate(&self, row: usize, head: &mut [f32]) {
        let (first, rest) = head.split_at_mut(self.pairs);
        let at = row * self.pairs..(row + 1) * self.pairs;
        let angles = self.cos[at.clone()].iter().zip(&self.sin[at]);
        for ((x, y), (cos, sin)) in first.iter_mut().zip(rest).zip(angles) {
            (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
        }
    }
}
