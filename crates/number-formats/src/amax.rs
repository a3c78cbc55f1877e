//! The largest magnitude of a slice.

/// `max |x|`; 0 for an empty slice, infinite or NaN if an element is.
///
/// The bit patterns of magnitudes are ordered as the magnitudes are, with NaN above infinity, so an integer maximum
/// loses no NaN (a floating-point one would) and does not depend on the order of the elements.
pub(crate) fn amax(x: &[f32]) -> f32 {
    f32::from_bits(x.iter().fold(0, |amax, x| amax.max(x.abs().to_bits())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_finite_elements_are_never_lost() {
        assert_eq!(amax(&[]), 0.0);
        assert_eq!(amax(&[1.0, -3.5, 2.0]), 3.5);
        assert_eq!(amax(&[1.0, f32::NEG_INFINITY, 2.0]), f32::INFINITY);
        for place in 0..3 {
            let mut x = [f32::INFINITY, 1.0, f32::MAX];
            x[place] = -f32::NAN;
            assert!(amax(&x).is_nan());
        }
    }
}
