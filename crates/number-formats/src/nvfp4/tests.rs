use proptest::prelude::*;

use super::*;
use crate::oracle::{E2M1_MAGNITUDES, e4m3_magnitudes, nearest};
use crate::relative_l2;

/// Codes, scales and global scale of the row `x`, in that order.
type Quantized = (Vec<u8>, Vec<u8>, f32);

fn quantized(x: &[f32], mode: ScaleMode) -> Quantized {
    let (mut codes, mut scales) = (vec![0xaa; x.len() / 2], vec![0xaa; x.len() / BLOCK]);
    let global = quantize_row(x, mode, &mut codes, &mut scales);
    (codes, scales, global)
}

fn dequantized((codes, scales, global): &Quantized) -> Vec<f32> {
    let mut out = vec![f32::NAN; codes.len() * 2];
    dequantize_row(codes, scales, *global, &mut out);
    out
}

/// Bit patterns, so that zeros compare by sign.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Four blocks of very different magnitudes, so that scales reach the subnormals and zero.
fn uneven_blocks() -> impl Strategy<Value = Vec<f32>> {
    let blocks = prop::collection::vec((prop::array::uniform16(-4f32..4.0), -30i32..10), 4);
    blocks.prop_map(|blocks| {
        blocks.into_iter().flat_map(|(x, exponent)| x.map(|x| x * 2f32.powi(exponent))).collect()
    })
}

/// The quantiser by search. An FP64 division of FP32 numbers rounded to FP32 is the IEEE FP32 division (FP64 has more than
/// twice the bits), so `as f32` stands wherever the definition rounds.
fn oracle(x: &[f32], mode: ScaleMode) -> Quantized {
    let amax = |x: &[f32]| x.iter().fold(0f64, |amax, &x| amax.max(f64::from(x).abs()));
    let divide = |a: f64, b: f64| f64::from((a / b) as f32);
    let global = if mode == ScaleMode::TwoLevel { divide(amax(x), 2688.0) } else { 1.0 };
    let magnitudes = e4m3_magnitudes();
    let (mut codes, mut scales) = (vec![], vec![]);
    for block in x.chunks(16) {
        let scale =
            if global == 0.0 { 0 } else { nearest(&magnitudes, divide(divide(amax(block), 6.0), global)) };
        let step = f64::from((magnitudes[scale] * global) as f32);
        let code = |x: f32| match scale {
            0 => 0,
            _ => {
                nearest(&E2M1_MAGNITUDES, divide(f64::from(x.abs()), step)) as u8
                    + if x.is_sign_negative() { 8 } else { 0 }
            }
        };
        codes.extend(block.chunks(2).map(|pair| code(pair[0]) + 16 * code(pair[1])));
        scales.push(scale as u8);
    }
    (codes, scales, global as f32)
}

/// Numbers spread like a weight's: a deterministic sum of uniform ones, times a magnitude.
fn spread(len: usize, magnitude: f32) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut uniform = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..len).map(|_| (uniform() + uniform() + uniform() + uniform()) * magnitude).collect()
}

#[test]
fn golden_bytes_of_a_single_level_block() {
    // The largest is 6, so the scale is 1, code 0x38, and every element is its own E2M1 value.
    let block = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let packed = quantized(&block, ScaleMode::SingleLevel);
    assert_eq!(packed, (vec![0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe], vec![0x38], 1.0));
    assert_eq!(bits(&dequantized(&packed)), bits(&block));
}

