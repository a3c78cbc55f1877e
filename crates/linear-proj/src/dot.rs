/// How many partial sums a dot product keeps: enough for the compiler to fill vector registers.
const LANES: usize = 16;

/// The dot product of two slices of the same length in FP32, always in the same order: product k goes to partial sum
/// k mod 16, and the partial sums are added pairwise, halves first.
///
/// What a CPU arm's row-invariance rests on. Elements past the shorter slice's end are left out.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += a * b;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_product_is_counted_once_at_every_length() {
        for len in 0..100 {
            let a: Vec<f32> = (0..len).map(|k| (k + 1) as f32).collect();
            let expected = (0..len).map(|k| (k + 1) * (k + 1)).sum::<usize>();
            assert_eq!(dot(&a, &a), expected as f32, "length {len}");
        }
    }
}
