//! A gated-delta layer's mixer: projections, causal convolution, delta rule, gated norm.

use rayon::prelude::*;
use structure_core::Refusal;

use crate::conv::{CausalConv, ConvState};
use crate::delta_rule::{DeltaInputs, DeltaState};
use crate::loader::Loader;
use crate::math::{sigmoid, silu, softplus};
use crate::norm::{RmsNorm, l2_normalise};
use crate::seats::{SeatId, Seats};

pub(crate) struct GatedDelta {
    key_heads: usize,
    heads: usize,
    key_dim: usize,
    value_dim: usize,
    in_proj_qkv: SeatId,
    in_proj_z: SeatId,
    in_proj_b: SeatId,
    in_proj_a: SeatId,
    out_proj: SeatId,
    conv: CausalConv,
    /// `-e^A_log`, per value head.
    rate: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: RmsNorm,
}

/// What a layer remembers of the rows before.
pub(crate) struct GatedDeltaState {
    conv: ConvState,
    delta: DeltaState,
}

impl GatedDeltaState {
    /// Elements before the convolution, and `[heads, key_dim, value_dim]` of the delta rule.
    pub fn shape(&self) -> [usize; 4] {
        let [heads, key_dim, value_dim] = self.delta.shape();
        [self.conv.len(), heads, key_dim, value_dim]
    }
}

impl GatedDelta {
    pub fn load(loader: &mut Loader<'_>, path: &str) -> Result<Self, Refusal> {
        let config = loader.config;
        let (key_heads, heads) = (config.linear_num_key_heads, config.linear_num_value_heads);
        let (key_dim, value_dim) = (config.linear_key_head_dim, config.linear_value_head_dim);
        let (hidden, values) = (config.hidden_size, heads * value_dim);
        let channels = 2 * key_heads * key_dim + values;
        let a_log = loader.checkpoint.vector(&format!("{path}.A_log"), &[heads])?;
        Ok(GatedDelta {
            key_heads,
            heads,
            key_dim,
            value_dim,
            in_proj_qkv: loader.seat(&format!("{path}.in_proj_qkv"), channels, hidden)?,
            in_proj_z: loader.seat(&format!("{path}.in_proj_z"), values, hidden)?,
            in_proj_b: loader.seat(&format!("{path}.in_proj_b"), heads, hidden)?,
            in_proj_a: loader.seat(&format!("{path}.in_proj_a"), heads, hidden)?,
            out_proj: loader.seat(&format!("{path}.out_proj"), hidden, values)?,
            conv: CausalConv::load(loader, &format!("{path}.conv1d"), channels)?,
            rate: a_log.into_iter().map(|a_log| -a_log.exp()).collect(),
            dt_bias: loader.checkpoint.vector(&format!("{path}.dt_bias"), &[heads])?,
            norm: RmsNorm::load_plain(loader, &format!("{path}.norm"), value_dim)?,
        })
    }

    /// The seats of q with k and v, z, b, a and the output.
    #[cfg(kernels_built)]
    pub fn seats(&self) -> [SeatId; 5] {
        [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a, self.out_proj]
    }

    /// The convolution's taps `[taps, channels]`, `-e^A_log` and `dt_bias` per value head, and the gated norm.
    #[cfg(kernels_built)]
    pub fn parameters(&self) -> (&[f32], &[f32], &[f32], &RmsNorm) {
        (self.conv.weights(), &self.rate, &self.dt_bias, &self.norm)
    }

    /// The seats that read its input.
    pub fn input_seats(&self) -> Vec<SeatId> {
        vec![self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a]
    }

    pub fn new_state(&self) -> GatedDeltaState {
        let delta = DeltaState::new(self.heads, self.key_dim, self.value_dim);
        GatedDeltaState { conv: self.conv.new_state(), delta }
    }

    /// Whether it made this state, or could have.
    pub fn fits(&self, state: &GatedDeltaState) -> bool {
        state.shape() == [self.conv.state_len(), self.heads, self.key_dim, self.value_dim]
    }

    /// `x` and the result are `[rows, hidden]`.
    pub fn forward(
        &self,
        seats: &mut Seats,
        state: &mut GatedDeltaState,
        x: &[f32],
        rows: usize,
    ) -> Result<Vec<f32>, Refusal> {
        let mixed = seats.project(self.in_proj_qkv, x, rows)?;
        let z = seats.project(self.in_proj_z, x, rows)?;
        let mut beta = seats.project(self.in_proj_b, x, rows)?;
        let mut decay = seats.project(self.in_proj_a, x, rows)?;
        beta.iter_mut().for_each(|b| *b = sigmoid(*b));
        for decay in decay.chunks_exact_mut(self.heads) {
            for ((a, rate), bias) in decay.iter_mut().zip(&self.rate).zip(&self.dt_bias) {
                *a = (rate * softplus(*a + bias)).exp();
            }
        }

        let mixed = self.conv.forward(&mut state.conv, &mixed);
        let (keys_width, stride) = (self.key_heads * self.key_dim, mixed.len() / rows);
        let queries = self.normalised(&mixed, stride, 0, (self.key_dim as f32).powf(-0.5));
        let keys = self.normalised(&mixed, stride, keys_width, 1.0);
        let mut out = state.delta.forward(&DeltaInputs {
            queries: &queries,
            keys: &keys,
            values: &mixed[2 * keys_width..],
            value_stride: stride,
            decay: &decay,
            beta: &beta,
            key_heads: self.key_heads,
            heads: self.heads,
            value_dim: self.value_dim,
        });
        out.par_chunks_exact_mut(self.value_dim)
            .zip(z.par_chunks_exact(self.value_dim))
            .with_min_len(32)
            .for_each(|(out, z)| {
                self.norm.apply_in_place(out);
                out.iter_mut().zip(z).for_each(|(out, z)| *out *= silu(*z));
            });
        seats.project(self.out_proj, &out, rows)
    }

    /// The heads that start at column `first` of each row, each of unit length times `scale`.
    fn normalised(&self, mixed: &[f32], stride: usize, first: usize, scale: f32) -> Vec<f32> {
        let columns = first..first + self.key_heads * self.key_dim;
        let mut heads: Vec<f32> =
            mixed.chunks_exact(stride).flat_map(|row| &row[columns.clone()]).copied().collect();
        for head in heads.chunks_exact_mut(self.key_dim) {
            l2_normalise(head);
            head.iter_mut().for_each(|x| *x *= scale);
        }
        heads
    }
}