#[test]
fn golden_bytes_of_two_level_blocks() {
    let mut x = [0.0; 48];
    // 2688 makes the global scale 1: the first block's scale is 448, the second's 0.5 for a largest element of 3.
    x[0] = 2688.0;
    x[1] = -1344.0;
    x[16..20].copy_from_slice(&[3.0, -0.125, 0.125, 0.375]);
    // 6 * 2^-10 / 6 is half the smallest scale: a tie, which goes to the even code, zero, and takes the block with it.
    x[32] = 6.0 / 1024.0;
    let (codes, scales, global) = quantized(&x, ScaleMode::TwoLevel);
    assert_eq!(global, 1.0);
    assert_eq!(scales, [0x7e, 0x30, 0x00]);
    // -1344 / 448 = -3. In steps of 0.5: 6, the ties -0.25 -> -0 and 0.25 -> 0, and the tie 0.75 -> 1.
    assert_eq!(codes[..8], [0xd7, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(codes[8..16], [0x87, 0x20, 0, 0, 0, 0, 0, 0]);
    assert_eq!(codes[16..], [0; 8]);
}

#[test]
fn zeros_of_either_sign_are_code_zero() {
    for mode in [ScaleMode::TwoLevel, ScaleMode::SingleLevel] {
        let mut x = [0.0f32; 32];
        x[3] = -0.0;
        let packed = quantized(&x, mode);
        assert_eq!((&packed.0[..], &packed.1[..]), (&[0; 16][..], &[0; 2][..]));
        assert_eq!(dequantized(&packed), [0.0; 32]);
        // A zero block among others.
        x[20] = -5.0;
        let packed = quantized(&x, mode);
        assert_eq!((&packed.0[..8], packed.1[0]), (&[0; 8][..], 0));
        assert_eq!(dequantized(&packed)[..20], [0.0; 20]);
    }
    assert_eq!(quantized(&[0.0; 16], ScaleMode::TwoLevel).2, 0.0);
    assert_eq!(quantized(&[], ScaleMode::TwoLevel), (vec![], vec![], 0.0));
}

#[test]
fn tiny_numbers_flush_to_zero_and_never_to_nan() {
    // Single-level: up to 6 * 2^-10 is zero, just above has the smallest scale.
    let edge = 6.0 / 1024.0;
    assert_eq!(dequantized(&quantized(&[edge; 16], ScaleMode::SingleLevel)), [0.0; 16]);
    let above = quantized(&[edge * 1.0001; 16], ScaleMode::SingleLevel);
    assert_eq!(above.1, [0x01]);
    assert!((dequantized(&above)[0] - edge).abs() < edge * 0.01);
    // Two-level: a row too small for its global scale, down to the smallest number there is.
    for tiny in [f32::from_bits(1), f32::from_bits(1000), 1e-42] {
        let packed = quantized(&[tiny; 16], ScaleMode::TwoLevel);
        assert_eq!(packed, (vec![0; 8], vec![0], 0.0), "{tiny:e}");
        assert_eq!(dequantized(&packed), [0.0; 16]);
    }
    for small in [1e-38, 1e-36, 1e-30, 1e-20] {
        let back = dequantized(&quantized(&[small; 16], ScaleMode::TwoLevel));
        assert!((back[0] / small - 1.0).abs() < 1e-2, "{small:e} -> {:e}", back[0]);
    }
}

#[test]
fn huge_numbers_saturate_or_scale_and_stay_finite() {
    for huge in [1e38, 3.3e38, f32::MAX] {
        let x: Vec<f32> = (0..32).map(|i| if i % 2 == 0 { huge } else { -huge / 2.0 }).collect();
        let single = quantized(&x, ScaleMode::SingleLevel);
        assert_eq!((single.1[0], single.0[0]), (0x7e, 0xf7));
        assert_eq!(dequantized(&single)[..2], [2688.0, -2688.0]);
        let double = dequantized(&quantized(&x, ScaleMode::TwoLevel));
        assert!(double.iter().all(|value| value.is_finite()), "{huge:e}: {double:?}");
        assert!(relative_l2(x, double) < 1e-6);
    }
}

#[test]
fn a_non_finite_row_is_nan_throughout() {
    for mode in [ScaleMode::TwoLevel, ScaleMode::SingleLevel] {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 17, 31] {
                let mut x = [1.0; 32];
                x[place] = bad;
                let packed = quantized(&x, mode);
                assert_eq!((&packed.0, &packed.1), (&vec![0; 16], &vec![0; 2]));
                assert!(dequantized(&packed).iter().all(|value| value.is_nan()));
            }
        }
    }
}

#[test]
fn equal_to_the_oracle_at_every_magnitude() {
    for exponent in -90..=110 {
        let x = spread(16 * 8, 2f32.powi(exponent));
        for mode in [ScaleMode::TwoLevel, ScaleMode::SingleLevel] {
            assert_eq!(quantized(&x, mode), oracle(&x, mode), "2^{exponent}, {mode:?}");
        }
    }
}

