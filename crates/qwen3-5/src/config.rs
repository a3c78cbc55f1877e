use std::path::Path;

use decode_loop::KvShape;
use structure_core::Refusal;

use crate::config_json;

/// The shape of a model, as its `config.json` fixes it. Every value has been checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Token ids the embedding has rows for.
    pub vocab_size: usize,
    /// Elements of a row of the residual stream.
    pub hidden_size: usize,
    /// The mixer of each layer, first layer first.
    pub layer_types: Vec<LayerType>,
    /// The feed-forward of every layer.
    pub ffn: FfnConfig,
    /// Query heads of a full-attention layer: a multiple of `num_key_value_heads`.
    pub num_attention_heads: usize,
    /// Key and value heads of a full-attention layer.
    pub num_key_value_heads: usize,
    /// Elements of an attention head.
    pub head_dim: usize,
    /// Elements of a head that are rotated, the first ones: an even number up to `head_dim`.
    pub rotary_dim: usize,
    /// The base of the rotation's frequencies.
    pub rope_theta: f32,
    /// What RMS norms add to the mean of squares.
    pub rms_norm_eps: f32,
    /// Taps of a gated-delta layer's causal convolution.
    pub linear_conv_kernel_dim: usize,
    /// Query and key heads of a gated-delta layer.
    pub linear_num_key_heads: usize,
    /// Value heads of a gated-delta layer: a multiple of `linear_num_key_heads`.
    pub linear_num_value_heads: usize,
    /// Elements of a query or key head of a gated-delta layer.
    pub linear_key_head_dim: usize,
    /// Elements of a value head of a gated-delta layer.
    pub linear_value_head_dim: usize,
    /// The window: the most positions there can be.
    pub max_position_embeddings: usize,
    /// Whether the embedding is the `lm_head` too.
    pub tie_word_embeddings: bool,
    /// Tokens that end a text, from `generation_config.json` where it names any.
    pub eos_token_ids: Vec<u32>,
}

/// What mixes the tokens in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// The gated delta rule.
    LinearAttention,
    /// Attention over all tokens before.
    FullAttention,
}

/// What follows the mixer in a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FfnConfig {
    /// One gated feed-forward.
    Dense {
        /// Its features.
        intermediate_size: usize,
    },
    /// Routed experts and a shared one.
    Sparse(SparseFfnConfig),
}

/// The experts of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SparseFfnConfig {
    /// Routed experts.
    pub num_experts: usize,
    /// Experts that serve a token, at most `num_experts`.
    pub num_experts_per_tok: usize,
    /// Features of a routed expert.
    pub moe_intermediate_size: usize,
    /// Features of the shared expert.
    pub shared_expert_intermediate_size: usize,
}

impl Config {
    /// The keys and values of its full-attention layers, with room for `window` positions.
    pub fn kv_shape(&self, window: usize) -> KvShape {
        KvShape {
            layers: self.layer_types.iter().filter(|kind| **kind == LayerType::FullAttention).count(),
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            window,
        }
    }

    /// Reads `config.json` of a checkpoint folder, and the end tokens of `generation_config.json` if there is one. Fields
    /// that are left out have the values that transformers gives them.
    ///
    /// # Errors
    /// [`Refusal::File`] for a file that cannot be read, a model of another type or a variant of it that this host does
    /// not run; [`Refusal::DimOutside`] for a dimension out of bounds.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self, Refusal> {
        config_json::load(folder.as_ref())
    }
}
