//! The greedy choice.

use structure_core::Refusal;

/// The token with the largest logit, the lowest id where several have it.
///
/// # Errors
/// [`Refusal::NonFinite`] when a logit is NaN: no choice among the others is right.
pub fn argmax(logits: &[f32]) -> Result<u32, Refusal> {
    let (mut best, mut token) = (f32::NEG_INFINITY, 0);
    for (index, &value) in logits.iter().enumerate() {
        if value.is_nan() {
            return Err(Refusal::NonFinite { what: "logits".to_string(), index, value });
        }
        if value > best {
            (best, token) = (value, index as u32);
        }
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lowest_id_and_nan_is_refused() {
        assert_eq!(argmax(&[1.0, 3.0, -2.0, 3.0]), Ok(1));
        assert_eq!(argmax(&[f32::NEG_INFINITY; 3]), Ok(0));
        let refusal = argmax(&[1.0, f32::NAN, 2.0]).unwrap_err();
        assert!(matches!(refusal, Refusal::NonFinite { index: 1, .. }), "{refusal}");
    }
}
