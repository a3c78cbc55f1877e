//! Weights that are NVFP4 already: taken over bit for bit by implementations of that format, read by any other.

use libtest_mimic::Trial;
use linear_proj::{DenseWeights, Options, gates};
use number_formats::nvfp4::{Nvfp4Tensor, ScaleMode};
use number_formats::relative_l2;

use crate::arm::{Arm, on_each_arm};
use crate::random::Random;

const N: usize = 50;
const K: usize = 272;

pub fn trials() -> Vec<Trial> {
    [
        on_each_arm("adoption::nvfp4_is_taken_over_as_it_is", taken_over),
        on_each_arm("adoption::w8a16_quantises_what_it_reads", w8a16_reads_values),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A tensor that no quantiser of ours would write: arbitrary codes and scales, negative zeros and zero scales among them.
fn foreign() -> Nvfp4Tensor {
    let mut random = Random::new(61);
    let codes = (0..N * K / 2).map(|_| (random.uniform() * 256.0) as u8).collect();
    let scales = (0..N * K / 16).map(|_| (random.uniform() * 127.0) as u8).collect();
    Nvfp4Tensor::from_compressed_tensors(codes, scales, N, K, 3000.0).unwrap()
}

fn values(tensor: &Nvfp4Tensor) -> Vec<f32> {
    let mut values = vec![0f32; N * K];
    tensor.dequantize(&mut values).unwrap();
    values
}

fn taken_over(arm: &Arm) {
    let tensor = foreign();
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    for scale_mode in [ScaleMode::TwoLevel, ScaleMode::SingleLevel] {
        let options = Options { scale_mode, ..Options::default() };
        let weights = DenseWeights::from_nvfp4(tensor.view());
        let mut proj = arm.staged(arm.bind_with("nvfp4_dynamic", weights, None, &options).unwrap());
        assert_eq!(bits(&proj.dequantized(0..N).unwrap()), bits(&values(&tensor)));
        assert_eq!(proj.receipt().conversion_error, 0.0);
        assert_eq!(proj.receipt().formats.weights, "NVFP4 as packed");
        let x = Random::new(67).normals(16 * K, 1.0);
        gates::against_reference(proj.as_mut(), None, &x, 16, 0..N).unwrap();
    }
}

fn w8a16_reads_values(arm: &Arm) {
    let tensor = foreign();
    let weights = DenseWeights::from_nvfp4(tensor.view());
    let mut proj = arm.staged(arm.bind_with("w8a16_static", weights, None, &Options::default()).unwrap());
    let error = relative_l2(values(&tensor), proj.dequantized(0..N).unwrap());
    assert!(error > 0.0 && error < 2e-2, "{error}");
    assert!((proj.receipt().conversion_error - error).abs() < 1e-9);
    let x = Random::new(67).normals(16 * K, 1.0);
    gates::against_reference(proj.as_mut(), None, &x, 16, 0..N).unwrap();
}
