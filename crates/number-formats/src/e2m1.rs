//! FP4 E2M1 of the Open Compute Project: one sign bit, 2 exponent bits (bias 1), 1 mantissa bit, in the low nibble of a byte.
//!
//! The magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, in the order of their codes. There is neither infinity nor NaN.

/// The largest magnitude.
pub const MAX: f32 = 6.0;

/// The value of each code.
pub const DECODE: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The value of the code in the low nibble; exact. The high nibble is ignored.
#[inline]
pub fn decode(code: u8) -> f32 {
    DECODE[usize::from(code & 0xf)]
}

/// The code nearest to `x`, ties to the even code, saturating: what `cvt.rn.satfinite.e2m1x2.f32` gives.
///
/// - Magnitudes above 6, infinity among them, become 6 with the sign of `x`.
/// - The sign is kept throughout: -0 and negative numbers that round to zero give 8, negative zero.
/// - NaN of either sign gives 7, the code of 6, for want of a better one. Callers that may meet NaN look for it first.
#[inline]
pub fn encode_saturating(x: f32) -> u8 {
    if x.is_nan() {
        return 7;
    }
    let magnitude = x.abs();
    // The midpoints. One stays below when the code below it is even, so those and only those are strict.
    let code = u8::from(magnitude > 0.25)
        + u8::from(magnitude >= 0.75)
        + u8::from(magnitude > 1.25)
        + u8::from(magnitude >= 1.75)
        + u8::from(magnitude > 2.5)
        + u8::from(magnitude >= 3.5)
        + u8::from(magnitude > 5.0);
    code | if x.is_sign_negative() { 8 } else { 0 }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::oracle::{E2M1_MAGNITUDES, nearest};

    #[test]
    fn every_code_decodes_to_the_value_of_its_definition() {
        for code in 0u8..8 {
            let (exponent, mantissa) = (i32::from(code / 2), f64::from(code % 2));
            let magnitude =
                if exponent == 0 { mantissa / 2.0 } else { (1.0 + mantissa / 2.0) * 2f64.powi(exponent - 1) };
            assert_eq!(f64::from(decode(code)), magnitude);
            assert_eq!(f64::from(decode(code | 8)), -magnitude);
            assert_eq!(E2M1_MAGNITUDES[usize::from(code)], magnitude);
        }
        assert!(decode(8).is_sign_negative());
        assert_eq!(decode(0xf5), 3.0, "the high nibble is ignored");
    }

    #[test]
    fn every_value_encodes_to_its_own_code() {
        for code in 0..16 {
            assert_eq!(encode_saturating(decode(code)), code);
        }
    }

    #[test]
    fn midpoints_go_to_even_and_their_neighbours_to_their_own_side() {
        for (below, pair) in (0u8..).zip(E2M1_MAGNITUDES.windows(2)) {
            let midpoint = ((pair[0] + pair[1]) / 2.0) as f32;
            let even = below + below % 2;
            for (x, code) in
                [(midpoint.next_down(), below), (midpoint, even), (midpoint.next_up(), below + 1)]
            {
                assert_eq!(encode_saturating(x), code, "{x}");
                assert_eq!(encode_saturating(-x), code | 8, "-{x}");
            }
        }
    }

    #[test]
    fn every_bf16_and_f16_number_goes_to_the_nearest_value() {
        for bits in 0..=u16::MAX {
            for x in [bf16::from_bits(bits).to_f32(), f16::from_bits(bits).to_f32()] {
                if x.is_nan() {
                    continue;
                }
                let sign = if x.is_sign_negative() { 8 } else { 0 };
                let expected = nearest(&E2M1_MAGNITUDES, f64::from(x.abs())) as u8 | sign;
                assert_eq!(encode_saturating(x), expected, "{x:e}");
            }
        }
    }

    #[test]
    fn large_numbers_saturate_and_nan_is_six() {
        for x in [6.0, 6.0f32.next_up(), 7.0, 8.0, f32::MAX, f32::INFINITY] {
            assert_eq!((encode_saturating(x), encode_saturating(-x)), (7, 15), "{x}");
        }
        assert_eq!((encode_saturating(f32::NAN), encode_saturating(-f32::NAN)), (7, 7));
    }
}