#[test]
fn elements_are_divided_by_the_step() {
    // Ties times an E4M3 step are FP32 numbers, so the quotients are ties exactly; products with 1 / step are not always.
    let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    for scale in 0x01..=0x7e {
        let step = e4m3::decode(scale);
        let mut x = [6.0 * step; 16];
        x.iter_mut().zip(ties).for_each(|(x, tie)| *x = tie * step);
        let packed = quantized(&x, ScaleMode::SingleLevel);
        assert_eq!(packed, (vec![0x20, 0x42, 0x64, 0x76, 0x77, 0x77, 0x77, 0x77], vec![scale], 1.0));
    }
}

#[test]
fn block_scales_follow_the_order_of_the_divisions() {
    // Blocks whose scale is within an FP32 rounding of the midpoint of two codes, where any other sequence of
    // operations picks the other code for some.
    let midpoints: Vec<f64> = e4m3_magnitudes().windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
    for largest in spread(20, 1.0) {
        let global = largest.abs() / 2688.0;
        for midpoint in &midpoints {
            let edge = (6.0 * midpoint * f64::from(global)) as f32;
            for edge in [edge.next_down(), edge, edge.next_up()] {
                let mut x = [0.0; 32];
                (x[0], x[16]) = (largest, edge);
                assert_eq!(
                    quantized(&x, ScaleMode::TwoLevel),
                    oracle(&x, ScaleMode::TwoLevel),
                    "{largest}, {edge}"
                );
            }
        }
    }
}

#[test]
fn values_are_rounded_once() {
    for global in spread(50, 1.0).into_iter().map(f32::abs) {
        for scale in 0..=0x7e {
            let magnitude = f64::from(e4m3::decode(scale)) * f64::from(global);
            for code in 0..16 {
                let mut values = [0.0; 16];
                dequantize_row(&[code | code << 4; 8], &[scale], global, &mut values);
                let sign = if code < 8 { 1.0 } else { -1.0 };
                let value = (sign * E2M1_MAGNITUDES[usize::from(code % 8)] * magnitude) as f32;
                assert_eq!(bits(&values), bits(&[value; 16]), "{code:#03x} * {scale:#04x} * {global}");
            }
        }
    }
}

#[test]
fn two_levels_are_at_least_as_accurate_on_small_tensors() {
    let error = |x: &[f32], mode| relative_l2(x.iter().copied(), dequantized(&quantized(x, mode)));
    for magnitude in [2e-2, 5e-3, 1e-3, 1e-4, 1e-6] {
        let x = spread(16 * 512, magnitude);
        let (two, single) = (error(&x, ScaleMode::TwoLevel), error(&x, ScaleMode::SingleLevel));
        assert!(two <= single && two < 0.11, "{magnitude}: {two} and {single}");
    }
    assert_eq!(error(&spread(16 * 512, 1e-3), ScaleMode::SingleLevel), 1.0, "all of it flushed");
}

#[test]
fn a_weight_has_one_global_and_rows_have_their_own() {
    let (n, k) = (3, 32);
    let mut w = spread(n * k, 1.0);
    w[k..2 * k].iter_mut().for_each(|w| *w *= 100.0);
    let tensor = Nvfp4Tensor::quantize_weight(&w, n, k, ScaleMode::TwoLevel).unwrap();
    // A tensor is quantised as one long row is.
    assert_eq!((tensor.codes.clone(), tensor.scales.clone(), tensor.global), oracle(&w, ScaleMode::TwoLevel));
    assert_eq!((tensor.n(), tensor.k()), (n, k));
    assert_eq!((tensor.codes().len(), tensor.scales().len()), (n * k / 2, n * k / 16));
    let globals: Vec<f32> = w.chunks(k).map(|row| quantized(row, ScaleMode::TwoLevel).2).collect();
    assert_eq!(tensor.global(), globals[1]);
    assert!(globals[0] < globals[1] / 20.0 && globals[2] < globals[1] / 20.0);
    // And it is dequantised whole or row by row.
    let mut whole = vec![f32::NAN; n * k];
    tensor.dequantize(&mut whole).unwrap();
    for (row, (codes, scales)) in
        whole.chunks(k).zip(tensor.codes().chunks(k / 2).zip(tensor.scales().chunks(k / 16)))
    {
        let mut out = vec![f32::NAN; k];
        dequantize_row(codes, scales, tensor.global(), &mut out);
        assert_eq!(out, row);
    }
}

