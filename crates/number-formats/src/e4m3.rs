//! FP8 E4M3 of the Open Compute Project: one sign bit, 4 exponent bits (bias 7), 3 mantissa bits.
//!
//! There are no infinities. `S.1111.111` is NaN, the largest magnitude is 448 (code 0x7e), the smallest normal is 2^-6, and
//! subnormals step by 2^-9. UE4M3, the block scale of [`nvfp4`](crate::nvfp4), is the same code with a sign bit of zero.

/// The largest magnitude.
pub const MAX: f32 = 448.0;

/// The code of [`MAX`].
const MAX_CODE: u8 = 0x7e;
/// The magnitude bits of NaN.
const NAN_CODE: u8 = 0x7f;
/// Below this an E4M3 number is subnormal.
const MIN_NORMAL: f32 = 0.015625;
/// Subnormals are multiples of its inverse, 2^-9.
const SUBNORMALS_PER_UNIT: f32 = 512.0;
/// FP32 has 20 mantissa bits more.
const DROPPED_BITS: u32 = 20;
/// The difference of the exponent biases, where the exponent stands in an E4M3 code.
const REBIAS: u32 = (127 - 7) << 3;

/// The value of each code.
pub const DECODE: [f32; 256] = decode_table();

/// The value of a code; exact. The codes 0x7f and 0xff are NaN.
#[inline]
pub fn decode(code: u8) -> f32 {
    DECODE[usize::from(code)]
}

/// The code nearest to `x`, ties to even, saturating.
///
/// - Magnitudes above 448, infinity among them, become 448 with the sign of `x`: no finite number becomes NaN.
/// - The sign is kept throughout: -0 and negative numbers that round to zero give 0x80.
/// - NaN gives `0x7f | sign`.
#[inline]
pub fn encode_saturating(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    sign | encode_magnitude(x.abs())
}

/// The UE4M3 code nearest to `x`, ties to even, saturating: [`encode_saturating`], with negative numbers giving 0.
///
/// NaN of either sign gives 0x7f.
#[inline]
pub fn encode_unsigned_saturating(x: f32) -> u8 {
    if x < 0.0 { 0 } else { encode_magnitude(x.abs()) }
}

/// The code of a number without a sign.
#[inline]
fn encode_magnitude(x: f32) -> u8 {
    if x.is_nan() {
        NAN_CODE
    } else if x >= MAX {
        MAX_CODE
    } else if x < MIN_NORMAL {
        // Exact, as the factor is a power of two; 8, if it comes to that, is the code of the smallest normal.
        (x * SUBNORMALS_PER_UNIT).round_ties_even() as u8
    } else {
        // Adding just under half of the last kept bit, plus that bit, carries exactly when rounding goes up. A carry out
        // of the mantissa raises the exponent, as it should.
        let bits = x.to_bits();
        let last_kept = (bits >> DROPPED_BITS) & 1;
        let rounded = (bits + ((1 << (DROPPED_BITS - 1)) - 1) + last_kept) >> DROPPED_BITS;
        (rounded - REBIAS) as u8
    }
}

const fn decode_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = value_of(code as u32);
        code += 1;
    }
    table
}

const fn value_of(code: u32) -> f32 {
    let magnitude = code & 0x7f;
    let value = if magnitude == NAN_CODE as u32 {
        f32::NAN
    } else if magnitude < 8 {
        magnitude as f32 / SUBNORMALS_PER_UNIT
    } else {
        f32::from_bits((magnitude + REBIAS) << DROPPED_BITS)
    };
    if code < 0x80 { value } else { -value }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::oracle::{e4m3_magnitudes, nearest};

    #[test]
    fn every_code_decodes_to_the_value_of_its_definition() {
        for (code, &magnitude) in (0u8..).zip(&e4m3_magnitudes()) {
            assert_eq!(f64::from(decode(code)), magnitude, "{code:#04x}");
            assert_eq!(f64::from(decode(code | 0x80)), -magnitude, "{:#04x}", code | 0x80);
        }
        assert!(decode(0x80).is_sign_negative());
        assert!(decode(0x7f).is_nan() && decode(0xff).is_nan());
        assert_eq!(decode(0x7e), 448.0);
        assert_eq!(decode(0x38), 1.0);
        assert_eq!(decode(0x01), 0.001953125);
    }

    #[test]
    fn every_value_encodes_to_its_own_code() {
        for code in (0..=0xff).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(encode_saturating(decode(code)), code);
            assert_eq!(encode_unsigned_saturating(decode(code)), if code < 0x80 { code } else { 0 });
        }
    }

    #[test]
    fn midpoints_go_to_even_and_their_neighbours_to_their_own_side() {
        for (below, pair) in (0u8..).zip(e4m3_magnitudes().windows(2)) {
            let midpoint = ((pair[0] + pair[1]) / 2.0) as f32;
            assert_eq!(f64::from(midpoint), (pair[0] + pair[1]) / 2.0, "a midpoint is an FP32 number");
            let even = below + below % 2;
            for (x, code) in
                [(midpoint.next_down(), below), (midpoint, even), (midpoint.next_up(), below + 1)]
            {
                assert_eq!(encode_saturating(x), code, "{x:e}");
                assert_eq!(encode_saturating(-x), code | 0x80, "-{x:e}");
                assert_eq!(encode_unsigned_saturating(x), code, "{x:e}");
            }
        }
    }

    #[test]
    fn every_bf16_and_f16_number_goes_to_the_nearest_value() {
        let magnitudes = e4m3_magnitudes();
        for bits in 0..=u16::MAX {
            for x in [bf16::from_bits(bits).to_f32(), f16::from_bits(bits).to_f32()] {
                if x.is_nan() {
                    continue;
                }
                let sign = if x.is_sign_negative() { 0x80 } else { 0 };
                let expected = nearest(&magnitudes, f64::from(x.abs())) as u8 | sign;
                assert_eq!(encode_saturating(x), expected, "{x:e}");
            }
        }
    }

    #[test]
    fn large_numbers_saturate() {
        for x in [448.0, 448.0f32.next_up(), 464.0, 480.0, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!(encode_saturating(x), 0x7e, "{x}");
            assert_eq!(encode_saturating(-x), 0xfe, "-{x}");
            assert_eq!(encode_unsigned_saturating(x), 0x7e, "{x}");
            assert_eq!(encode_unsigned_saturating(-x), 0, "-{x}");
        }
    }

    #[test]
    fn nan_stays_nan_and_zero_keeps_its_sign() {
        let nan = f32::NAN.copysign(1.0);
        assert_eq!((encode_saturating(nan), encode_saturating(-nan)), (0x7f, 0xff));
        assert_eq!((encode_unsigned_saturating(nan), encode_unsigned_saturating(-nan)), (0x7f, 0x7f));
        let smallest = f32::from_bits(1);
        for (x, code) in [(0.0, 0), (-0.0, 0x80), (smallest, 0), (-smallest, 0x80)] {
            assert_eq!(encode_saturating(x), code);
            assert_eq!(encode_unsigned_saturating(x), 0);
        }
    }
}
