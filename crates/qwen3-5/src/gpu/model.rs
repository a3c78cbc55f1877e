use std::fmt;

use decode_loop::{CudaHost, HostShape, Sequence, StepBuffers};
use device::{Buffer, CudaDevice, Stream, Workspace};
use half::bf16;
use linear_proj::{DenseWeights, Host, Seat};
use structure_core::{Band, Bound, Refusal, StructureId};

use super::layer::{CudaLayer, CudaNorm, Pass};
use super::seats::CudaSeats;
use super::sequence::{CudaSequence, PROMPT_ROWS};
use crate::config::LayerType;
use crate::cuda::{Embed, prepare};
use crate::layer::Layer;
use crate::model::check_tokens;
use crate::seats::SeatId;
use crate::{Config, KERNELS, Model};

/// The rows of a step: what every kernel of it serves row-invariantly.
const STEP_ROWS: Band = Band { min: 1, max: 16 };

/// A model in device memory.
///
/// Its seats are those of the decoder, by their paths in the checkpoint; see [`Host`]. Bind them with
/// [`workspace`](Self::workspace), so that variants with a form of their own for prompts can use it, and before a loop is built: a
/// captured step holds what was bound.
pub struct CudaModel {
    config: Config,
    stream: Stream,
    workspace: Workspace,
    /// BF16 `[vocab, hidden]`.
    embedding: Buffer<bf16>,
    layers: Vec<CudaLayer>,
    norm: CudaNorm,
    lm_head: SeatId,
    seats: CudaSeats,
    sequence: Option<CudaSequence>,
}

/// The fewest bytes that a step must touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepBytes {
    /// Of all weights as they are bound; of experts, those that serve a token.
    pub weights: u64,
    /// Of recurrent states, read and written.
    pub states: u64,
    /// Of the keys and values of the context.
    pub kv: u64,
}

impl StepBytes {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.weights + self.states + self.kv
    }
}

impl CudaModel {
    /// Uploads a model, in BF16; the MTP layer stays behind. Weights that were BF16 keep their bits.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] with the bytes asked and free, [`Refusal::ArchUnsupported`] for a device that the kernels were not
    /// built for, [`Refusal::Cuda`].
    pub fn new(model: &Model, gpu: &CudaDevice) -> Result<Self, Refusal> {
        KERNELS.check(StructureId { structure: "qwen3_5", variant: "cuda" }, gpu.compute_capability())?;
        let config = model.config().clone();
        let projections = model.seats.projections(model.lm_head());
        let table = model.embedding().dense()?;
        let weights = projections.iter().map(|(_, weights)| weights.n() * weights.k());
        let experts =
            model.layers.iter().filter_map(Layer::bank).map(|bank| bank.dims.iter().product::<usize>());
        // Of an expert, down has half of what gate and up have together.
        let elements = table.n() * table.k() + weights.sum::<usize>() + experts.sum::<usize>() / 2 * 3;
        gpu.require("the model's weights", (elements * size_of::<bf16>()) as u64)?;
        let stream = gpu.new_stream()?;
        prepare(&stream)?;
        let embedding = Buffer::from_host(&stream, &table.to_bf16(), &[table.n(), table.k()])?;
        let seats = CudaSeats::upload(&stream, projections)?;
        let mut attention = 0;
        let layers = model.layers.iter().zip(&config.layer_types);
        let layers = layers.map(|(layer, kind)| {
            let index = attention;
            attention += usize::from(*kind == LayerType::FullAttention);
            CudaLayer::upload(&stream, &config, layer, index)
        });
        Ok(CudaModel {
            layers: layers.collect::<Result<_, _>>()?,
            norm: CudaNorm::upload(&stream, model.final_norm())?,
            lm_head: model.lm_head(),
            workspace: Workspace::new(&stream, PROMPT_ROWS),
            config,
            stream,
            embedding,
            seats,
            sequence: None,
        })
    }

