//! FP8 weights with one scale per 128x128 block, as FP8 checkpoints store them.
//!
//! A weight `[N, K]` is E4M3 codes row-major `[N, K]` and `scale_inv` row-major `[ceil(N / 128), ceil(K / 128)]`; blocks at
//! the right and lower edges are partial. Despite its name `scale_inv` multiplies: the value is
//! `e4m3(code[n, k]) * scale_inv[n / 128, k / 128]`, one FP32 product. Scales stored as BF16 are widened by the caller,
//! which is exact. NaN codes and non-finite scales propagate into the values, for a bind to find and refuse.

use half::bf16;

use crate::FormatError;
use crate::e4m3;

/// Rows and columns of a block.
pub const BLOCK: usize = 128;

/// Writes the FP32 values of `codes` `[n, k]` to `out` `[n, k]`.
///
/// # Errors
///
/// [`FormatError::Length`] naming the slice that does not fit the shape, [`FormatError::TooLarge`].
pub fn dequantize(
    codes: &[u8],
    scale_inv: &[f32],
    n: usize,
    k: usize,
    out: &mut [f32],
) -> Result<(), FormatError> {
    FormatError::check_length("values", FormatError::elements(n, k)?, out.len())?;
    dequantize_with(codes, scale_inv, n, k, out, |value| value)
}

/// The values of `codes` `[n, k]`, each the FP32 product rounded once to BF16, as a checkpoint loader rounds it.
///
/// # Errors
///
/// As [`dequantize`].
pub fn dequantize_bf16(
    codes: &[u8],
    scale_inv: &[f32],
    n: usize,
    k: usize,
) -> Result<Vec<bf16>, FormatError> {
    // Checked before it is allocated: a wrong shape is an error, not an allocation of its size.
    FormatError::check_length("codes", FormatError::elements(n, k)?, codes.len())?;
    let mut out = vec![bf16::ZERO; codes.len()];
    dequantize_with(codes, scale_inv, n, k, &mut out, bf16::from_f32)?;
    Ok(out)
}

/// Writes one row of K codes, with the `ceil(K / 128)` scales of its blocks, as FP32 numbers that hold what
/// [`dequantize_bf16`] gives, so that a tensor need not be held twice.
///
/// If the slices do not match, all of `out` is NaN.
pub fn dequantize_row_bf16(codes: &[u8], scale_inv: &[f32], out: &mut [f32]) {
    if out.len() != codes.len() || scale_inv.len() != codes.len().div_ceil(BLOCK) {
        out.fill(f32::NAN);
        return;
    }
    for ((codes, out), scale) in codes.chunks(BLOCK).zip(out.chunks_mut(BLOCK)).zip(scale_inv) {
        for (code, out) in codes.iter().zip(out) {
            *out = bf16::from_f32(e4m3::decode(*code) * scale).to_f32();
        }
    }
}

