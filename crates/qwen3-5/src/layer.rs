//! A decoder layer: a mixer and a feed-forward, each behind a norm and added to the residual stream.

use decode_loop::CpuKv;
use structure_core::Refusal;

use crate::attention::Attention;
use crate::config::{FfnConfig, LayerType};
use crate::experts::{Bank, SparseFfn};
use crate::ffn::DenseFfn;
use crate::gated_delta::{GatedDelta, GatedDeltaState};
use crate::loader::Loader;
use crate::norm::RmsNorm;
use crate::rope::Rope;
use crate::seats::{SeatId, Seats};

const INPUT_NORM: &str = "input_layernorm";
const POST_ATTENTION_NORM: &str = "post_attention_layernorm";

pub(crate) struct Layer {
    path: String,
    input_norm: RmsNorm,
    mixer: Mixer,
    post_attention_norm: RmsNorm,
    ffn: Ffn,
}

pub(crate) enum Mixer {
    GatedDelta(Box<GatedDelta>),
    Attention(Box<Attention>),
}

pub(crate) enum Ffn {
    Dense(DenseFfn),
    Sparse(Box<SparseFfn>),
}

/// What a layer remembers of the rows before.
pub(crate) enum LayerState {
    GatedDelta(GatedDeltaState),
    Attention(Box<dyn CpuKv>),
}

impl Layer {
    pub fn load(loader: &mut Loader<'_>, path: &str, layer_type: LayerType) -> Result<Self, Refusal> {
        let hidden = loader.config.hidden_size;
        Ok(Layer {
            path: path.to_string(),
            input_norm: RmsNorm::load(loader, &format!("{path}.{INPUT_NORM}"), hidden)?,
            mixer: match layer_type {
                LayerType::LinearAttention => {
                    Mixer::GatedDelta(Box::new(GatedDelta::load(loader, &format!("{path}.linear_attn"))?))
                }
                LayerType::FullAttention => {
                    Mixer::Attention(Box::new(Attention::load(loader, &format!("{path}.self_attn"))?))
                }
            },
            post_attention_norm: RmsNorm::load(loader, &format!("{path}.{POST_ATTENTION_NORM}"), hidden)?,
            ffn: match &loader.config.ffn {
                FfnConfig::Dense { intermediate_size } => {
                    Ffn::Dense(DenseFfn::load(loader, &format!("{path}.mlp"), *intermediate_size)?)
                }
                FfnConfig::Sparse(sparse) => {
                    Ffn::Sparse(Box::new(SparseFfn::load(loader, &format!("{path}.mlp"), sparse)?))
                }
            },
        })
    }

    /// Norm, mixer, norm, feed-forward.
    #[cfg(kernels_built)]
    pub fn parts(&self) -> (&RmsNorm, &Mixer, &RmsNorm, &Ffn) {
        (&self.input_norm, &self.mixer, &self.post_attention_norm, &self.ffn)
    }

    pub fn new_state(&self) -> LayerState {
        match &self.mixer {
            Mixer::GatedDelta(mixer) => LayerState::GatedDelta(mixer.new_state()),
            Mixer::Attention(mixer) => LayerState::Attention(Box::new(mixer.new_cache())),
        }
    }

    /// The rotary embedding of a full-attention layer.
    pub fn rope_mut(&mut self) -> Option<&mut Rope> {
        match &mut self.mixer {
            Mixer::GatedDelta(_) => None,
            Mixer::Attention(mixer) => Some(&mut mixer.rope),
        }
    }

    /// Each norm whose rows seats alone read, by its path, with those seats.
    pub fn feeds(&self) -> Vec<(String, Vec<SeatId>)> {
        let mixer = match &self.mixer {
            Mixer::GatedDelta(mixer) => mixer.input_seats(),
            Mixer::Attention(mixer) => mixer.input_seats(),
        };
        let mut feeds = vec![(self.norm_path(INPUT_NORM), mixer)];
        if let Ffn::Dense(ffn) = &self.ffn {
            feeds.push((self.norm_path(POST_ATTENTION_NORM), ffn.input_seats()));
        }
        feeds
    }

    /// The norm with this path.
    pub fn norm_mut(&mut self, path: &str) -> Option<&mut RmsNorm> {
        if path == self.norm_path(INPUT_NORM) {
            Some(&mut self.input_norm)
        } else if path == self.norm_path(POST_ATTENTION_NORM) {
            Some(&mut self.post_attention_norm)
        } else {
            None
        }
    }

    fn norm_path(&self, name: &str) -> String {
        format!("{}.{name}", self.path)
    }

    pub fn bank(&self) -> Option<&Bank> {
        match &self.ffn {
            Ffn::Dense(_) => None,
            Ffn::Sparse(ffn) => Some(ffn.bank()),
        }
    }

    /// Adds the layer to the residual stream `hidden` `[rows, hidden]`; `position` is that of the first row.
    pub fn forward(
        &self,
        seats: &mut Seats,
        state: &mut LayerState,
        hidden: &mut [f32],
        rows: usize,
        position: usize,
    ) -> Result<(), Refusal> {
        let x = self.input_norm.apply(hidden);
        let mixed = match (&self.mixer, state) {
            (Mixer::GatedDelta(mixer), LayerState::GatedDelta(state)) if mixer.fits(state) => {
                mixer.forward(seats, state, &x, rows)?
            }
            (Mixer::Attention(mixer), LayerState::Attention(cache)) if mixer.fits(&**cache) => {
                mixer.forward(seats, &mut **cache, &x, rows, position)?
            }
            (_, state) => {
                let what = "state of a layer".to_string();
                let (expected, got) = (self.new_state().shape(), state.shape());
                return Err(Refusal::ShapeMismatch { what, expected, got });
            }
        };
        add(hidden, &mixed);
        let x = self.post_attention_norm.apply(hidden);
        let fed = match &self.ffn {
            Ffn::Dense(ffn) => ffn.forward(seats, &x, rows)?,
            Ffn::Sparse(ffn) => ffn.forward(seats, &x, rows)?,
        };
        add(hidden, &fed);
        Ok(())
    }
}

impl LayerState {
    /// Keys and values, where the layer attends.
    pub fn kv(&self) -> Option<&dyn CpuKv> {
        match self {
            LayerState::GatedDelta(_) => None,
            LayerState::Attention(kv) => Some(&**kv),
        }
    }

    /// [`kv`](Self::kv), to be replaced before the first row.
    pub fn kv_mut(&mut self) -> Option<&mut Box<dyn CpuKv>> {
        match self {
            LayerState::GatedDelta(_) => None,
            LayerState::Attention(kv) => Some(kv),
        }
    }

    /// Forgets all rows; `fresh` is the state of the same layer before any.
    pub fn reset(&mut self, fresh: LayerState) {
        match self {
            LayerState::GatedDelta(_) => *self = fresh,
            LayerState::Attention(kv) => kv.clear(),
        }
    }

    fn shape(&self) -> Vec<usize> {
        match self {
            LayerState::GatedDelta(state) => state.shape().to_vec(),
            LayerState::Attention(cache) => cache.shape().to_vec(),
        }
    }
}

fn add(hidden: &mut [f32], update: &[f32]) {
    hidden.iter_mut().zip(update).for_each(|(hidden, update)| *hidden += update);
}