    /// Its shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Scratch memory for variants that are bound to its seats.
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// The fewest bytes that a step of one token after `context` others must touch.
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`] before the first sequence.
    pub fn step_bytes(&self, context: usize) -> Result<StepBytes, Refusal> {
        let sequence = self.sequence.as_ref().ok_or_else(no_sequence)?;
        let shape = sequence.kv.shape();
        let position = shape.layers * 2 * shape.kv_heads * shape.head_dim * sequence.kv.element_bytes();
        let states: usize = sequence.states.iter().flatten().map(|state| 2 * state.bytes()).sum();
        let experts: usize = self.layers.iter().map(CudaLayer::expert_bytes).sum();
        Ok(StepBytes {
            weights: self.seats.bytes() + experts as u64,
            states: states as u64,
            kv: (context * position) as u64,
        })
    }

    /// Queues a pass over the first `rows` tokens of the sequence, and the logits of its last `logits` rows.
    fn pass(&mut self, rows: usize, logits: usize) -> Result<(), Refusal> {
        let sequence = self.sequence.as_mut().ok_or_else(no_sequence)?;
        let embed = Embed {
            table: self.embedding.view(),
            tokens: sequence.tokens.view(),
            out: sequence.hidden.view_mut(),
            rows,
            hidden: self.config.hidden_size,
        };
        embed.queue(&self.stream)?;
        let mut pass = Pass {
            stream: &self.stream,
            rows,
            position: &sequence.position,
            seats: &mut self.seats,
            kv: &mut *sequence.kv,
            hidden: &mut sequence.hidden,
            x: &mut sequence.x,
            update: &mut sequence.update,
            updated: false,
        };
        for (layer, state) in self.layers.iter_mut().zip(&mut sequence.states) {
            layer.forward(&mut pass, state, &mut sequence.scratch)?;
        }
        if logits == 0 {
            return Ok(());
        }
        self.norm.queue_last(&mut pass, rows - logits, logits, &mut sequence.normed)?;
        self.seats.project(self.lm_head, sequence.normed.view(), sequence.logits.view_mut(), logits)
    }

    /// One chunk of a prompt at the position that the device holds.
    fn chunk(&mut self, tokens: &[u32], is_last: bool) -> Result<(), Refusal> {
        let sequence = self.sequence.as_mut().ok_or_else(no_sequence)?;
        // Ids were checked against the vocabulary, which an i32 holds.
        let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        sequence.tokens.copy_range_from_host(&self.stream, 0, &ids)?;
        self.pass(tokens.len(), usize::from(is_last))
    }
}

impl CudaHost for CudaModel {
    fn shape(&self) -> HostShape {
        HostShape { vocab: self.config.vocab_size, max_positions: self.config.max_position_embeddings }
    }

    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Refusal> {
        let positions = self.config.max_position_embeddings;
        if sequence.window > positions {
            return Err(Refusal::WindowExceeded { needed: sequence.window, window: positions });
        }
        if !STEP_ROWS.takes(sequence.rows) {
            return Err(rows_outside(sequence.rows, STEP_ROWS.max));
        }
        self.sequence = None;
        self.sequence = Some(CudaSequence::new(&self.stream, &self.config, sequence)?);
        Ok(())
    }

    fn kv_bytes(&self) -> u64 {
        self.sequence.as_ref().map_or(0, |sequence| sequence.kv.bytes())
    }

    fn reset(&mut self) -> Result<(), Refusal> {
        let sequence = self.sequence.as_mut().ok_or_else(no_sequence)?;
        sequence.position.fill_bytes(&self.stream, 0)?;
        for state in sequence.states.iter_mut().flatten() {
            state.reset(&self.stream)?;
        }
        Ok(())
    }

    fn prompt(&mut self, tokens: &[u32]) -> Result<(), Refusal> {
        let sequence = self.sequence.as_mut().ok_or_else(no_sequence)?;
        let (chunk, window) = (sequence.chunk, sequence.window);
        let mut position = [0];
        sequence.position.copy_to_host(&self.stream, &mut position)?;
        check_tokens(tokens, self.config.vocab_size)?;
        let needed = position[0] as usize + tokens.len();
        if needed > window {
            return Err(Refusal::WindowExceeded { needed, window });
        }
        let mut done = 0;
        for part in tokens.chunks(chunk) {
            done += part.len();
            self.chunk(part, done == tokens.len())?;
            position[0] += part.len() as i32;
            let sequence = self.sequence.as_mut().ok_or_else(no_sequence)?;
            sequence.position.copy_from_host(&self.stream, &position)?;
        }
        Ok(())
    }

    fn step(&mut self, rows: usize) -> Result<(), Refusal> {
        let most = self.sequence.as_ref().ok_or_else(no_sequence)?.rows;
        if !(1..=most).contains(&rows) {
            return Err(rows_outside(rows, most));
        }
        self.pass(rows, rows)
    }

    fn buffers(&mut self) -> Result<StepBuffers<'_>, Refusal> {
        let sequence = self.sequence.as_mut().ok_or_else(no_sequence)?;
        Ok(StepBuffers {
            tokens: sequence.tokens.view_mut(),
            position: sequence.position.view_mut(),
            logits: sequence.logits.view_mut(),
        })
    }
}

impl Host for CudaModel {
    fn seats(&self) -> Vec<&Seat> {
        self.seats.all()
    }

    fn seat_mut(&mut self, path: &str) -> Option<&mut Seat> {
        self.seats.by_path(path)
    }

    fn weights(&self, path: &str) -> Option<DenseWeights<'_>> {
        self.seats.weights(path)
    }
}

impl fmt::Debug for CudaModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaModel").field("stream", &self.stream).finish_non_exhaustive()
    }
}

fn rows_outside(rows: usize, most: usize) -> Refusal {
    Refusal::DimOutside {
        what: "a step".to_string(),
        dim: "rows",
        value: rows as u64,
        bound: Bound { min: 1, max: most as u64, multiple_of: 1 },
    }
}

fn no_sequence() -> Refusal {
    Refusal::ValueOutside {
        what: "the sequence".to_string(),
        value: "none".to_string(),
        bound: "begun before it is used".to_string(),
    }
}
