//! What is refused, each in one line that names the thing, its value and its bound.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs;
use std::path::Path;

use common::micro::{self, HIDDEN, Micro, Tensor, VOCAB};
use qwen3_5::Model;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use structure_core::Refusal;

fn refusal(folder: &Path) -> String {
    let line = Model::load(folder).unwrap_err().to_string();
    assert!(!line.contains('\n'), "{line}");
    line
}

fn assert_refused(folder: &Path, parts: &[&str]) {
    let line = refusal(folder);
    for part in parts {
        assert!(line.contains(part), "`{part}` is not in: {line}");
    }
}

#[test]
fn missing_files() {
    assert_refused(Path::new("no/such/folder"), &["no/such/folder", "no such folder"]);
    let folder = tempfile::tempdir().unwrap();
    assert_refused(folder.path(), &["config.json", "No such file"]);
    let folder = micro::dense().write();
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    assert_refused(folder.path(), &["neither model.safetensors.index.json nor model.safetensors"]);
    let folder = micro::dense().write_sharded();
    fs::remove_file(folder.path().join("model-2-of-2.safetensors")).unwrap();
    assert_refused(folder.path(), &["model-2-of-2.safetensors", "No such file"]);
}

/// Rewrites a file of a checkpoint.
fn edit(folder: &Path, file: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let path = folder.join(file);
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

#[test]
fn truncated_shards() {
    for sharded in [false, true] {
        let micro = micro::dense();
        let (folder, shard) = match sharded {
            false => (micro.write(), "model.safetensors"),
            true => (micro.write_sharded(), "model-2-of-2.safetensors"),
        };
        let path = folder.path();
        edit(path, shard, |bytes| bytes.truncate(bytes.len() - 1));
        assert_refused(path, &[shard, "bytes of tensors, the file has"]);
        edit(path, shard, |bytes| bytes.truncate(100));
        assert_refused(path, &[shard, "the header claims", "the file has 92 after it"]);
        edit(path, shard, |bytes| bytes.truncate(7));
        assert_refused(path, &[shard, "7 bytes, a safetensors file has at least 8"]);
        edit(path, shard, |bytes| bytes.clear());
        assert_refused(path, &[shard, "0 bytes"]);
    }
}

#[test]
fn headers_that_claim_too_much() {
    for claim in [1 << 20, u64::MAX, u64::MAX - 7, 1 << 63] {
        let folder = micro::dense().write();
        edit(folder.path(), "model.safetensors", |bytes| bytes[..8].copy_from_slice(&claim.to_le_bytes()));
        assert_refused(folder.path(), &["model.safetensors", &format!("claims {claim} bytes")]);
    }
    // Tensors that end far outside of the file, and one whose size no address reaches.
    for (shape, end) in
        [("[4611686018427387904]", "18446744073709551615"), ("[9223372036854775807, 9]", "16")]
    {
        let folder = micro::dense().write();
        let header = format!(r#"{{"a": {{"dtype": "BF16", "shape": {shape}, "data_offsets": [0, {end}]}}}}"#);
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 16]].concat();
        fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        assert_refused(folder.path(), &["model.safetensors", "unreadable header"]);
    }
    let folder = micro::dense().write();
    let header =
        r#"{"a": {"dtype": "U8", "shape": [2305843009213693951], "data_offsets": [0, 2305843009213693951]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 16]].concat();
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    assert_refused(folder.path(), &["describes 2305843009213693951 bytes of tensors, the file has 16"]);
}

