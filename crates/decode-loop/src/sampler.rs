//! How a token is chosen from logits: the numbers that every loop gives, on every arm.
//!
//! All sums are of integers, so that their order does not matter, and the exponential is a polynomial whose every step is one IEEE
//! operation: a kernel that does the same draws the same tokens.

use std::f32::consts::LN_2;

use structure_core::Refusal;

use crate::philox::philox;

/// How the next token is chosen from FP32 logits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Sampler {
    /// The largest logit, the lowest id where several have it.
    #[default]
    Greedy,
    /// A draw from the softmax of `logits / temperature`, restricted first to the `top_k` largest logits, then to the fewest of the
    /// most probable tokens whose probabilities exceed `top_p`; equal logits at a cut stay or go together, and stay. The same seed
    /// draws the same token at the same position from the same logits.
    ///
    /// A token of less than `2^-32` of the probability of the most probable one is not drawn.
    Random {
        /// Above 0.
        temperature: f32,
        /// At least 1; none for all tokens.
        top_k: Option<usize>,
        /// Above 0, at most 1; 1 for all tokens.
        top_p: f32,
        /// What the draws are derived from, with the position.
        seed: u64,
    },
}

/// A [`Sampler::Random`] in the numbers that are computed with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// `log2(e) / temperature`.
    pub scale: f32,
    /// How many of the largest logits are kept; 0 for all.
    pub top_k: u32,
    /// Which part of their mass is kept, in units of `2^-64`; 0 for all.
    pub top_p: u64,
    /// The key of the random numbers.
    pub seed: u64,
}

impl Sampler {
    /// Checks the numbers of a sampler.
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`].
    pub fn check(&self) -> Result<(), Refusal> {
        self.draw().map(|_| ())
    }

    /// What a draw computes with; none for [`Sampler::Greedy`].
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`] for a number outside its bounds.
    pub fn draw(&self) -> Result<Option<Draw>, Refusal> {
        let Sampler::Random { temperature, top_k, top_p, seed } = *self else { return Ok(None) };
        let scale = (std::f64::consts::LOG2_E / f64::from(temperature)) as f32;
        // Colder than that, `scale` is infinite.
        if !(temperature > 0.0 && temperature.is_finite() && scale.is_finite() && scale > 0.0) {
            return Err(outside("temperature", temperature, "above 0 and within 1e-37..=1e37"));
        }
        if top_k == Some(0) {
            return Err(outside("top_k", 0, "at least 1"));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(outside("top_p", top_p, "above 0 and at most 1"));
        }
        let top_k = top_k.map_or(0, |k| u32::try_from(k).unwrap_or(0));
        let top_p = if top_p < 1.0 { ((f64::from(top_p) * 2f64.powi(64)) as u64).max(1) } else { 0 };
        Ok(Some(Draw { scale, top_k, top_p, seed }))
    }

    /// The token for a position, from its logits `[vocab]`.
    ///
    /// # Errors
    /// [`Refusal::NonFinite`] when a logit is NaN, as no choice among the others is right, or when the largest is infinite and a draw
    /// is asked for; [`Refusal::ValueOutside`] as [`check`](Self::check).
    pub fn choose(&self, logits: &[f32], position: usize) -> Result<u32, Refusal> {
        let (token, max) = argmax(logits)?;
        match self.draw()? {
            None => Ok(token),
            Some(_) if max.is_infinite() => Err(not_finite(token as usize, max)),
            Some(draw) => Ok(draw.token(logits, max, position)),
        }
    }
}

impl Draw {
    fn token(&self, logits: &[f32], max: f32, position: usize) -> u32 {
        let mut kept = self.kept(logits, max).into_iter();
        let total: u64 = kept.clone().map(|(_, weight)| weight).sum();
        // A number below the total, each as probable as the others but for one part in 2^64 / total.
        let mut left = high_product(philox(position as u64, self.seed), total);
        let drawn = kept.find(|&(_, weight)| {
            let found = left < weight;
            left = left.wrapping_sub(weight);
            found
        });
        drawn.map_or(0, |(token, _)| token)
    }

