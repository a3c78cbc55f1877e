//! A decoder layer: a mixer and a feed-forward, each behind a norm that first adds the update before it to the residual stream.

use decode_loop::KvStore;
use device::{Buffer, Stream};
use half::bf16;
use structure_core::Refusal;

use super::attention::CudaAttention;
use super::delta::CudaDelta;
use super::experts::CudaExperts;
use super::ffn::CudaFfn;
use super::seats::CudaSeats;
use super::sequence::{FeedForwardScratch, Scratch};
use crate::Config;
use crate::cuda::{AddNorm, DeltaState, Norm};
use crate::layer::{Ffn, Layer, Mixer};
use crate::norm::RmsNorm;

/// One pass over some rows: what all layers read and write.
pub(crate) struct Pass<'a> {
    pub stream: &'a Stream,
    pub rows: usize,
    /// Of the first row.
    pub position: &'a Buffer<i32>,
    pub seats: &'a mut CudaSeats,
    pub kv: &'a mut dyn KvStore,
    /// The residual stream, `[rows, hidden]`, as the two after it.
    pub hidden: &'a mut Buffer<bf16>,
    /// What the last norm made of it.
    pub x: &'a mut Buffer<bf16>,
    /// What is to be added to it next.
    pub update: &'a mut Buffer<bf16>,
    /// Whether `update` holds anything yet.
    pub updated: bool,
}

/// A norm of the residual stream.
pub(crate) struct CudaNorm {
    scale: Buffer<f32>,
    eps: f32,
}

pub(crate) struct CudaLayer {
    input_norm: CudaNorm,
    mixer: CudaMixer,
    post_attention_norm: CudaNorm,
    ffn: CudaFeedForward,
}

enum CudaMixer {
    Delta(Box<CudaDelta>),
    Attention(Box<CudaAttention>),
}

enum CudaFeedForward {
    Dense(CudaFfn),
    Sparse(Box<CudaExperts>),
}

impl CudaNorm {
    pub fn upload(stream: &Stream, norm: &RmsNorm) -> Result<Self, Refusal> {
        let scale = norm.scale();
        Ok(CudaNorm { scale: Buffer::from_host(stream, scale, &[scale.len()])?, eps: norm.eps() })
    }

    /// Adds the update, if there is one, and writes the normed rows to `x`.
    pub fn queue(&self, pass: &mut Pass<'_>) -> Result<(), Refusal> {
        let (rows, hidden) = (pass.rows, self.scale.len());
        let (scale, eps, out) = (self.scale.view(), self.eps, pass.x.view_mut());
        if !std::mem::take(&mut pass.updated) {
            return Norm { x: pass.hidden.view(), scale, eps, out, rows, hidden }.queue(pass.stream);
        }
        let (x, update) = (pass.hidden.view_mut(), pass.update.view());
        AddNorm { x, update, scale, eps, out, rows, hidden }.queue(pass.stream)
    }

    /// Writes the normed rows of a stream that has no update to come to FP32 rows.
    pub fn queue_f32(&self, pass: &Pass<'_>, out: &mut Buffer<f32>) -> Result<(), Refusal> {
        let (rows, hidden) = (pass.rows, self.scale.len());
        let (scale, eps, out) = (self.scale.view(), self.eps, out.view_mut());
        Norm { x: pass.hidden.view(), scale, eps, out, rows, hidden }.queue(pass.stream)
    }

    /// Adds the update to rows of the stream, and writes them normed to FP32 rows; all from row `first` on.
    pub fn queue_last(
        &self,
        pass: &mut Pass<'_>,
        first: usize,
        rows: usize,
        out: &mut Buffer<f32>,
    ) -> Result<(), Refusal> {
        let hidden = self.scale.len();
        let range = first * hidden..(first + rows) * hidden;
        let x = pass.hidden.view_mut().range(range.clone())?;
        let update = pass.update.view().range(range)?;
        let (scale, eps, out) = (self.scale.view(), self.eps, out.view_mut());
        AddNorm { x, update, scale, eps, out, rows, hidden }.queue(pass.stream)
    }
}

impl CudaLayer {
    /// Uploads a layer; `attention_index` counts the full-attention layers before it.
    pub fn upload(
        stream: &Stream,
        config: &Config,
        layer: &Layer,
        attention_index: usize,
    ) -> Result<Self, Refusal> {
        let (input_norm, mixer, post_attention_norm, ffn) = layer.parts();
        Ok(CudaLayer {
            input_norm: CudaNorm::upload(stream, input_norm)?,
            mixer: match mixer {
                Mixer::GatedDelta(mixer) => {
                    CudaMixer::Delta(Box::new(CudaDelta::upload(stream, config, mixer)?))
                }
                Mixer::Attention(mixer) => {
                    CudaMixer::Attention(Box::new(CudaAttention::upload(stream, mixer, attention_index)?))
                }
            },
            post_attention_norm: CudaNorm::upload(stream, post_attention_norm)?,
            ffn: match ffn {
                Ffn::Dense(ffn) => CudaFeedForward::Dense(CudaFfn::new(ffn)),
                Ffn::Sparse(ffn) => CudaFeedForward::Sparse(Box::new(CudaExperts::upload(stream, ffn)?)),
            },
        })
    }

    /// Bytes of the experts' weights that one token reads.
    pub fn expert_bytes(&self) -> usize {
        match &self.ffn {
            CudaFeedForward::Dense(_) => 0,
            CudaFeedForward::Sparse(experts) => experts.token_bytes(),
        }
    }

    /// Queues the layer. Its last update is left for the next norm to add.
    pub fn forward(
        &mut self,
        pass: &mut Pass<'_>,
        state: &mut Option<DeltaState>,
        scratch: &mut Scratch,
    ) -> Result<(), Refusal> {
        self.input_norm.queue(pass)?;
        match (&self.mixer, state) {
            (CudaMixer::Delta(mixer), Some(state)) => mixer.forward(pass, state, &mut scratch.delta)?,
            (CudaMixer::Attention(mixer), _) => mixer.forward(pass, &mut scratch.attention)?,
            (CudaMixer::Delta(_), None) => return Err(no_state()),
        }
        pass.updated = true;
        self.post_attention_norm.queue(pass)?;
        match (&mut self.ffn, &mut scratch.ffn) {
            (CudaFeedForward::Dense(ffn), FeedForwardScratch::Dense(scratch)) => {
                ffn.forward(pass, scratch)?
            }
            (CudaFeedForward::Sparse(ffn), FeedForwardScratch::Sparse(scratch)) => {
                ffn.forward(pass, &self.post_attention_norm, scratch)?;
            }
            _ => return Err(no_state()),
        }
        pass.updated = true;
        Ok(())
    }
}

/// A model and its sequence are made from one config, so that a layer finds what its kind needs.
fn no_state() -> Refusal {
    let (what, value) = ("the sequence of a layer".to_string(), "another model's".to_string());
    Refusal::ValueOutside { what, value, bound: "this model's".to_string() }
}
