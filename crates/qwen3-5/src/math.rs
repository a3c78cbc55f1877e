//! Scalar functions, all in FP32.

/// `1 / (1 + e^-x)`.
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`.
pub(crate) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `ln(1 + e^x)`, which is `x` to FP32's precision from 20 on.
pub(crate) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Turns scores into weights that sum to 1, with the largest score subtracted first.
pub(crate) fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - max).exp();
        sum += *score;
    }
    for score in scores.iter_mut() {
        *score /= sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_functions_hold_at_both_ends() {
        assert_eq!((sigmoid(0.0), sigmoid(200.0), sigmoid(-200.0)), (0.5, 1.0, 0.0));
        assert_eq!((silu(0.0), silu(200.0)), (0.0, 200.0));
        assert_eq!((softplus(21.0), softplus(200.0), softplus(-200.0)), (21.0, 200.0, 0.0));
        assert!((softplus(0.0) - std::f32::consts::LN_2).abs() < 1e-7);
        assert!((softplus(1.0) - 1.313_261_7).abs() < 1e-6, "ln(1 + e)");
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let mut scores = [1000.0, 1000.0, -1000.0, 1000.0 + std::f32::consts::LN_2];
        softmax(&mut scores);
        for (weight, expected) in scores.iter().zip([0.25, 0.25, 0.0, 0.5]) {
            assert!((weight - expected).abs() < 1e-4, "{scores:?}");
        }
    }
}