#[test]
fn indices_that_name_what_is_not_there() {
    let index = |change: &dyn Fn(&mut Value)| {
        let folder = micro::dense().write_sharded();
        edit(folder.path(), "model.safetensors.index.json", |bytes| {
            let mut index: Value = serde_json::from_slice(bytes).unwrap();
            change(&mut index["weight_map"]);
            *bytes = index.to_string().into_bytes();
        });
        refusal(folder.path())
    };
    let line = index(&|map| map["model.absent.weight"] = json!("model-1-of-2.safetensors"));
    assert!(line.contains("model-1-of-2.safetensors: tensor `model.absent.weight` is missing"), "{line}");
    // In the other shard than the index says.
    let line = index(&|map| {
        let other = if map["lm_head.weight"] == "model-1-of-2.safetensors" { 2 } else { 1 };
        map["lm_head.weight"] = json!(format!("model-{other}-of-2.safetensors"));
    });
    assert!(line.contains("tensor `lm_head.weight` is missing"), "{line}");
    let line = index(&|map| map["lm_head.weight"] = json!("../secret"));
    assert!(line.contains("`../secret`, which is not a file's name"), "{line}");
    let line = index(&|map| *map = json!(7));
    assert!(line.contains("model.safetensors.index.json: invalid type"), "{line}");
}

#[test]
fn a_tensor_in_two_shards() {
    let folder = micro::dense().write();
    let again = [("lm_head.weight".to_string(), Tensor::bf16(&[1], [1.0]))];
    let again = again.iter().map(|(name, tensor)| (name, tensor));
    micro::write_shard(&folder.path().join("mtp.safetensors"), again);
    assert_refused(
        folder.path(),
        &["mtp.safetensors: tensor `lm_head.weight` is in", "model.safetensors too"],
    );
}

fn refused(micro: &Micro) -> String {
    refusal(micro.write().path())
}

#[test]
fn tensors_the_model_cannot_use() {
    let head = "lm_head.weight";
    let with = |tensor: Tensor| {
        let mut micro = micro::dense();
        micro.tensors.insert(head.to_string(), tensor);
        refused(&micro)
    };
    let zeros = |dtype: Dtype, size: usize| Tensor {
        dtype,
        shape: vec![VOCAB, HIDDEN],
        bytes: vec![0; VOCAB * HIDDEN * size],
    };
    let accepted = "is not one of BF16, F16, F32 or F8_E4M3";
    let line = with(zeros(Dtype::F64, 8));
    assert_eq!(line, format!("lm_head.weight: dtype F64 {accepted}"));
    let line = with(zeros(Dtype::U8, 1));
    assert_eq!(line, format!("lm_head.weight: dtype U8 {accepted}"));
    // FP8 without its scales.
    let line = with(zeros(Dtype::F8_E4M3, 1));
    assert!(line.contains("tensor `lm_head.weight_scale_inv` is missing"), "{line}");

    let line = with(Tensor::bf16(&[HIDDEN, VOCAB], vec![0.0; VOCAB * HIDDEN]));
    assert_eq!(line, format!("lm_head.weight: shape [{HIDDEN}, {VOCAB}], expected [{VOCAB}, {HIDDEN}]"));

    for (value, name) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let mut values = vec![0.5; VOCAB * HIDDEN];
        values[100] = value;
        let line = with(Tensor::bf16(&[VOCAB, HIDDEN], values));
        assert_eq!(line, format!("lm_head.weight: element 100 is {name}; it must be finite"));
    }
    let mut micro = micro::dense();
    micro.tensors.insert("model.layers.0.linear_attn.A_log".to_string(), Tensor::bf16(&[2], [0.0, f32::NAN]));
    assert!(refused(&micro).contains("A_log: element 1 is NaN"));
}

#[test]
fn a_dtype_that_nobody_knows() {
    let folder = micro::dense().write();
    edit(folder.path(), "model.safetensors", |bytes| {
        let at = bytes.windows(4).position(|window| window == b"BF16").unwrap();
        bytes[at..at + 4].copy_from_slice(b"BF17");
    });
    assert_refused(
        folder.path(),
        &["model.safetensors", "dtype BF17 is not one of BF16, F16, F32 or F8_E4M3"],
    );
}

#[test]
fn tensors_that_are_missing_or_left_over() {
    for name in micro::moe().tensors.keys() {
        let mut micro = micro::moe();
        micro.tensors.remove(name);
        // Without the embedding, no prefix is known.
        assert!(refused(&micro).contains(&format!("tensor `{name}` is missing")), "{name}");
    }
    let mut micro = micro::dense();
    for name in ["model.layers.2.extra", "model.layers.1.self_attn.q_proj.bias"] {
        micro.tensors.insert(name.to_string(), Tensor::bf16(&[1], [0.0]));
    }
    let line = refused(&micro);
    assert!(line.contains(
        "2 tensors are not read by the model, the first is `model.layers.1.self_attn.q_proj.bias`"
    ));
}

