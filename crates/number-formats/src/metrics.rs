//! How far an approximation is from its reference.

/// The least denominator, so that an all-zero reference gives a number.
const FLOOR: f64 = 1e-12;

/// `||approx - reference|| / max(||reference||, 1e-12)` in the Euclidean norm, accumulated in FP64 pair by pair.
///
/// Differences are taken in FP64, where those of FP32 numbers near each other are exact. A tensor too large to hold twice
/// is pushed slab by slab, and the parts of one split among threads are [merged](RelativeL2::merge).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RelativeL2 {
    error: f64,
    reference: f64,
}

impl RelativeL2 {
    /// Nothing seen yet; its [`value`](RelativeL2::value) is 0.
    pub fn new() -> Self {
        RelativeL2::default()
    }

    /// Adds one pair.
    #[inline]
    pub fn push(&mut self, reference: f32, approx: f32) {
        let reference = f64::from(reference);
        let error = f64::from(approx) - reference;
        self.error += error * error;
        self.reference += reference * reference;
    }

    /// The pairs of both. FP64 addition rounds: merge in a fixed order for a reproducible value.
    pub fn merge(self, other: Self) -> Self {
        RelativeL2 { error: self.error + other.error, reference: self.reference + other.reference }
    }

    /// The relative distance of the pairs so far. NaN if a pair held a NaN or its reference an infinity.
    pub fn value(&self) -> f64 {
        self.error.sqrt() / self.reference.sqrt().max(FLOOR)
    }
}

/// The [`RelativeL2`] of two sequences. NaN if one is longer than the other.
pub fn relative_l2(reference: impl IntoIterator<Item = f32>, approx: impl IntoIterator<Item = f32>) -> f64 {
    let (mut reference, mut approx) = (reference.into_iter(), approx.into_iter());
    let mut distance = RelativeL2::new();
    loop {
        match (reference.next(), approx.next()) {
            (Some(reference), Some(approx)) => distance.push(reference, approx),
            (None, None) => return distance.value(),
            _ => return f64::NAN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_computed_by_hand() {
        assert_eq!(relative_l2([3.0, 4.0], [3.0, 4.0]), 0.0);
        assert_eq!(relative_l2([3.0, 4.0], [0.0, 0.0]), 1.0);
        assert_eq!(relative_l2([0.0, 8.0], [3.0, 12.0]), 5.0 / 8.0);
        assert_eq!(relative_l2([], []), 0.0);
    }

    #[test]
    fn a_zero_reference_divides_by_the_floor() {
        assert_eq!(relative_l2([0.0, 0.0], [0.0, 0.0]), 0.0);
        assert_eq!(relative_l2([0.0], [1.0]), 1.0 / 1e-12);
    }

    #[test]
    fn what_cannot_be_compared_is_nan() {
        assert!(relative_l2([1.0], []).is_nan());
        assert!(relative_l2([], [1.0]).is_nan());
        assert!(relative_l2([f32::NAN], [1.0]).is_nan());
        assert!(relative_l2([1.0], [f32::NAN]).is_nan());
        assert!(relative_l2([f32::INFINITY], [1.0]).is_nan());
    }

    #[test]
    fn squares_outside_the_range_of_fp32_are_kept() {
        assert_eq!(relative_l2([1e-30], [0.0]), 1e-30f32 as f64 / 1e-12);
        assert!((relative_l2([1e30], [2e30]) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn merged_parts_are_the_whole() {
        // Integers, so that every sum is exact.
        let pairs = [(1.0, 2.0), (5.0, 3.0), (-7.0, -7.0), (4.0, 0.0)];
        let of = |pairs: &[(f32, f32)]| {
            let mut distance = RelativeL2::new();
            pairs.iter().for_each(|&(reference, approx)| distance.push(reference, approx));
            distance
        };
        for split in 0..=4 {
            assert_eq!(of(&pairs[..split]).merge(of(&pairs[split..])), of(&pairs));
        }
    }
}
