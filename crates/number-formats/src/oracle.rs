//! Rounding by search, for tests: slow, obvious, and nothing like the code under test.

/// The index of the value nearest to `x`; of two at the same distance, the one with the even index. `values` ascend, and what
/// is above the last is the last: far above, FP64 could not tell the distances apart.
pub(crate) fn nearest(values: &[f64], x: f64) -> usize {
    if x >= values[values.len() - 1] {
        return values.len() - 1;
    }
    let distance = |i: usize| (values[i] - x).abs();
    let mut best = 0;
    for i in 1..values.len() {
        if distance(i) < distance(best) || (distance(i) == distance(best) && i % 2 == 0) {
            best = i;
        }
    }
    best
}

/// The 127 finite magnitudes of E4M3, by the formula of its definition.
pub(crate) fn e4m3_magnitudes() -> Vec<f64> {
    (0..127).map(e4m3_magnitude).collect()
}

fn e4m3_magnitude(code: u32) -> f64 {
    let (exponent, mantissa) = (code / 8, f64::from(code % 8));
    if exponent == 0 {
        mantissa * 2f64.powi(-9)
    } else {
        (1.0 + mantissa / 8.0) * 2f64.powi(exponent as i32 - 7)
    }
}

/// The 8 magnitudes of E2M1.
pub(crate) const E2M1_MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