#[test]
fn the_conventions_of_checkpoints_agree() {
    let w = spread(2 * 48, 0.02);
    let ours = Nvfp4Tensor::quantize_weight(&w, 2, 48, ScaleMode::TwoLevel).unwrap();
    let (codes, scales) = (ours.codes().to_vec(), ours.scales().to_vec());
    let adopted = Nvfp4Tensor::from_modelopt(codes.clone(), scales.clone(), 2, 48, ours.global()).unwrap();
    assert_eq!(adopted, ours);
    for multiplier in [0.25, 2f32.powi(-17), 8.0] {
        let multiplied =
            Nvfp4Tensor::from_modelopt(codes.clone(), scales.clone(), 2, 48, multiplier).unwrap();
        let divided =
            Nvfp4Tensor::from_compressed_tensors(codes.clone(), scales.clone(), 2, 48, 1.0 / multiplier);
        assert_eq!(divided.unwrap(), multiplied);
    }
    // By hand: scale 0x40 is 2, codes 1 and 0xf are 0.5 and -6, and a divisor of 4 divides.
    let tensor = Nvfp4Tensor::from_compressed_tensors(vec![0xf1; 8], vec![0x40], 1, 16, 4.0).unwrap();
    let mut values = [0.0; 16];
    tensor.dequantize(&mut values).unwrap();
    assert_eq!(values[..2], [0.25, -3.0]);
}

#[test]
fn refusals_name_the_thing_and_its_value() {
    let quantize =
        |w: &[f32], n, k| Nvfp4Tensor::quantize_weight(w, n, k, ScaleMode::TwoLevel).unwrap_err().to_string();
    let mut w = [1.0; 32];
    assert_eq!(quantize(&w, 4, 8), "K = 8 is not a multiple of 16");
    assert_eq!(quantize(&w, 3, 16), "weights: 32 elements, the shape asks for 48");
    assert_eq!(
        quantize(&w, usize::MAX, 16),
        format!("the shape [{}, 16] has more elements than can be addressed", usize::MAX)
    );
    w[19] = f32::NEG_INFINITY;
    w[21] = f32::NAN;
    assert_eq!(quantize(&w, 2, 16), "element 19 is -inf, weights must be finite");

    let adopt = |codes, scales: &[u8], global| {
        Nvfp4Tensor::from_modelopt(vec![0; codes], scales.to_vec(), 1, 32, global).unwrap_err().to_string()
    };
    assert_eq!(adopt(15, &[0, 0], 1.0), "packed codes: 15 elements, the shape asks for 16");
    assert_eq!(adopt(16, &[0], 1.0), "block scales: 1 elements, the shape asks for 2");
    assert_eq!(adopt(16, &[0x7e, 0x7f], 1.0), "block scale 1 is 0x7f, UE4M3 codes end at 0x7e");
    assert_eq!(adopt(16, &[0x80, 0], 1.0), "block scale 0 is 0x80, UE4M3 codes end at 0x7e");
    assert_eq!(adopt(16, &[0, 0], -1.0), "the global multiplier is -1, it must be finite and not negative");
    assert_eq!(
        adopt(16, &[0, 0], f32::NAN),
        "the global multiplier is NaN, it must be finite and not negative"
    );
    for divisor in [0.0, -0.0, -4.0, f32::INFINITY, f32::NAN, f32::from_bits(1)] {
        let error =
            Nvfp4Tensor::from_compressed_tensors(vec![0; 16], vec![0; 2], 1, 32, divisor).unwrap_err();
        assert!(
            error.to_string().starts_with(&format!("the global divisor is {divisor}, it must be")),
            "{error}"
        );
    }

    let tensor = Nvfp4Tensor::from_modelopt(vec![0; 16], vec![0; 2], 1, 32, 0.0).unwrap();
    let error = tensor.dequantize(&mut [0.0; 31]).unwrap_err();
    assert_eq!(error.to_string(), "values: 31 elements, the shape asks for 32");
}

