//! What one sequence works in: allocated once, before its first token, and at the same addresses to its end.

use decode_loop::{KvChoice, KvShape, KvStore, Sequence};
use device::{Buffer, Stream};
use half::bf16;
use structure_core::Refusal;

use super::attention::AttentionScratch;
use super::delta::{self, DeltaScratch};
use super::experts::ExpertsScratch;
use super::ffn::FfnScratch;
use crate::config::{Config, FfnConfig, LayerType};
use crate::cuda::{Bf16Kv, DeltaState};

/// Prompt tokens that pass together: enough to fill the tensor cores, and few enough for the buffers to stay small beside the weights.
pub(crate) const PROMPT_ROWS: usize = 2048;

/// The buffers and the states of a sequence.
pub(crate) struct CudaSequence {
    pub window: usize,
    /// The most rows of a step.
    pub rows: usize,
    /// The most rows of a pass.
    pub chunk: usize,
    /// I32 `[chunk]` and `[1]`: what the pass reads, and where it stands.
    pub tokens: Buffer<i32>,
    pub position: Buffer<i32>,
    /// BF16 `[chunk, hidden]`.
    pub hidden: Buffer<bf16>,
    pub x: Buffer<bf16>,
    pub update: Buffer<bf16>,
    /// F32 `[rows, hidden]` and `[rows, vocab]`.
    pub normed: Buffer<f32>,
    pub logits: Buffer<f32>,
    pub scratch: Scratch,
    pub kv: Box<dyn KvStore>,
    /// One a layer; none where a layer attends.
    pub states: Vec<Option<DeltaState>>,
}

/// What the layers work in, one after the other.
pub(crate) struct Scratch {
    pub attention: AttentionScratch,
    pub delta: DeltaScratch,
    pub ffn: FeedForwardScratch,
}

pub(crate) enum FeedForwardScratch {
    Dense(FfnScratch),
    Sparse(Box<ExpertsScratch>),
}

/// The sizes of a sequence of a model.
struct Plan<'a> {
    config: &'a Config,
    rows: usize,
    chunk: usize,
    kv: KvShape,
}

impl Plan<'_> {
    /// Bytes besides the keys and values.
    fn bytes(&self) -> u64 {
        let Plan { config, rows, chunk, kv } = self;
        let hidden = config.hidden_size;
        let streams =
            (4 * chunk + 4 + 3 * chunk * hidden * 2 + rows * 4 * (hidden + config.vocab_size)) as u64;
        let ffn = match &config.ffn {
            FfnConfig::Dense { intermediate_size } => FfnScratch::bytes(*chunk, *intermediate_size),
            FfnConfig::Sparse(sparse) => ExpertsScratch::bytes(*chunk, hidden, sparse),
        };
        let deltas = config.layer_types.iter().filter(|kind| **kind == LayerType::LinearAttention).count();
        streams
            + ffn
            + AttentionScratch::bytes(*chunk, kv)
            + DeltaScratch::bytes(&delta::shape(config), *chunk)
            + (deltas * delta::shape(config).state_bytes(1)) as u64
    }
}

impl CudaSequence {
    /// Allocates; refused with the bytes asked and free before anything is.
    pub fn new(stream: &Stream, config: &Config, sequence: &Sequence<'_>) -> Result<Self, Refusal> {
        let (window, rows) = (sequence.window.max(1), sequence.rows.max(1));
        let chunk = window.min(PROMPT_ROWS).max(rows);
        let kv = config.kv_shape(window);
        let plan = Plan { config, rows, chunk, kv };
        let kv_bytes = match &sequence.kv {
            KvChoice::Host => Bf16Kv::bytes_of(&kv),
            KvChoice::Store(factory, options) => {
                (factory.check)(&kv, options)?;
                (factory.bytes)(&kv, options)
            }
        };
        let what = format!("a sequence of {window} positions");
        stream.device().require(&what, plan.bytes() + kv_bytes)?;

        let store: Box<dyn KvStore> = match &sequence.kv {
            KvChoice::Host => Box::new(Bf16Kv::new(stream, &kv)?),
            KvChoice::Store(factory, options) => (factory.cuda)(stream, &kv, options)?,
        };
        let (hidden, delta) = (config.hidden_size, delta::shape(config));
        let states = config.layer_types.iter().map(|kind| match kind {
            LayerType::LinearAttention => DeltaState::new(stream, &delta, 1).map(Some),
            LayerType::FullAttention => Ok(None),
        });
        Ok(CudaSequence {
            window,
            rows,
            chunk,
            tokens: Buffer::zeros(stream, &[chunk])?,
            position: Buffer::zeros(stream, &[1])?,
            hidden: Buffer::zeros(stream, &[chunk, hidden])?,
            x: Buffer::zeros(stream, &[chunk, hidden])?,
            update: Buffer::zeros(stream, &[chunk, hidden])?,
            normed: Buffer::zeros(stream, &[rows, hidden])?,
            logits: Buffer::zeros(stream, &[rows, config.vocab_size])?,
            scratch: Scratch {
                attention: AttentionScratch::new(stream, chunk, &kv)?,
                delta: DeltaScratch::new(stream, &delta, chunk)?,
                ffn: match &config.ffn {
                    FfnConfig::Dense { intermediate_size } => {
                        FeedForwardScratch::Dense(FfnScratch::new(stream, chunk, *intermediate_size)?)
                    }
                    FfnConfig::Sparse(sparse) => FeedForwardScratch::Sparse(Box::new(ExpertsScratch::new(
                        stream, chunk, hidden, sparse,
                    )?)),
                },
            },
            kv: store,
            states: states.collect::<Result<_, _>>()?,
        })
    }
}
