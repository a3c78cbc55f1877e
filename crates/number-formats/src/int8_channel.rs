//! INT8 with one FP32 scale per output channel, the weights of W8A16.
//!
//! For the row n of a weight `[N, K]`, in FP32 with two IEEE divisions:
//!
//! ```text
//! s[n]    = max(max_k |w[n, k]| / 127, 1e-12)
//! q[n, k] = clamp(round_half_even(w[n, k] / s[n]), -127, 127)
//! w[n, k] ~ q[n, k] * s[n]
//! ```
//!
//! -128 is never written, so that the codes are symmetric. `127 * s[n]` may round to a unit in the last place above the
//! row's largest magnitude; for BF16 and FP16 sources that is finite, for an FP32 source at the very end of its range it is
//! not. The functions work on a row and never fail: what has no right
//! answer, a row with a NaN or slices that do not match, gives NaN and nothing that looks like a weight.

use crate::amax::amax;

/// The largest code.
pub const MAX_CODE: i8 = 127;
/// The smallest scale, which keeps the division of an all-zero row finite.
pub const MIN_SCALE: f32 = 1e-12;

/// Writes the codes of the row `w` (K elements each) and returns its scale.
///
/// If `w` holds an infinity or a NaN, or `codes` is not as long as `w`, the codes are zero and the scale is NaN.
pub fn quantize_row(w: &[f32], codes: &mut [i8]) -> f32 {
    let amax = amax(w);
    if !amax.is_finite() || codes.len() != w.len() {
        codes.fill(0);
        return f32::NAN;
    }
    let max = f32::from(MAX_CODE);
    let scale = (amax / max).max(MIN_SCALE);
    for (code, w) in codes.iter_mut().zip(w) {
        *code = (w / scale).round_ties_even().clamp(-max, max) as i8;
    }
    scale
}

/// Writes `code * scale` to `out` (K elements each), one FP32 product an element.
///
/// If `out` is not as long as `codes`, all of it is NaN.
pub fn dequantize_row(codes: &[i8], scale: f32, out: &mut [f32]) {
    if out.len() != codes.len() {
        out.fill(f32::NAN);
        return;
    }
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = f32::from(code) * scale;
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;

    fn quantized(w: &[f32]) -> (Vec<i8>, f32) {
        let mut codes = vec![99; w.len()];
        let scale = quantize_row(w, &mut codes);
        (codes, scale)
    }

    #[test]
    fn ties_go_to_even() {
        // The scale is 1 exactly.
        let (codes, scale) =
            quantized(&[127.0, 0.5, 1.5, 2.5, 125.5, 126.5, -0.5, -1.5, -2.5, -126.5, -127.0]);
        assert_eq!(scale, 1.0);
        assert_eq!(codes, [127, 0, 2, 2, 126, 126, 0, -2, -2, -126, -127]);
    }

    #[test]
    fn neighbours_of_ties_go_to_their_own_side() {
        for below in 0i8..127 {
            let tie = f32::from(below) + 0.5;
            let even = below + below % 2;
            let (codes, scale) = quantized(&[127.0, tie.next_down(), tie, tie.next_up(), -tie]);
            assert_eq!((codes, scale), (vec![127, below, even, below + 1, -even], 1.0));
        }
    }

    #[test]
    fn both_divisions_are_divisions() {
        // 127 times a step of few bits and ties times it are FP32 numbers, so the quotients are ties exactly; products
        // with an inverse are not always.
        for step in (129..256).map(|step| step as f32 / 1024.0) {
            let row: Vec<f32> =
                (0..127).map(|below| (below as f32 + 0.5) * step).chain([127.0 * step]).collect();
            let even: Vec<i8> = (0..127).map(|below| below + below % 2).chain([127]).collect();
            let (codes, scale) = quantized(&row);
            assert_eq!((codes, scale), (even, step));
        }
        // An FP64 quotient of FP32 numbers rounds to their FP32 quotient.
        for amax in (0..1000).map(|i| 1.0 + i as f32 / 997.0) {
            assert_eq!(quantized(&[amax]), (vec![127], (f64::from(amax) / 127.0) as f32));
        }
    }

    #[test]
    fn zero_and_tiny_rows_use_the_least_scale() {
        assert_eq!(quantized(&[0.0, -0.0, 0.0]), (vec![0, 0, 0], 1e-12));
        assert_eq!(quantized(&[1e-12, -3e-12, 1e-30]), (vec![1, -3, 0], 1e-12));
        assert_eq!(quantized(&[]), (vec![], 1e-12));
    }

    #[test]
    fn the_largest_bf16_numbers_stay_finite() {
        let max = bf16::MAX.to_f32();
        let (codes, scale) = quantized(&[max, -max, max / 4.0]);
        assert_eq!(codes, [127, -127, 32]);
        let mut back = [0.0; 3];
        dequantize_row(&codes, scale, &mut back);
        assert!(back.iter().all(|back| back.is_finite()), "{back:?}");
    }

    #[test]
    fn a_row_with_no_right_answer_is_nan() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (codes, scale) = quantized(&[1.0, bad, 2.0]);
            assert_eq!(codes, [0, 0, 0]);
            let mut back = [0.0; 3];
            dequantize_row(&codes, scale, &mut back);
            assert!(back.iter().all(|back| back.is_nan()), "{bad}: {back:?}");
        }
        let mut codes = [9; 2];
        assert!(quantize_row(&[1.0, 2.0, 3.0], &mut codes).is_nan());
        assert_eq!(codes, [0, 0]);
        let mut back = [0.0; 3];
        dequantize_row(&[1, 2], 1.0, &mut back);
        assert!(back.iter().all(|back| back.is_nan()));
    }

    proptest! {
        #[test]
        fn the_error_is_at_most_half_a_step(
            w in prop::collection::vec(-1e3f32..1e3, 1..200),
            exponent in -20i32..20,
        ) {
            let w: Vec<f32> = w.iter().map(|w| w * 2f32.powi(exponent)).collect();
            let (codes, scale) = quantized(&w);
            prop_assert!(codes.iter().all(|&code| code >= -127));
            for (&w, &code) in w.iter().zip(&codes) {
                // In FP64, where the product is exact. The division's own rounding may tip a near tie.
                let error = (f64::from(code) * f64::from(scale) - f64::from(w)).abs();
                prop_assert!(error <= f64::from(scale) * 0.50001, "{} -> {} * {}", w, code, scale);
            }
        }

        #[test]
        fn no_lengths_panic(
            w in prop::collection::vec(any::<f32>(), 0..20),
            len in 0usize..20,
            out in 0usize..20,
        ) {
            let mut codes = vec![1; len];
            let scale = quantize_row(&w, &mut codes);
            prop_assert!(w.len() == len || scale.is_nan());
            let mut back = vec![0.0; out];
            dequantize_row(&codes, scale, &mut back);
            prop_assert!(len == out || back.iter().all(|back| back.is_nan()));
        }
    }
}