    /// The tokens that may be drawn by rising id, with their weights.
    fn kept(&self, logits: &[f32], max: f32) -> Vec<(u32, u64)> {
        let mut cut = f32::NEG_INFINITY;
        if self.top_k > 0 && (self.top_k as usize) < logits.len() {
            let mut sorted = logits.to_vec();
            let (_, largest, _) =
                sorted.select_nth_unstable_by(self.top_k as usize - 1, |a, b| b.total_cmp(a));
            cut = *largest;
        }
        let all = logits.iter().zip(0u32..).filter(|(logit, _)| **logit >= cut);
        let mut kept: Vec<(u32, u64)> =
            all.map(|(logit, token)| (token, weight(*logit, max, self.scale))).collect();
        if self.top_p > 0 {
            let mut sorted: Vec<(f32, u64)> =
                kept.iter().map(|&(token, weight)| (logits[token as usize], weight)).collect();
            sorted.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
            let mut left = high_product(self.top_p, kept.iter().map(|(_, weight)| weight).sum());
            let last = sorted.iter().find(|(_, weight)| {
                let found = left < *weight;
                left = left.wrapping_sub(*weight);
                found
            });
            let cut = last.map_or(cut, |(logit, _)| *logit);
            kept.retain(|(token, _)| logits[*token as usize] >= cut);
        }
        kept
    }
}

/// The largest logit and its token, the lowest id where several have it.
fn argmax(logits: &[f32]) -> Result<(u32, f32), Refusal> {
    let (mut best, mut token) = (f32::NEG_INFINITY, 0);
    for (index, &value) in logits.iter().enumerate() {
        if value.is_nan() {
            return Err(not_finite(index, value));
        }
        if value > best {
            (best, token) = (value, index as u32);
        }
    }
    Ok((token, best))
}

/// `round(2^31 * 2^((logit - max) * scale))`: how probable a token is beside the most probable one.
fn weight(logit: f32, max: f32, scale: f32) -> u64 {
    // Of 2^f on -1/2..=1/2, to FP32's precision: 1 and the Taylor series in f * ln 2.
    const SERIES: [f32; 6] =
        [0.000_154_035_3, 0.001_333_355_8, 0.009_618_129, 0.055_504_11, 0.240_226_5, LN_2];
    let exponent = (logit - max) * scale;
    if exponent < -32.5 {
        return 0;
    }
    let whole = exponent.round_ties_even();
    let fraction = exponent - whole;
    let power = SERIES.iter().fold(0.0f32, |sum, term| sum.mul_add(fraction, *term)).mul_add(fraction, 1.0);
    let scale = f32::from_bits(((127 + 31 + whole as i32) as u32) << 23);
    (power * scale).round_ties_even() as u64
}

