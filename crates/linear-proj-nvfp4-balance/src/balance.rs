//! The balance of a seat's input channels, from the largest magnitude that each one had.

/// Magnitudes below count as this one, so that a channel that was never used has a balance too.
const FLOOR: f64 = 1e-6;
/// The least and the largest balance.
const CLAMP: (f64, f64) = (0.25, 4.0);

/// `s[k] = clamp((a[k] / mean(a))^(1/2), 1/4, 4)` with `a = max(amax, 1e-6)`, in FP64 and rounded to FP32 once.
///
/// Weights are multiplied by it and activations divided, so that channels with outliers take less of the range of the block that
/// they share, and their weights more. It depends on the activations alone: seats that read the same rows have the same.
///
/// ```
/// let s = linear_proj_nvfp4_balance::balance(&[1.0, 1.0, 2.0, 100.0]);
/// assert_eq!(s, [0.25, 0.25, (2.0f32 / 26.0).sqrt(), (100.0f32 / 26.0).sqrt()]);
/// ```
pub fn balance(amax: &[f32]) -> Vec<f32> {
    let a: Vec<f64> = amax.iter().map(|&amax| f64::from(amax).max(FLOOR)).collect();
    let mean = a.iter().sum::<f64>() / a.len() as f64;
    a.iter().map(|a| (a / mean).sqrt().clamp(CLAMP.0, CLAMP.1) as f32).collect()
}

/// What rows are multiplied by: `1 / s` in FP32.
pub(crate) fn inverse(balance: &[f32]) -> Vec<f32> {
    balance.iter().map(|s| 1.0 / s).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_are_those_of_the_formula() {
        // Mean 4, so the ratios are 1/4, 1, 7/4.
        let s = balance(&[1.0, 4.0, 7.0]);
        assert_eq!(s, [0.5, 1.0, 1.75f32.sqrt()]);
        assert_eq!(inverse(&s), [2.0, 1.0, 1.0 / 1.75f32.sqrt()]);
        assert_eq!(balance(&[3.5; 40]), [1.0; 40], "even channels need none");
        assert_eq!(balance(&[0.0; 16]), [1.0; 16], "nor do channels that were never used");
    }

    #[test]
    fn both_ends_are_clamped() {
        let mut amax = [1.0; 32];
        amax[3] = 1e30;
        let s = balance(&amax);
        assert_eq!((s[3], s[4]), (4.0, 0.25));
        // The mean of the largest FP32 numbers is within FP64's range.
        assert_eq!(balance(&[f32::MAX; 16]), [1.0; 16]);
    }
}
