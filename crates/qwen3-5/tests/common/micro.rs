//! Checkpoints of a few kilobytes, made here: every part of the model, and nothing trained.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::bf16;
use qwen3_5::Model;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use structure_core::Refusal;
use tempfile::TempDir;

pub const VOCAB: usize = 19;
pub const HIDDEN: usize = 24;
const KEY_HEADS: usize = 1;
const VALUE_HEADS: usize = 2;
const LINEAR_DIM: usize = 8;
const TAPS: usize = 3;
const HEADS: usize = 2;
const HEAD_DIM: usize = 12;
const INTERMEDIATE: usize = 40;
pub const EXPERTS: usize = 5;
pub const EXPERT_INTERMEDIATE: usize = 10;

/// A checkpoint before it is written.
#[derive(Clone)]
pub struct Micro {
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

#[derive(Clone, PartialEq)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn bf16(shape: &[usize], values: impl IntoIterator<Item = f32>) -> Self {
        let bytes = values.into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect();
        Tensor { dtype: Dtype::BF16, shape: shape.to_vec(), bytes }
    }

    pub fn f32(shape: &[usize], values: impl IntoIterator<Item = f32>) -> Self {
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        Tensor { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }
}

/// The same numbers on every machine, evenly spread over -1..1.
pub struct Noise(pub u64);

impl Noise {
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    pub fn value(&mut self) -> f32 {
        self.next_u64() as f32 / (1u64 << 30) as f32 - 1.0
    }
}

/// A gated-delta layer, a full-attention layer and an MTP layer, with a dense feed-forward.
pub fn dense() -> Micro {
    let mut micro = with_ffn(json!({ "model_type": "qwen3_5_text", "intermediate_size": INTERMEDIATE }));
    for path in ["model.layers.0", "model.layers.1", "mtp.layers.0"] {
        micro.ffn(&format!("{path}.mlp"), INTERMEDIATE);
    }
    micro
}

/// The same with experts, one by one.
pub fn moe() -> Micro {
    let mut micro = with_ffn(json!({
        "model_type": "qwen3_5_moe_text",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "shared_expert_intermediate_size": 14,
    }));
    for path in ["model.layers.0.mlp", "model.layers.1.mlp", "mtp.layers.0.mlp"] {
        micro.add(&format!("{path}.gate.weight"), &[EXPERTS, HIDDEN]);
        micro.add(&format!("{path}.shared_expert_gate.weight"), &[1, HIDDEN]);
        micro.ffn(&format!("{path}.shared_expert"), 14);
        for expert in 0..EXPERTS {
            micro.ffn(&format!("{path}.experts.{expert}"), EXPERT_INTERMEDIATE);
        }
    }
    micro
}

fn with_ffn(ffn: Value) -> Micro {
    let mut config = json!({
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_conv_kernel_dim": TAPS,
        "max_position_embeddings": 64,
        "rope_parameters": { "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5 },
        "tie_word_embeddings": false,
        "eos_token_id": 3,
    });
    let fields = config.as_object_mut().unwrap();
    fields.extend(ffn.as_object().unwrap().clone());
    let mut micro = Micro { config, tensors: BTreeMap::new() };
    let (keys, values) = (KEY_HEADS * LINEAR_DIM, VALUE_HEADS * LINEAR_DIM);
    micro.add("model.embed_tokens.weight", &[VOCAB, HIDDEN]);
    micro.add("lm_head.weight", &[VOCAB, HIDDEN]);
    micro.add("model.norm.weight", &[HIDDEN]);
    let linear = "model.layers.0.linear_attn";
    for (name, shape) in [
        ("in_proj_qkv.weight", &[2 * keys + values, HIDDEN][..]),
        ("in_proj_z.weight", &[values, HIDDEN]),
        ("in_proj_b.weight", &[VALUE_HEADS, HIDDEN]),
        ("in_proj_a.weight", &[VALUE_HEADS, HIDDEN]),
        ("out_proj.weight", &[HIDDEN, values]),
        ("conv1d.weight", &[2 * keys + values, 1, TAPS]),
        ("A_log", &[VALUE_HEADS]),
        ("dt_bias", &[VALUE_HEADS]),
        ("norm.weight", &[LINEAR_DIM]),
    ] {
        micro.add(&format!("{linear}.{name}"), shape);
    }
    for path in ["model.layers.1", "mtp.layers.0"] {
        for (name, shape) in [
            ("q_proj.weight", &[2 * HEADS * HEAD_DIM, HIDDEN][..]),
            ("k_proj.weight", &[HEAD_DIM, HIDDEN]),
            ("v_proj.weight", &[HEAD_DIM, HIDDEN]),
            ("o_proj.weight", &[HIDDEN, HEADS * HEAD_DIM]),
            ("q_norm.weight", &[HEAD_DIM]),
            ("k_norm.weight", &[HEAD_DIM]),
        ] {
            micro.add(&format!("{path}.self_attn.{name}"), shape);
        }
    }
    for path in ["model.layers.0", "model.layers.1", "mtp.layers.0"] {
        micro.add(&format!("{path}.input_layernorm.weight"), &[HIDDEN]);
        micro.add(&format!("{path}.post_attention_layernorm.weight"), &[HIDDEN]);
    }
    micro.add("mtp.fc.weight", &[HIDDEN, 2 * HIDDEN]);
    for name in ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"] {
        micro.add(&format!("mtp.{name}.weight"), &[HIDDEN]);
    }
    micro
}