#[test]
fn configs_out_of_bounds() {
    let config = |field: &str, value: Value| refused(&micro::moe().set(field, value));
    for (field, value, part) in [
        ("model_type", json!("llama"), "model_type is llama; this host runs qwen3_5 and qwen3_5_moe"),
        ("model_type", Value::Null, "model_type is missing"),
        ("hidden_act", json!("gelu"), "hidden_act is gelu; this host runs silu"),
        ("attention_bias", json!(true), "attention_bias is true"),
        ("hidden_size", json!(0), "hidden_size = 0 is outside 1..=1048576"),
        ("hidden_size", json!(u64::MAX), "hidden_size = 18446744073709551615 is outside"),
        ("hidden_size", json!(-1), "config.json: invalid value"),
        ("hidden_size", json!("wide"), "config.json: invalid type"),
        ("vocab_size", json!(1u64 << 40), "vocab_size = 1099511627776 is outside 1..=16777216"),
        ("num_hidden_layers", json!(1), "num_hidden_layers = 1 is outside 2..=2"),
        ("num_key_value_heads", json!(3), "num_attention_heads = 2 is outside 3..=4096 in steps of 3"),
        ("linear_num_value_heads", json!(0), "linear_num_value_heads = 0 is outside"),
        ("linear_num_key_heads", json!(2), "in_proj_qkv.weight: shape [32, 24], expected [48, 24]"),
        ("head_dim", json!(3), "rotary dim = 1 is outside 2..=3 in steps of 2"),
        ("layer_types", json!(["linear_attention", "mamba"]), "layer_types is mamba"),
        ("rope_parameters", json!({ "rope_type": "yarn" }), "rope_type is yarn; this host runs default"),
        (
            "rope_parameters",
            json!({ "rope_theta": 0.0, "partial_rotary_factor": 0.5 }),
            "rope_theta = 0 is outside 1..=1000000000000",
        ),
        (
            "rope_parameters",
            json!({ "partial_rotary_factor": 1.5 }),
            "partial_rotary_factor = 1.5 is outside 0..=1",
        ),
        ("rms_norm_eps", json!(-1.0), "rms_norm_eps = -1 is outside"),
        ("num_experts_per_tok", json!(6), "num_experts_per_tok = 6 is outside 1..=5"),
        ("num_experts", json!(0), "num_experts = 0 is outside"),
    ] {
        let line = config(field, value.clone());
        assert!(line.contains(part), "{field} = {value}: {line}");
    }
    let folder = micro::dense().write();
    fs::write(folder.path().join("config.json"), "{").unwrap();
    assert_refused(folder.path(), &["config.json: EOF while parsing"]);
}

#[test]
fn tokens_and_windows() {
    let mut model = micro::dense().load().unwrap();
    let mut generate = |prompt: &[u32], max_new| common::try_generate(&mut model, prompt, max_new);
    assert_eq!(generate(&[], 4), Err(Refusal::EmptyPrompt));
    assert_eq!(generate(&[1, 19], 4), Err(Refusal::TokenOutside { token: 19, vocab: 19 }));
    assert_eq!(generate(&[1; 65], 1), Err(Refusal::WindowExceeded { needed: 65, window: 64 }));
    assert_eq!(generate(&[1; 60], 6), Err(Refusal::WindowExceeded { needed: 65, window: 64 }));
    assert_eq!(generate(&[1; 60], 5).unwrap().tokens.len(), 5);
    assert!(generate(&[1; 64], 0).unwrap().tokens.is_empty());

    assert!(matches!(model.new_state(65), Err(Refusal::WindowExceeded { needed: 65, window: 64 })));
    let mut state = model.new_state(3).unwrap();
    model.forward(&mut state, &[1, 2]).unwrap();
    let exceeded = Refusal::WindowExceeded { needed: 4, window: 3 };
    assert_eq!(model.forward(&mut state, &[1, 2]), Err(exceeded));
    assert_eq!(state.position(), 2);
    assert!(model.forward(&mut state, &[1]).is_ok());

    let perplexity = |model: &mut Model, tokens: &[u32], window, rows| {
        model.perplexity(tokens, window, rows, &mut |_| ()).unwrap_err().to_string()
    };
    let empty = Refusal::EmptyPrompt.to_string();
    assert_eq!(perplexity(&mut model, &[], 4, 4), empty);
    assert_eq!(perplexity(&mut model, &[1], 4, 4), empty);
    assert!(perplexity(&mut model, &[1, 2], 0, 4).contains("window = 0"));
    assert!(perplexity(&mut model, &[1, 2], 4, 0).contains("rows = 0"));
    assert!(perplexity(&mut model, &[1, 99], 4, 4).contains("token 99"));
}

