//! The short causal convolution in front of the delta rule, one filter a channel.

use structure_core::Refusal;

use crate::loader::Loader;
use crate::math::silu;

/// `silu(sum over tap of w[c, tap] * x[t - taps + 1 + tap, c])`: the last tap meets the current row.
pub(crate) struct CausalConv {
    channels: usize,
    /// `[taps, channels]`: the checkpoint's transposed, so that a tap's weights lie beside each other.
    weights: Vec<f32>,
}

/// The `taps - 1` rows before the next one, oldest first; zeros before the first row.
pub(crate) struct ConvState(Vec<f32>);

impl ConvState {
    /// Elements of the rows it keeps.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl CausalConv {
    pub fn load(loader: &mut Loader<'_>, path: &str, channels: usize) -> Result<Self, Refusal> {
        let taps = loader.config.linear_conv_kernel_dim;
        let filters = loader.checkpoint.vector(&format!("{path}.weight"), &[channels, 1, taps])?;
        let weights = (0..taps * channels).map(|i| filters[i % channels * taps + i / channels]).collect();
        Ok(CausalConv { channels, weights })
    }

    /// `[taps, channels]`.
    #[cfg(kernels_built)]
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    pub fn new_state(&self) -> ConvState {
        ConvState(vec![0.0; self.state_len()])
    }

    /// Elements of a state.
    pub fn state_len(&self) -> usize {
        self.weights.len() - self.channels
    }

    /// Filters rows `[T, channels]` that follow those in `state`.
    pub fn forward(&self, state: &mut ConvState, rows: &[f32]) -> Vec<f32> {
        let channels = self.channels;
        let history = [&state.0[..], rows].concat();
        let mut out = vec![0.0; rows.len()];
        for (t, out) in out.chunks_exact_mut(channels).enumerate() {
            let window = &history[t * channels..];
            for (weights, x) in self.weights.chunks_exact(channels).zip(window.chunks_exact(channels)) {
                for ((out, w), x) in out.iter_mut().zip(weights).zip(x) {
                    *out += w * x;
                }
            }
            out.iter_mut().for_each(|out| *out = silu(*out));
        }
        state.0.copy_from_slice(&history[rows.len()..]);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_meets_those_before_it_however_they_are_chunked() {
        // Two channels, three taps: channel 0 weighs 1, 10, 100 from the oldest on, channel 1 is its negative half.
        let conv = CausalConv { channels: 2, weights: vec![1.0, -0.5, 10.0, -5.0, 100.0, -50.0] };
        let rows: Vec<f32> = [1.0f32, 2.0, 3.0, 4.0].into_iter().flat_map(|x| [x, x]).collect();
        let sums = [100.0f32, 210.0, 321.0, 432.0];
        for chunk in 1..=4 {
            let mut state = conv.new_state();
            let out: Vec<f32> =
                rows.chunks(2 * chunk).flat_map(|rows| conv.forward(&mut state, rows)).collect();
            let expected: Vec<f32> = sums.into_iter().flat_map(|sum| [silu(sum), silu(-sum / 2.0)]).collect();
            assert_eq!(out, expected, "in chunks of {chunk}");
        }
    }
}