/// Checks the inputs and writes every value as `round` gives it; `out` has `n * k` elements.
fn dequantize_with<T>(
    codes: &[u8],
    scale_inv: &[f32],
    n: usize,
    k: usize,
    out: &mut [T],
    round: impl Fn(f32) -> T,
) -> Result<(), FormatError> {
    let elements = FormatError::elements(n, k)?;
    let blocks_per_row = k.div_ceil(BLOCK);
    FormatError::check_length("codes", elements, codes.len())?;
    FormatError::check_length(
        "scale_inv",
        FormatError::elements(n.div_ceil(BLOCK), blocks_per_row)?,
        scale_inv.len(),
    )?;
    if elements == 0 {
        return Ok(());
    }
    let rows = codes.chunks(k).zip(out.chunks_mut(k));
    // Each row of scales serves 128 rows of codes.
    let scales = scale_inv.chunks(blocks_per_row).flat_map(|scales| std::iter::repeat_n(scales, BLOCK));
    for ((codes, out), scales) in rows.zip(scales) {
        for ((codes, out), scale) in codes.chunks(BLOCK).zip(out.chunks_mut(BLOCK)).zip(scales) {
            for (code, out) in codes.iter().zip(out) {
                *out = round(e4m3::decode(*code) * scale);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Codes that repeat with no period of a block's, and scales that are all different.
    fn tensor(n: usize, k: usize) -> (Vec<u8>, Vec<f32>) {
        let codes = (0..n * k).map(|i| (i * 7 % 251) as u8).map(|code| if code == 0x7f { 0 } else { code });
        let scales = (0..n.div_ceil(128) * k.div_ceil(128)).map(|i| 0.37 + i as f32);
        (codes.collect(), scales.collect())
    }

    #[test]
    fn every_element_takes_the_scale_of_its_block() {
        for (n, k) in [(1, 1), (128, 128), (129, 127), (127, 129), (256, 384), (300, 200), (2, 1000)] {
            let (codes, scales) = tensor(n, k);
            let mut values = vec![f32::NAN; n * k];
            dequantize(&codes, &scales, n, k, &mut values).unwrap();
            let rounded = dequantize_bf16(&codes, &scales, n, k).unwrap();
            for row in 0..n {
                for column in 0..k {
                    let i = row * k + column;
                    let scale = scales[row / 128 * k.div_ceil(128) + column / 128];
                    // FP64 holds the product, so rounding it to FP32 is the one rounding.
                    let value = (f64::from(e4m3::DECODE[usize::from(codes[i])]) * f64::from(scale)) as f32;
                    assert_eq!(values[i].to_bits(), value.to_bits(), "[{row}, {column}] of [{n}, {k}]");
                    assert_eq!(rounded[i], bf16::from_f32(value));
                }
            }
        }
    }

    #[test]
    fn a_row_is_that_of_the_whole() {
        for (n, k) in [(1, 1), (129, 127), (127, 129), (300, 200)] {
            let (codes, scales) = tensor(n, k);
            let whole = dequantize_bf16(&codes, &scales, n, k).unwrap();
            let mut row = vec![f32::NAN; k];
            for (index, (codes, whole)) in codes.chunks(k).zip(whole.chunks(k)).enumerate() {
                let first = index / 128 * k.div_ceil(128);
                dequantize_row_bf16(codes, &scales[first..first + k.div_ceil(128)], &mut row);
                assert!(row.iter().zip(whole).all(|(row, whole)| *row == whole.to_f32()), "row {index}");
            }
        }
        let mut row = [0.0; 2];
        dequantize_row_bf16(&[0x38], &[1.0], &mut row);
        assert!(row.iter().all(|value| value.is_nan()), "lengths that do not match");
    }

    #[test]
    fn golden_values() {
        // 1.0, -448, 2^-9 and -0 times 0.5; 1.125 times 1.0078125, a BF16 number, is 1.1337890625.
        let mut values = [0.0; 4];
        dequantize(&[0x38, 0xfe, 0x01, 0x80], &[0.5], 2, 2, &mut values).unwrap();
        assert_eq!(values.map(f32::to_bits), [0.5f32, -224.0, 0.0009765625, -0.0].map(f32::to_bits));
        // BF16 steps by 2^-7 here: 1.1328125 and 1.140625 are its neighbours.
        assert_eq!(dequantize_bf16(&[0x39], &[1.0078125], 1, 1).unwrap(), [bf16::from_f32(1.1328125)]);
    }

    #[test]
    fn non_finite_parts_propagate() {
        let mut values = [0.0; 3];
        dequantize(&[0x7f, 0x38, 0xff], &[2.0], 1, 3, &mut values).unwrap();
        assert!(values[0].is_nan() && values[1] == 2.0 && values[2].is_nan());
        dequantize(&[0x00, 0x38, 0x38], &[f32::NAN], 1, 3, &mut values).unwrap();
        assert!(values.iter().all(|value| value.is_nan()));
    }

    #[test]
    fn wrong_lengths_are_named() {
        let (codes, scales) = tensor(129, 4);
        let mut out = vec![0.0; 129 * 4];
        let error = dequantize(&codes[1..], &scales, 129, 4, &mut out).unwrap_err();
        assert_eq!(error.to_string(), "codes: 515 elements, the shape asks for 516");
        let error = dequantize(&codes, &scales[1..], 129, 4, &mut out).unwrap_err();
        assert_eq!(error, FormatError::Length { what: "scale_inv", expected: 2, got: 1 });
        let error = dequantize(&codes, &scales, 129, 4, &mut out[1..]).unwrap_err();
        assert_eq!(error, FormatError::Length { what: "values", expected: 516, got: 515 });
        let error = dequantize_bf16(&codes, &scales, usize::MAX, 2).unwrap_err();
        assert_eq!(error, FormatError::TooLarge { n: usize::MAX, k: 2 });
    }

    #[test]
    fn empty_tensors_are_whole() {
        assert_eq!(dequantize_bf16(&[], &[], 0, 0), Ok(vec![]));
        assert_eq!(dequantize_bf16(&[], &[], 0, usize::MAX), Ok(vec![]));
        assert_eq!(dequantize_bf16(&[], &[], 5, 0), Ok(vec![]));
    }

    proptest! {
        #[test]
        fn no_lengths_panic(
            n in 0usize..300,
            k in 0usize..4,
            codes in 0usize..900,
            scales in 0usize..4,
            right in any::<[bool; 3]>(),
        ) {
            // Each slice is right half of the time.
            let or_right = |right, length, any| if right { length } else { any };
            let (elements, blocks) = (n * k, n.div_ceil(128) * k.div_ceil(128));
            let out = or_right(right[0], elements, codes / 2);
            let codes = or_right(right[1], elements, codes);
            let scales = or_right(right[2], blocks, scales);
            let mut out = vec![0.0; out];
            let fits = codes == elements && out.len() == elements && scales == blocks;
            let result = dequantize(&vec![0x38; codes], &vec![1.0; scales], n, k, &mut out);
            prop_assert_eq!(result.is_ok(), fits);
        }
    }
}
