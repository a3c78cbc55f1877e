//! Which experts serve a row, and with what weights.

use crate::math::softmax;

/// The `top_k` most probable experts of a row, by falling probability and, where equal, rising id; their weights sum to 1.
///
/// Probabilities are over all experts, weights over the chosen ones. Not-a-number logits choose experts 0, 1, ... and
/// give not-a-number weights.
pub(crate) fn route(mut logits: Vec<f32>, top_k: usize) -> Vec<(usize, f32)> {
    softmax(&mut logits);
    let mut experts: Vec<(usize, f32)> = logits.into_iter().enumerate().collect();
    // A stable sort: equal probabilities keep the order of their ids.
    experts.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    experts.truncate(top_k);
    let sum: f32 = experts.iter().map(|(_, probability)| probability).sum();
    experts.iter_mut().for_each(|(_, weight)| *weight /= sum);
    experts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_probable_experts_share_a_weight_of_one() {
        let ln = |x: f32| x.ln();
        let chosen = route(vec![ln(1.0), ln(4.0), ln(2.0), ln(3.0)], 2);
        assert_eq!(chosen.iter().map(|(expert, _)| *expert).collect::<Vec<_>>(), [1, 3]);
        assert!(
            (chosen[0].1 - 4.0 / 7.0).abs() < 1e-6 && (chosen[1].1 - 3.0 / 7.0).abs() < 1e-6,
            "{chosen:?}"
        );
    }

    #[test]
    fn ties_go_to_the_lowest_id() {
        let chosen = route(vec![0.0, 1.0, 0.0, 1.0, 1.0, 0.0], 4);
        assert_eq!(chosen.iter().map(|(expert, _)| *expert).collect::<Vec<_>>(), [1, 3, 4, 0]);
    }

    #[test]
    fn a_row_of_nan_stays_one() {
        let chosen = route(vec![f32::NAN; 3], 2);
        assert!(chosen.len() == 2 && chosen.iter().all(|(expert, weight)| *expert < 3 && weight.is_nan()));
    }
}