/// The upper half of a product of 128 bits.
fn high_product(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

fn not_finite(index: usize, value: f32) -> Refusal {
    Refusal::NonFinite { what: "logits".to_string(), index, value }
}

fn outside(what: &str, value: impl ToString, bound: &str) -> Refusal {
    Refusal::ValueOutside { what: what.to_string(), value: value.to_string(), bound: bound.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lowest_id_and_nan_is_refused() {
        let greedy = |logits: &[f32]| Sampler::Greedy.choose(logits, 0);
        assert_eq!(greedy(&[1.0, 3.0, -2.0, 3.0]), Ok(1));
        assert_eq!(greedy(&[-0.0, 0.0]), Ok(0));
        assert_eq!(greedy(&[f32::NEG_INFINITY; 3]), Ok(0));
        let refusal = greedy(&[1.0, f32::NAN, 2.0]).unwrap_err();
        assert!(matches!(refusal, Refusal::NonFinite { index: 1, .. }), "{refusal}");
    }

    #[test]
    fn weights_are_the_exponential_and_fall_with_the_logit() {
        let mut last = u64::MAX;
        for step in 0..400_000 {
            let logit = -(step as f32) / 16_000.0;
            let (got, exact) =
                (weight(logit, 0.0, std::f32::consts::LOG2_E), f64::from(logit).exp() * 2f64.powi(31));
            // Half of an integer; the product's rounding, which counts as often as the exponent is large; the polynomial's.
            let bound = 0.5 + exact * f64::from(f32::EPSILON) * (2.0 + 2.0 * f64::from(-logit));
            assert!((got as f64 - exact).abs() <= bound, "{logit}: {got}, {exact}");
            assert!(got <= last, "{logit}");
            last = got;
        }
        assert_eq!(weight(7.0, 7.0, 1e30), 1 << 31);
        assert_eq!(weight(f32::NEG_INFINITY, 7.0, 1.0), 0);
        assert_eq!(weight(-f32::MAX, f32::MAX, 1.0), 0);
    }

    fn random(top_k: Option<usize>, top_p: f32) -> Draw {
        Sampler::Random { temperature: 1.0, top_k, top_p, seed: 0 }.draw().unwrap().unwrap()
    }

    #[test]
    fn cuts_keep_what_they_should() {
        // Probabilities 0.1, 0.4, 0.2, 0.2, 0.1 but for a factor.
        let logits = [1.0f32, 4.0, 2.0, 2.0, 1.0].map(f32::ln);
        let kept = |top_k, top_p| -> Vec<u32> {
            random(top_k, top_p).kept(&logits, 4f32.ln()).into_iter().map(|(token, _)| token).collect()
        };
        assert_eq!(kept(None, 1.0), [0, 1, 2, 3, 4]);
        assert_eq!(kept(Some(1), 1.0), [1]);
        assert_eq!(kept(Some(2), 1.0), [1, 2, 3], "equal logits at the cut stay");
        assert_eq!(kept(Some(3), 1.0), [1, 2, 3]);
        assert_eq!(kept(Some(9), 1.0), [0, 1, 2, 3, 4]);
        assert_eq!(kept(None, 0.39), [1]);
        assert_eq!(kept(None, 0.41), [1, 2, 3]);
        assert_eq!(kept(None, 0.79), [1, 2, 3]);
        assert_eq!(kept(None, 0.81), [0, 1, 2, 3, 4]);
        // Of the three that top_k keeps the first has half of the mass.
        assert_eq!(kept(Some(3), 0.49), [1]);
        assert_eq!(kept(None, f32::MIN_POSITIVE), [1]);
    }

    #[test]
    fn numbers_outside_their_bounds_are_refused() {
        let random =
            |temperature, top_k, top_p| Sampler::Random { temperature, top_k, top_p, seed: 1 }.check();
        assert_eq!(random(0.7, Some(40), 0.9), Ok(()));
        for temperature in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-45] {
            assert!(random(temperature, None, 1.0).is_err(), "{temperature}");
        }
        for top_p in [0.0, -0.1, 1.5, f32::NAN] {
            assert!(random(1.0, None, top_p).is_err(), "{top_p}");
        }
        let refusal = random(1.0, Some(0), 1.0).unwrap_err().to_string();
        assert_eq!(refusal, "top_k is 0; it must be at least 1");
    }

    #[test]
    fn an_infinite_logit_cannot_be_drawn_from() {
        let sampler = Sampler::Random { temperature: 1.0, top_k: None, top_p: 1.0, seed: 1 };
        for logits in [[1.0, f32::INFINITY], [f32::NEG_INFINITY; 2]] {
            assert!(matches!(sampler.choose(&logits, 0), Err(Refusal::NonFinite { .. })));
        }
        assert_eq!(sampler.choose(&[f32::NEG_INFINITY, 1.0], 0), Ok(1));
    }
}
