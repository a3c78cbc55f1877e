//! Random tensors in place of a checkpoint's: the large hosts' shapes without their files, for measuring.

use std::collections::HashMap;

use half::bf16;
use rayon::prelude::*;
use structure_core::Refusal;

use crate::tensor::Weights;

/// Makes tensors as they are asked for. Projections of one shape share their memory, which holds the largest hosts' in a few
/// gigabytes; who puts them on a device copies them there.
#[derive(Default)]
pub(crate) struct RandomTensors {
    projections: HashMap<(usize, usize), Weights>,
}

impl RandomTensors {
    /// Weights `[n, k]` of variance 1 / k: rows keep their size from layer to layer.
    pub fn projection(&mut self, n: usize, k: usize) -> Result<Weights, Refusal> {
        if let Some(weights) = self.projections.get(&(n, k)) {
            return Ok(weights.clone());
        }
        let bound = (3.0 / k as f32).sqrt();
        let seed = self.projections.len() as u64;
        let elements = (0..n * k).into_par_iter().map(|i| bf16::from_f32(bound * uniform(seed, i))).collect();
        let weights = Weights::owned(n, k, elements)?;
        self.projections.insert((n, k), weights.clone());
        Ok(weights)
    }

    /// A small tensor in the range that trained ones of its name have.
    pub fn vector(tensor: &str, len: usize) -> Vec<f32> {
        let (middle, reach) = match tensor {
            // The scale of the gated norm is the weight itself, that of all others 1 + w.
            name if name.ends_with("linear_attn.norm.weight") => (1.0, 0.1),
            name if name.ends_with(".A_log") => (1.0, 1.0),
            name if name.ends_with(".dt_bias") => (-3.0, 1.0),
            name if name.ends_with("conv1d.weight") => (0.0, 0.5),
            _ => (0.0, 0.1),
        };
        (0..len).map(|i| middle + reach * uniform(tensor.len() as u64, i)).collect()
    }
}

/// A number between -1 and 1, the same for the same seed and index (SplitMix64, Steele, Lea and Flood, 2014).
fn uniform(seed: u64, index: usize) -> f32 {
    let mut z = (index as u64).wrapping_add(seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fill_their_range_evenly() {
        let numbers: Vec<f32> = (0..100_000).map(|i| uniform(3, i)).collect();
        let mean: f32 = numbers.iter().sum::<f32>() / numbers.len() as f32;
        let square: f32 = numbers.iter().map(|x| x * x).sum::<f32>() / numbers.len() as f32;
        assert!(numbers.iter().all(|x| (-1.0..1.0).contains(x)));
        // A uniform number from -1 to 1 has mean 0 and variance 1/3; five standard errors of 100,000 of them.
        assert!(mean.abs() < 0.0092 && (square - 1.0 / 3.0).abs() < 0.0048, "{mean}, {square}");
    }

    #[test]
    fn one_shape_is_one_memory() {
        let mut random = RandomTensors::default();
        let [a, b, c] = [(4, 8), (4, 8), (8, 4)].map(|(n, k)| random.projection(n, k).unwrap());
        assert_eq!(a.dense().unwrap().identity(), b.dense().unwrap().identity());
        assert_ne!(a.dense().unwrap().identity(), c.dense().unwrap().identity());
    }
}
