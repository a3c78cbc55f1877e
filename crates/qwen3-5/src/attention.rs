//! A full-attention layer's mixer: grouped queries, q/k norm, partial rotary, output gate, KV cache.

use decode_loop::CpuKv;
use linear_proj::dot;
use rayon::prelude::*;
use structure_core::Refusal;

use crate::loader::Loader;
use crate::math::{sigmoid, softmax};
use crate::norm::RmsNorm;
use crate::rope::Rope;
use crate::seats::{SeatId, Seats};

pub(crate) struct Attention {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    q_proj: SeatId,
    k_proj: SeatId,
    v_proj: SeatId,
    o_proj: SeatId,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    pub rope: Rope,
}

/// The host's own store: FP32 keys and values, per KV head, `[seq_len, head_dim]`; grows with the rows.
pub(crate) struct KvCache {
    head_dim: usize,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl Attention {
    pub fn load(loader: &mut Loader<'_>, path: &str) -> Result<Self, Refusal> {
        let config = loader.config;
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        Ok(Attention {
            heads,
            kv_heads,
            head_dim,
            q_proj: loader.seat(&format!("{path}.q_proj"), 2 * heads * head_dim, hidden)?,
            k_proj: loader.seat(&format!("{path}.k_proj"), kv_heads * head_dim, hidden)?,
            v_proj: loader.seat(&format!("{path}.v_proj"), kv_heads * head_dim, hidden)?,
            o_proj: loader.seat(&format!("{path}.o_proj"), hidden, heads * head_dim)?,
            q_norm: RmsNorm::load(loader, &format!("{path}.q_norm"), head_dim)?,
            k_norm: RmsNorm::load(loader, &format!("{path}.k_norm"), head_dim)?,
            rope: Rope::new(config),
        })
    }

    /// The seats of q, k, v and the output.
    #[cfg(kernels_built)]
    pub fn seats(&self) -> [SeatId; 4] {
        [self.q_proj, self.k_proj, self.v_proj, self.o_proj]
    }

    /// Query heads, KV heads, elements of a head.
    #[cfg(kernels_built)]
    pub fn dims(&self) -> [usize; 3] {
        [self.heads, self.kv_heads, self.head_dim]
    }

    /// The norms of queries and keys.
    #[cfg(kernels_built)]
    pub fn norms(&self) -> [&RmsNorm; 2] {
        [&self.q_norm, &self.k_norm]
    }

    /// The seats that read its input.
    pub fn input_seats(&self) -> Vec<SeatId> {
        vec![self.q_proj, self.k_proj, self.v_proj]
    }

    pub fn new_cache(&self) -> KvCache {
        let empty = vec![Vec::new(); self.kv_heads];
        KvCache { head_dim: self.head_dim, keys: empty.clone(), values: empty }
    }

    /// Whether it made this cache, or could have.
    pub fn fits(&self, cache: &dyn CpuKv) -> bool {
        cache.shape() == [self.kv_heads, self.head_dim]
    }

    /// `x` and the result are `[rows, hidden]`; `position` is that of the first row.
    pub fn forward(
        &self,
        seats: &mut Seats,
        cache: &mut dyn CpuKv,
        x: &[f32],
        rows: usize,
        position: usize,
    ) -> Result<Vec<f32>, Refusal> {
        let head_dim = self.head_dim;
        // Each head's query lies beside its gate.
        let mut queries = seats.project(self.q_proj, x, rows)?;
        let mut keys = seats.project(self.k_proj, x, rows)?;
        let values = seats.project(self.v_proj, x, rows)?;
        let angles = self.rope.angles(position, rows);
        for (index, query) in queries.chunks_exact_mut(2 * head_dim).enumerate() {
            self.q_norm.apply_in_place(&mut query[..head_dim]);
            angles.rotate(index / self.heads, &mut query[..head_dim]);
        }
        for (index, key) in keys.chunks_exact_mut(head_dim).enumerate() {
            self.k_norm.apply_in_place(key);
            angles.rotate(index / self.kv_heads, key);
        }

        let cached = cache.seq_len();
        cache.append(&keys, &values);
        let cache = &*cache;
        let mut out = vec![0.0; rows * self.heads * head_dim];
        out.par_chunks_exact_mut(head_dim)
            .zip(queries.par_chunks_exact(2 * head_dim))
            .enumerate()
            .for_each_init(Vec::new, |scores, (index, (out, query_and_gate))| {
                let (row, head) = (index / self.heads, index % self.heads);
                let kv_head = head / (self.heads / self.kv_heads);
                let (query, gate) = query_and_gate.split_at(head_dim);
                cache.attend(kv_head, cached + row + 1, query, scores, out);
                out.iter_mut().zip(gate).for_each(|(out, gate)| *out *= sigmoid(*gate));
            });
        seats.project(self.o_proj, &out, rows)
    }
}

impl CpuKv for KvCache {
    fn seq_len(&self) -> usize {
        self.keys.first().map_or(0, |keys| keys.len() / self.head_dim)
    }

    fn shape(&self) -> [usize; 2] {
        [self.keys.len(), self.head_dim]
    }

    fn bytes(&self) -> u64 {
        let elements: usize = self.keys.iter().chain(&self.values).map(Vec::len).sum();
        (elements * size_of::<f32>()) as u64
    }

    fn clear(&mut self) {
        self.keys.iter_mut().chain(&mut self.values).for_each(Vec::clear);
    }

    fn append(&mut self, keys: &[f32], values: &[f32]) {
        for (cache, new) in [(&mut self.keys, keys), (&mut self.values, values)] {
            let heads = cache.len();
            for (index, new) in new.chunks_exact(self.head_dim).enumerate() {
                cache[index % heads].extend_from_slice(new);
            }
        }
    }

    fn attend(&self, kv_head: usize, seq_len: usize, query: &[f32], scores: &mut Vec<f32>, out: &mut [f32]) {
        let scale = (self.head_dim as f32).powf(-0.5);
        let keys = self.keys[kv_head].chunks_exact(self.head_dim).take(seq_len);
        let values = self.values[kv_head].chunks_exact(self.head_dim);
        scores.clear();
        scores.extend(keys.map(|key| dot(query, key) * scale));
        softmax(scores);
        out.fill(0.0);
        for (weight, value) in scores.iter().zip(values) {
            for (out, value) in out.iter_mut().zip(value) {
                *out += weight * value;
            }
        }
    }
}