#[test]
fn a_state_belongs_to_models_of_its_shape() {
    let mut small = micro::dense().load().unwrap();
    let large = common::load("tiny-dense");
    let mut state = large.new_state(8).unwrap();
    assert!(matches!(small.forward(&mut state, &[1]), Err(Refusal::ShapeMismatch { .. })));

    // Two layers each, of other dims.
    let mut other =
        micro::dense().set("num_attention_heads", json!(1)).set("linear_num_value_heads", json!(1));
    for (name, shape) in [
        ("model.layers.0.linear_attn.in_proj_qkv.weight", vec![24, HIDDEN]),
        ("model.layers.0.linear_attn.in_proj_z.weight", vec![8, HIDDEN]),
        ("model.layers.0.linear_attn.in_proj_b.weight", vec![1, HIDDEN]),
        ("model.layers.0.linear_attn.in_proj_a.weight", vec![1, HIDDEN]),
        ("model.layers.0.linear_attn.out_proj.weight", vec![HIDDEN, 8]),
        ("model.layers.0.linear_attn.conv1d.weight", vec![24, 1, 3]),
        ("model.layers.0.linear_attn.A_log", vec![1]),
        ("model.layers.0.linear_attn.dt_bias", vec![1]),
        ("model.layers.1.self_attn.q_proj.weight", vec![24, HIDDEN]),
        ("model.layers.1.self_attn.o_proj.weight", vec![HIDDEN, 12]),
        ("mtp.layers.0.self_attn.q_proj.weight", vec![24, HIDDEN]),
        ("mtp.layers.0.self_attn.o_proj.weight", vec![HIDDEN, 12]),
    ] {
        let zeros = vec![0.0; shape.iter().product()];
        other.tensors.insert(name.to_string(), Tensor::bf16(&shape, zeros));
    }
    let other = other.load().unwrap();
    let mut state = other.new_state(8).unwrap();
    let first = small.forward(&mut state, &[1]).unwrap_err();
    assert_eq!(first.to_string(), "state of a layer: shape [48, 1, 8, 8], expected [64, 2, 8, 8]");
    // Its layers may be at different tokens now.
    assert_eq!(small.forward(&mut state, &[1]), Err(first));
}

#[test]
fn drafts_pair_tokens_with_rows() {
    let mut model = micro::dense().load().unwrap();
    let mut state = model.new_state(4).unwrap();
    let hidden = model.forward(&mut state, &[1, 2, 3]).unwrap();
    let mut draft = model.new_draft_state(4).unwrap();
    let refusal = model.draft(&mut draft, &hidden, &[2, 3]).unwrap_err().to_string();
    assert_eq!(refusal, "hidden states to draft from: shape [3, 24], expected [2, 24]");
    assert_eq!(model.draft(&mut draft, &hidden, &[]), Err(Refusal::EmptyPrompt));
    assert!(model.draft(&mut draft, &hidden, &[2, 3, 4]).is_ok());
    assert_eq!(
        model.draft(&mut draft, &hidden, &[2, 3, 4]),
        Err(Refusal::WindowExceeded { needed: 7, window: 4 })
    );
}
