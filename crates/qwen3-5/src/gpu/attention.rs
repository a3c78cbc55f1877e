//! A full-attention layer's mixer: grouped queries, q/k norm, partial rotary, output gate, over a KV store.

use decode_loop::{Attend, KvRows, KvShape};
use device::{Buffer, Stream};
use half::bf16;
use structure_core::Refusal;

use super::layer::Pass;
use crate::attention::Attention;
use crate::cuda::{OutputGate, QkNormRope};
use crate::seats::SeatId;

pub(crate) struct CudaAttention {
    q_proj: SeatId,
    k_proj: SeatId,
    v_proj: SeatId,
    o_proj: SeatId,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f32,
    /// `[head_dim]` each.
    q_scale: Buffer<f32>,
    k_scale: Buffer<f32>,
    /// Radians a position, `[pairs]`.
    frequencies: Buffer<f32>,
    /// Which of the full-attention layers it is.
    index: usize,
}

/// What an attention mixer works in.
pub(crate) struct AttentionScratch {
    /// `[rows, heads, 2, head_dim]`: each head's query beside its gate.
    query_and_gate: Buffer<bf16>,
    /// `[rows, heads, head_dim]`, as the one after it.
    queries: Buffer<bf16>,
    attended: Buffer<bf16>,
    /// `[rows, kv_heads, head_dim]`, as the two after it.
    projected_keys: Buffer<bf16>,
    keys: Buffer<bf16>,
    values: Buffer<bf16>,
}

impl AttentionScratch {
    pub fn bytes(rows: usize, shape: &KvShape) -> u64 {
        (rows * (4 * shape.heads + 3 * shape.kv_heads) * shape.head_dim * size_of::<bf16>()) as u64
    }

    pub fn new(stream: &Stream, rows: usize, shape: &KvShape) -> Result<Self, Refusal> {
        let buffer = |heads: usize| Buffer::zeros(stream, &[rows, heads, shape.head_dim]);
        Ok(AttentionScratch {
            query_and_gate: buffer(2 * shape.heads)?,
            queries: buffer(shape.heads)?,
            attended: buffer(shape.heads)?,
            projected_keys: buffer(shape.kv_heads)?,
            keys: buffer(shape.kv_heads)?,
            values: buffer(shape.kv_heads)?,
        })
    }
}

impl CudaAttention {
    /// The mixer of the full-attention layer `index`, counted among those.
    pub fn upload(stream: &Stream, attention: &Attention, index: usize) -> Result<Self, Refusal> {
        let vector = |elements: &[f32]| Buffer::from_host(stream, elements, &[elements.len()]);
        let [q_proj, k_proj, v_proj, o_proj] = attention.seats();
        let [heads, kv_heads, head_dim] = attention.dims();
        let [query_norm, key_norm] = attention.norms();
        Ok(CudaAttention {
            q_proj,
            k_proj,
            v_proj,
            o_proj,
            heads,
            kv_heads,
            head_dim,
            eps: query_norm.eps(),
            q_scale: vector(query_norm.scale())?,
            k_scale: vector(key_norm.scale())?,
            frequencies: vector(attention.rope.frequencies())?,
            index,
        })
    }

    /// From the normed rows to `update`.
    pub fn forward(&self, pass: &mut Pass<'_>, scratch: &mut AttentionScratch) -> Result<(), Refusal> {
        let rows = pass.rows;
        let seats = [self.q_proj, self.k_proj, self.v_proj];
        let out = [&mut scratch.query_and_gate, &mut scratch.projected_keys, &mut scratch.values];
        pass.seats.project_together(seats, pass.x.view(), out.map(Buffer::view_mut), rows)?;
        let rotate = QkNormRope {
            q_and_gate: scratch.query_and_gate.view(),
            k: scratch.projected_keys.view(),
            q_scale: self.q_scale.view(),
            k_scale: self.k_scale.view(),
            frequencies: self.frequencies.view(),
            position: pass.position.view(),
            q_out: scratch.queries.view_mut(),
            k_out: scratch.keys.view_mut(),
            rows,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            pairs: self.frequencies.len(),
            eps: self.eps,
        };
        rotate.queue(pass.stream)?;
        let store = KvRows {
            keys: scratch.keys.view(),
            values: scratch.values.view(),
            rows,
            position: pass.position.view(),
            stream: pass.stream,
        };
        pass.kv.append(self.index, &store)?;
        let attend = Attend {
            queries: scratch.queries.view(),
            out: &scratch.attended.view_mut(),
            rows,
            position: pass.position.view(),
            stream: pass.stream,
        };
        pass.kv.attend(self.index, &attend)?;
        // The queries have been answered; their buffer takes the gated result.
        let gate = OutputGate {
            values: scratch.attended.view(),
            q_and_gate: scratch.query_and_gate.view(),
            out: scratch.queries.view_mut(),
            rows,
            heads: self.heads,
            head_dim: self.head_dim,
        };
        gate.queue(pass.stream)?;
        pass.seats.project(self.o_proj, scratch.queries.view(), pass.update.view_mut(), rows)
    }
}
