//! `config.json` and `generation_config.json`, as the many versions of transformers write them.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use structure_core::{Bound, Refusal};

use crate::config::{Config, FfnConfig, LayerType, SparseFfnConfig};

/// The text model's fields: at the top of the file, or under `text_config` where there is a vision tower too.
#[derive(Deserialize)]
struct Text {
    model_type: Option<String>,
    vocab_size: Option<u64>,
    hidden_size: Option<u64>,
    intermediate_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    layer_types: Option<Vec<String>>,
    full_attention_interval: Option<u64>,
    num_attention_heads: Option<u64>,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    rms_norm_eps: Option<f64>,
    rope_parameters: Option<RopeParameters>,
    rope_scaling: Option<RopeParameters>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    linear_conv_kernel_dim: Option<u64>,
    linear_num_key_heads: Option<u64>,
    linear_num_value_heads: Option<u64>,
    linear_key_head_dim: Option<u64>,
    linear_value_head_dim: Option<u64>,
    max_position_embeddings: Option<u64>,
    tie_word_embeddings: Option<bool>,
    eos_token_id: Option<TokenIds>,
    num_experts: Option<u64>,
    num_experts_per_tok: Option<u64>,
    moe_intermediate_size: Option<u64>,
    shared_expert_intermediate_size: Option<u64>,
}

#[derive(Deserialize)]
struct Nested {
    text_config: Option<Text>,
}

#[derive(Deserialize)]
struct RopeParameters {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
}

#[derive(Deserialize)]
struct Generation {
    eos_token_id: Option<TokenIds>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    fn into_vec(self) -> Vec<u32> {
        match self {
            TokenIds::One(id) => vec![id],
            TokenIds::Many(ids) => ids,
        }
    }
}

pub(crate) fn load(folder: &Path) -> Result<Config, Refusal> {
    if !folder.is_dir() {
        return Err(Refusal::file(folder, "no such folder"));
    }
    let path = folder.join("config.json");
    let top: Text = read(&path)?;
    let nested: Nested = read(&path)?;
    let mut config = match nested.text_config {
        None => Reader { path: &path }.config(top)?,
        Some(text) => {
            // What the whole model says of the head and the end tokens stands for its text part.
            let text = Text {
                model_type: text.model_type.or(top.model_type),
                tie_word_embeddings: top.tie_word_embeddings.or(text.tie_word_embeddings),
                eos_token_id: top.eos_token_id.or(text.eos_token_id),
                ..text
            };
            Reader { path: &path }.config(text)?
        }
    };
    let path = folder.join("generation_config.json");
    if path.exists() {
        let generation: Generation = read(&path)?;
        if let Some(ids) = generation.eos_token_id {
            config.eos_token_ids = ids.into_vec();
        }
    }
    Ok(config)
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Refusal> {
    let text = std::fs::read(path).map_err(|error| Refusal::file(path, error))?;
    serde_json::from_slice(&text).map_err(|error| Refusal::file(path, error))
}

/// Large enough for any model there is, and small enough that no product of dimensions overflows.
const MAX_VOCAB: u64 = 1 << 24;
const MAX_WIDTH: u64 = 1 << 20;
const MAX_COUNT: u64 = 1 << 12;
const MAX_POSITIONS: u64 = 1 << 24;

/// Checks fields, and names the file that they are from.
struct Reader<'a> {
    path: &'a Path,
}