proptest! {
    #[test]
    fn equal_to_the_oracle(x in uneven_blocks()) {
        for mode in [ScaleMode::TwoLevel, ScaleMode::SingleLevel] {
            prop_assert_eq!(quantized(&x, mode), oracle(&x, mode));
        }
    }

    #[test]
    fn the_error_is_bounded_by_the_block(x in uneven_blocks()) {
        for mode in [ScaleMode::TwoLevel, ScaleMode::SingleLevel] {
            let packed = quantized(&x, mode);
            for (x, back) in x.chunks(16).zip(dequantized(&packed).chunks(16)) {
                // Codes are at most two steps apart, so an element is off by a step. A normal scale is off by 1/16; a
                // subnormal one, or one flushed to zero, by 2^-10 of the global, which the largest code multiplies by 6.
                // What saturates a single level is off by what is above 2688.
                let amax = amax(x);
                let bound = amax / 6.0 * (17.0 / 16.0) + 6.0 / 1024.0 * packed.2 + (amax - 2688.0 * packed.2).max(0.0);
                for (x, back) in x.iter().zip(back) {
                    prop_assert!((x - back).abs() <= bound * 1.00001, "{} -> {}, bound {}", x, back, bound);
                }
            }
        }
    }

    #[test]
    fn no_lengths_panic(
        x in prop::collection::vec(prop_oneof![9 => -1f32..1.0, 1 => any::<f32>()], 0..70),
        codes in 0usize..40,
        scales in 0usize..6,
        right in any::<bool>(),
    ) {
        let k = if right { x.len() / 16 * 16 } else { x.len() };
        let x = &x[..k];
        let (codes, scales) = if right { (k / 2, k / 16) } else { (codes, scales) };
        let fits = k.is_multiple_of(16) && codes == k / 2 && scales == k / 16;
        let finite = x.iter().all(|x| x.is_finite());
        let (mut codes, mut scales) = (vec![1; codes], vec![1; scales]);

        let global = quantize_row(x, ScaleMode::TwoLevel, &mut codes, &mut scales);
        prop_assert_eq!(global.is_nan(), !fits || !finite);
        let mut out = vec![0.0; k];
        dequantize_row(&codes, &scales, 1.0, &mut out);
        prop_assert_eq!(out.iter().any(|value| value.is_nan()), !fits && k > 0);

        for (n, k) in [(1, k), (2, k / 2), (k / 16, 16), (k, 0)] {
            let whole = k.is_multiple_of(16);
            let weight = Nvfp4Tensor::quantize_weight(x, n, k, ScaleMode::TwoLevel);
            prop_assert_eq!(weight.is_ok(), whole && n * k == x.len() && finite);
            let adopted = Nvfp4Tensor::from_modelopt(codes.clone(), scales.clone(), n, k, 1.0);
            prop_assert_eq!(adopted.is_ok(), whole && codes.len() == n * k / 2 && scales.len() == n * k / 16);
        }
    }
}

#[test]
fn a_tensor_is_its_rows_under_its_global() {
    let (n, k) = (3, 48);
    let w: Vec<f32> = (0..n * k).map(|i| ((i * 37 % 101) as f32 - 50.0) * 1e-3).collect();
    let whole = Nvfp4Tensor::quantize_weight(&w, n, k, ScaleMode::TwoLevel).unwrap();
    assert_eq!(whole.global(), ScaleMode::TwoLevel.global(0.05));
    for (row, w) in w.chunks(k).enumerate() {
        let (mut codes, mut scales) = (vec![9; k / 2], vec![9; k / 16]);
        quantize_row_under(w, whole.global(), &mut codes, &mut scales);
        assert_eq!(codes, whole.codes()[row * k / 2..(row + 1) * k / 2]);
        assert_eq!(scales, whole.scales()[row * k / 16..(row + 1) * k / 16]);
    }
    let (mut codes, mut scales) = (vec![9; 8], vec![9; 2]);
    quantize_row_under(&w[..16], 1.0, &mut codes, &mut scales);
    assert!(codes.iter().chain(&scales).all(|&byte| byte == 0), "lengths that do not match");
}
