//! The gated delta rule: a matrix per head that forgets, and is corrected towards each key's value.

use rayon::prelude::*;

/// Value dimensions that are walked together; the state's columns never meet each other.
const LANES: usize = 16;

/// The state of all value heads, `[heads, value_dim / 16, key_dim, 16]`: a block of columns stays in the first-level
/// cache while all rows pass. The lanes past `value_dim` stay zero.
pub(crate) struct DeltaState {
    key_dim: usize,
    value_dim: usize,
    columns: Vec<[f32; LANES]>,
}

/// The inputs of T rows. Queries and keys are normalised, queries scaled.
pub(crate) struct DeltaInputs<'a> {
    /// `[T, key_heads, key_dim]`; each key head serves a run of value heads.
    pub queries: &'a [f32],
    /// As `queries`.
    pub keys: &'a [f32],
    /// T rows of `[heads, value_dim]`, each `value_stride` after the one before.
    pub values: &'a [f32],
    pub value_stride: usize,
    /// `[T, heads]`: what the state is multiplied by.
    pub decay: &'a [f32],
    /// `[T, heads]`: how far the state is corrected.
    pub beta: &'a [f32],
    pub key_heads: usize,
    pub heads: usize,
    pub value_dim: usize,
}

impl DeltaState {
    pub fn new(heads: usize, key_dim: usize, value_dim: usize) -> Self {
        let columns = vec![[0.0; LANES]; heads * value_dim.div_ceil(LANES) * key_dim];
        DeltaState { key_dim, value_dim, columns }
    }

    /// `[heads, key_dim, value_dim]`.
    pub fn shape(&self) -> [usize; 3] {
        let blocks = self.columns.len() / self.key_dim;
        [blocks / self.value_dim.div_ceil(LANES), self.key_dim, self.value_dim]
    }

    /// Takes T rows, one after the other; the result is `[T, heads, value_dim]`.
    pub fn forward(&mut self, inputs: &DeltaInputs<'_>) -> Vec<f32> {
        let rows = inputs.decay.len() / inputs.heads;
        let blocks = self.value_dim.div_ceil(LANES);
        // [heads, blocks, T, 16], turned around below.
        let mut by_block = vec![[0.0; LANES]; inputs.heads * blocks * rows];
        self.columns
            .par_chunks_exact_mut(self.key_dim)
            .zip(by_block.par_chunks_exact_mut(rows))
            .enumerate()
            .with_min_len(blocks)
            .for_each(|(block, (columns, out))| {
                for (t, out) in out.iter_mut().enumerate() {
                    *out = step(columns, inputs, t, block / blocks, block % blocks * LANES);
                }
            });
        let width = self.value_dim;
        let mut out = vec![0.0; rows * inputs.heads * width];
        for (index, out) in out.chunks_exact_mut(width).enumerate() {
            let (t, head) = (index / inputs.heads, index % inputs.heads);
            for (block, out) in out.chunks_mut(LANES).enumerate() {
                out.copy_from_slice(&by_block[(head * blocks + block) * rows + t][..out.len()]);
            }
        }
        out
    }
}

/// Row `t` through the columns from `first` on of one head:
/// `S = decay * S; S += k (beta * (v - k^T S))^T; o = q^T S`.
fn step(
    columns: &mut [[f32; LANES]],
    inputs: &DeltaInputs<'_>,
    t: usize,
    head: usize,
    first: usize,
) -> [f32; LANES] {
    let key_dim = columns.len();
    let key_head = head / (inputs.heads / inputs.key_heads);
    let at = (t * inputs.key_heads + key_head) * key_dim;
    let (query, key) = (&inputs.queries[at..at + key_dim], &inputs.keys[at..at + key_dim]);
    let (decay, beta) = (inputs.decay[t * inputs.heads + head], inputs.beta[t * inputs.heads + head]);
    let value = t * inputs.value_stride + head * inputs.value_dim;
    let value = &inputs.values[value + first..value + inputs.value_dim.min(first + LANES)];

    let mut recalled = [0.0; LANES];
    for (row, k) in columns.iter_mut().zip(key) {
        for lane in 0..LANES {
            row[lane] *= decay;
            recalled[lane] += row[lane] * k;
        }
    }
    let mut correction = [0.0; LANES];
    for (lane, value) in value.iter().enumerate() {
        correction[lane] = (value - recalled[lane]) * beta;
    }
    let mut out = [0.0; LANES];
    for ((row, k), q) in columns.iter_mut().zip(key).zip(query) {
        for lane in 0..LANES {
            row[lane] += k * correction[lane];
            out[lane] += row[lane] * q;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule as it is written, in FP64, on one head's `[key_dim, value_dim]`.
    fn reference(inputs: &DeltaInputs<'_>, key_dim: usize, head: usize) -> Vec<f64> {
        let width = inputs.value_dim;
        let mut state = vec![0f64; key_dim * width];
        let mut out = Vec::new();
        for t in 0..inputs.decay.len() / inputs.heads {
            let at = (t * inputs.key_heads + head * inputs.key_heads / inputs.heads) * key_dim;
            let gate = t * inputs.heads + head;
            state.iter_mut().for_each(|s| *s *= f64::from(inputs.decay[gate]));
            for v in 0..width {
                let k = |i: usize| f64::from(inputs.keys[at + i]);
                let recalled: f64 = (0..key_dim).map(|i| state[i * width + v] * k(i)).sum();
                let value = f64::from(inputs.values[t * inputs.value_stride + head * width + v]);
                let correction = (value - recalled) * f64::from(inputs.beta[gate]);
                (0..key_dim).for_each(|i| state[i * width + v] += k(i) * correction);
                out.push(
                    (0..key_dim).map(|i| state[i * width + v] * f64::from(inputs.queries[at + i])).sum(),
                );
            }
        }
        out
    }

    #[test]
    fn heads_and_columns_follow_the_rule() {
        let noise = |seed: usize, len: usize| -> Vec<f32> {
            (0..len).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5).collect()
        };
        let unit = |xs: Vec<f32>| xs.into_iter().map(|x| x + 0.5).collect::<Vec<f32>>();
        // A value head that is not whole blocks, three of them to two key heads' worth.
        let (rows, key_heads, heads, key_dim, value_dim) = (9, 2, 4, 8, 21);
        let stride = heads * value_dim + 5;
        let (queries, keys) = (noise(1, rows * key_heads * key_dim), noise(2, rows * key_heads * key_dim));
        let (values, decay, beta) =
            (noise(3, rows * stride), unit(noise(4, rows * heads)), unit(noise(5, rows * heads)));
        let inputs = DeltaInputs {
            queries: &queries,
            keys: &keys,
            values: &values,
            value_stride: stride,
            decay: &decay,
            beta: &beta,
            key_heads,
            heads,
            value_dim,
        };
        let out = DeltaState::new(heads, key_dim, value_dim).forward(&inputs);
        for head in 0..heads {
            let expected = reference(&inputs, key_dim, head);
            for (i, expected) in expected.iter().enumerate() {
                let got = out[(i / value_dim * heads + head) * value_dim + i % value_dim];
                assert!((f64::from(got) - expected).abs() < 1e-5, "head {head}, {i}: {got}, {expected}");
            }
        }
    }
}