impl Reader<'_> {
    fn config(&self, text: Text) -> Result<Config, Refusal> {
        let sparse = match text.model_type.as_deref() {
            Some("qwen3_5" | "qwen3_5_text") => false,
            Some("qwen3_5_moe" | "qwen3_5_moe_text") => true,
            other => return Err(self.unsupported("model_type", other, "qwen3_5 and qwen3_5_moe")),
        };
        if let Some(act) = text.hidden_act.as_deref().filter(|&act| act != "silu") {
            return Err(self.unsupported("hidden_act", Some(act), "silu"));
        }
        if text.attention_bias == Some(true) {
            return Err(self.unsupported("attention_bias", Some("true"), "false"));
        }
        // The two model types differ in what transformers assumes where a field is left out.
        let or = |value: Option<u64>, dense: u64, moe: u64| value.unwrap_or(if sparse { moe } else { dense });

        let head_dim = self.dim("head_dim", text.head_dim.unwrap_or(256), 1..=MAX_COUNT)?;
        let heads = self.dim("num_attention_heads", text.num_attention_heads.unwrap_or(16), 1..=MAX_COUNT)?;
        let kv_heads = self.dim("num_key_value_heads", or(text.num_key_value_heads, 4, 2), 1..=MAX_COUNT)?;
        let key_heads =
            self.dim("linear_num_key_heads", text.linear_num_key_heads.unwrap_or(16), 1..=MAX_COUNT)?;
        let value_heads =
            self.dim("linear_num_value_heads", text.linear_num_value_heads.unwrap_or(32), 1..=MAX_COUNT)?;
        let rope = Rope::of(&text);
        let layers = self.dim("num_hidden_layers", or(text.num_hidden_layers, 32, 40), 1..=MAX_COUNT)?;

        Ok(Config {
            vocab_size: self.dim("vocab_size", text.vocab_size.unwrap_or(248_320), 1..=MAX_VOCAB)?,
            hidden_size: self.dim("hidden_size", or(text.hidden_size, 4096, 2048), 1..=MAX_WIDTH)?,
            layer_types: self.layer_types(&text, layers)?,
            ffn: self.ffn(&text, sparse)?,
            num_attention_heads: self.multiple("num_attention_heads", heads, kv_heads)?,
            num_key_value_heads: kv_heads,
            head_dim,
            rotary_dim: self.rotary_dim(&rope, head_dim)?,
            rope_theta: self.real("rope_theta", rope.theta, 1.0..=1e12)?,
            rms_norm_eps: self.real("rms_norm_eps", text.rms_norm_eps.unwrap_or(1e-6), 1e-12..=1.0)?,
            linear_conv_kernel_dim: self.dim(
                "linear_conv_kernel_dim",
                text.linear_conv_kernel_dim.unwrap_or(4),
                1..=64,
            )?,
            linear_num_key_heads: key_heads,
            linear_num_value_heads: self.multiple("linear_num_value_heads", value_heads, key_heads)?,
            linear_key_head_dim: self.dim(
                "linear_key_head_dim",
                text.linear_key_head_dim.unwrap_or(128),
                1..=MAX_COUNT,
            )?,
            linear_value_head_dim: self.dim(
                "linear_value_head_dim",
                text.linear_value_head_dim.unwrap_or(128),
                1..=MAX_COUNT,
            )?,
            max_position_embeddings: self.dim(
                "max_position_embeddings",
                text.max_position_embeddings.unwrap_or(32_768),
                1..=MAX_POSITIONS,
            )?,
            tie_word_embeddings: text.tie_word_embeddings.unwrap_or(false),
            eos_token_ids: text.eos_token_id.map(TokenIds::into_vec).unwrap_or_default(),
        })
    }

    fn layer_types(&self, text: &Text, layers: usize) -> Result<Vec<LayerType>, Refusal> {
        let Some(names) = &text.layer_types else {
            let interval = text.full_attention_interval.unwrap_or(4);
            let interval = self.dim("full_attention_interval", interval, 1..=MAX_COUNT)?;
            return Ok((1..=layers)
                .map(|nth| match nth.is_multiple_of(interval) {
                    true => LayerType::FullAttention,
                    false => LayerType::LinearAttention,
                })
                .collect());
        };
        self.dim("num_hidden_layers", layers as u64, names.len() as u64..=names.len() as u64)?;
        names
            .iter()
            .map(|name| match name.as_str() {
                "linear_attention" => Ok(LayerType::LinearAttention),
                "full_attention" => Ok(LayerType::FullAttention),
                other => {
                    Err(self.unsupported("layer_types", Some(other), "linear_attention and full_attention"))
                }
            })
            .collect()
    }

    fn ffn(&self, text: &Text, sparse: bool) -> Result<FfnConfig, Refusal> {
        if !sparse {
            let intermediate = text.intermediate_size.unwrap_or(12_288);
            let intermediate_size = self.dim("intermediate_size", intermediate, 1..=MAX_WIDTH)?;
            return Ok(FfnConfig::Dense { intermediate_size });
        }
        let experts = text.num_experts.unwrap_or(256);
        let moe = text.moe_intermediate_size.unwrap_or(512);
        let shared = text.shared_expert_intermediate_size.unwrap_or(512);
        Ok(FfnConfig::Sparse(SparseFfnConfig {
            num_experts: self.dim("num_experts", experts, 1..=MAX_COUNT)?,
            num_experts_per_tok: self.dim(
                "num_experts_per_tok",
                text.num_experts_per_tok.unwrap_or(8),
                1..=experts,
            )?,
            moe_intermediate_size: self.dim("moe_intermediate_size", moe, 1..=MAX_WIDTH)?,
            shared_expert_intermediate_size: self.dim(
                "shared_expert_intermediate_size",
                shared,
                1..=MAX_WIDTH,
            )?,
        }))
    }

    fn rotary_dim(&self, rope: &Rope<'_>, head_dim: usize) -> Result<usize, Refusal> {
        // "mrope" is what older files call the default with three axes, which agree on text.
        if let Some(other) = rope.kind.filter(|kind| !["default", "mrope"].contains(kind)) {
            return Err(self.unsupported("rope_type", Some(other), "default"));
        }
        let factor = f64::from(self.real("partial_rotary_factor", rope.partial_rotary_factor, 0.0..=1.0)?);
        let bound = Bound { min: 2, max: head_dim as u64, multiple_of: 2 };
        self.bounded("rotary dim", (head_dim as f64 * factor) as u64, bound)
    }

    fn multiple(&self, name: &'static str, value: usize, of: usize) -> Result<usize, Refusal> {
        self.bounded(name, value as u64, Bound { min: of as u64, max: MAX_COUNT, multiple_of: of as u64 })
    }

    fn dim(
        &self,
        name: &'static str,
        value: u64,
        bound: std::ops::RangeInclusive<u64>,
    ) -> Result<usize, Refusal> {
        self.bounded(name, value, Bound { min: *bound.start(), max: *bound.end(), multiple_of: 1 })
    }

    fn bounded(&self, dim: &'static str, value: u64, bound: Bound) -> Result<usize, Refusal> {
        match usize::try_from(value) {
            Ok(size) if bound.takes(value) => Ok(size),
            _ => Err(Refusal::DimOutside { what: self.path.display().to_string(), dim, value, bound }),
        }
    }

    fn real(&self, name: &str, value: f64, bound: std::ops::RangeInclusive<f64>) -> Result<f32, Refusal> {
        if bound.contains(&value) {
            return Ok(value as f32);
        }
        Err(Refusal::file(
            self.path,
            format!("{name} = {value} is outside {}..={}", bound.start(), bound.end()),
        ))
    }

    fn unsupported(&self, field: &str, value: Option<&str>, supported: &str) -> Refusal {
        let value = value.unwrap_or("missing");
        Refusal::file(self.path, format!("{field} is {value}; this host runs {supported}"))
    }
}

/// The rotary fields, from wherever they are.
struct Rope<'a> {
    kind: Option<&'a str>,
    theta: f64,
    partial_rotary_factor: f64,
}

impl<'a> Rope<'a> {
    fn of(text: &'a Text) -> Self {
        let parameters = text.rope_parameters.as_ref().or(text.rope_scaling.as_ref());
        Rope {
            kind: parameters.and_then(|p| p.rope_type.as_deref()),
            theta: parameters.and_then(|p| p.rope_theta).or(text.rope_theta).unwrap_or(10_000.0),
            partial_rotary_factor: parameters
                .and_then(|p| p.partial_rotary_factor)
                .or(text.partial_rotary_factor)
                .unwrap_or(0.25),
        }
    }
}