impl Micro {
    fn ffn(&mut self, path: &str, intermediate: usize) {
        self.add(&format!("{path}.gate_proj.weight"), &[intermediate, HIDDEN]);
        self.add(&format!("{path}.up_proj.weight"), &[intermediate, HIDDEN]);
        self.add(&format!("{path}.down_proj.weight"), &[HIDDEN, intermediate]);
    }

    fn add(&mut self, name: &str, shape: &[usize]) {
        let mut noise = Noise(name.bytes().fold(7, |hash, byte| hash * 31 % 1_000_003 + u64::from(byte)));
        let tensor = Tensor::bf16(shape, (0..shape.iter().product()).map(|_| noise.value() * 0.5));
        self.tensors.insert(name.to_string(), tensor);
    }

    /// Sets a field of the config.
    pub fn set(mut self, field: &str, value: Value) -> Self {
        self.config.as_object_mut().unwrap().insert(field.to_string(), value);
        self
    }

    /// Changes every tensor's name.
    pub fn renamed(mut self, name: impl Fn(&str) -> String) -> Self {
        self.tensors = self.tensors.into_iter().map(|(old, tensor)| (name(&old), tensor)).collect();
        self
    }

    /// Writes one file.
    pub fn write(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        self.write_config(folder.path());
        write_shard(&folder.path().join("model.safetensors"), self.tensors.iter());
        folder
    }

    /// Writes two shards and their index.
    pub fn write_sharded(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        self.write_config(folder.path());
        let mut map = BTreeMap::new();
        for shard in 0..2 {
            let name = format!("model-{}-of-2.safetensors", shard + 1);
            let tensors = self.tensors.iter().enumerate().filter(|(index, _)| index % 2 == shard);
            let tensors: Vec<_> = tensors.map(|(_, tensor)| tensor).collect();
            write_shard(&folder.path().join(&name), tensors.iter().copied());
            map.extend(tensors.iter().map(|(tensor, _)| ((*tensor).clone(), name.clone())));
        }
        let index = json!({ "metadata": {}, "weight_map": map });
        fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        folder
    }

    fn write_config(&self, folder: &Path) {
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
    }

    pub fn load(&self) -> Result<Model, Refusal> {
        Model::load(self.write().path())
    }

    /// The logits of a few tokens, which depend on every weight but those of the MTP layer, and the drafted ones after them.
    pub fn logits(&self) -> Vec<f32> {
        logits(&mut self.load().unwrap())
    }
}

pub fn write_shard<'a>(path: &Path, tensors: impl Iterator<Item = (&'a String, &'a Tensor)>) {
    let views = tensors.map(|(name, tensor)| {
        (name.clone(), TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap())
    });
    fs::write(path, safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()).unwrap();
}

pub fn logits(model: &mut Model) -> Vec<f32> {
    let tokens = [5, 0, 18, 7, 7, 2];
    let mut state = model.new_state(tokens.len()).unwrap();
    let hidden = model.forward(&mut state, &tokens).unwrap();
    let mut logits = model.logits(&hidden).unwrap();
    if model.has_draft() {
        let mut state = model.new_draft_state(tokens.len()).unwrap();
        let drafted = model.draft(&mut state, &hidden.slice(0..tokens.len() - 1), &tokens[1..]).unwrap();
        logits.extend(model.logits(&drafted).unwrap());
    }
    assert!(logits.iter().all(|logit| logit.is_finite()));
    logits
}
