//! The same weights in every form a checkpoint may have them give the same bits.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs;

use common::micro::{self, EXPERT_INTERMEDIATE, EXPERTS, HIDDEN, Micro, Noise, Tensor};
use half::bf16;
use linear_proj::Host;
use qwen3_5::{FfnConfig, LayerType, Model};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

#[test]
fn one_file_shards_and_a_sidecar_are_the_same() {
    let micro = micro::dense();
    let expected = micro.logits();
    assert_eq!(micro::logits(&mut Model::load(micro.write_sharded().path()).unwrap()), expected);

    // The draft head in a file of its own, beside one file and beside shards whose index does not name it.
    let mut main = micro.clone();
    main.tensors.retain(|name, _| !name.starts_with("mtp."));
    for folder in [main.write(), main.write_sharded()] {
        let without = Model::load(folder.path()).unwrap();
        assert!(!without.has_draft() && without.new_draft_state(4).is_err());
        let sidecar = micro.tensors.iter().filter(|(name, _)| name.starts_with("mtp."));
        micro::write_shard(&folder.path().join("mtp.safetensors"), sidecar);
        assert_eq!(micro::logits(&mut Model::load(folder.path()).unwrap()), expected);
    }
}

#[test]
fn files_that_no_index_names_are_left_alone() {
    let folder = micro::dense().write_sharded();
    fs::write(folder.path().join("golden.safetensors"), "not one").unwrap();
    assert!(Model::load(folder.path()).is_ok());
}

#[test]
fn a_checkpoint_with_a_vision_tower_is_its_text_part() {
    let micro = micro::dense();
    let expected = micro.logits();
    let mut nested = micro.clone().renamed(|name| name.replace("model.", "model.language_model."));
    nested.tensors.insert("model.visual.blocks.0.weight".to_string(), Tensor::f32(&[1], [f32::NAN]));
    nested.config = json!({
        "model_type": "qwen3_5",
        "text_config": micro.config,
        "vision_config": { "model_type": "qwen3_5", "hidden_size": 7 },
        "eos_token_id": [3, 4],
    });
    let mut model = nested.load().unwrap();
    assert_eq!(micro::logits(&mut model), expected);
    assert_eq!(model.config().eos_token_ids, [3, 4]);
    assert_eq!(model.seats()[0].path(), "model.language_model.layers.0.linear_attn.in_proj_qkv");
}

#[test]
fn experts_fused_and_one_by_one_are_the_same() {
    let micro = micro::moe();
    assert_eq!(fused(&micro).logits(), micro.logits());
}

/// Each layer's experts in two tensors.
fn fused(micro: &Micro) -> Micro {
    let mut fused = micro.clone();
    for layer in ["model.layers.0", "model.layers.1", "mtp.layers.0"] {
        let path = format!("{layer}.mlp.experts");
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for expert in 0..EXPERTS {
            let mut take =
                |name| fused.tensors.remove(&format!("{path}.{expert}.{name}.weight")).unwrap().bytes;
            gate_up.extend(take("gate_proj"));
            gate_up.extend(take("up_proj"));
            down.extend(take("down_proj"));
        }
        for (name, shape, bytes) in [
            ("gate_up_proj", vec![EXPERTS, 2 * EXPERT_INTERMEDIATE, HIDDEN], gate_up),
            ("down_proj", vec![EXPERTS, HIDDEN, EXPERT_INTERMEDIATE], down),
        ] {
            let tensor = Tensor { dtype: Dtype::BF16, shape, bytes };
            fused.tensors.insert(format!("{path}.{name}"), tensor);
        }
    }
    fused
}

#[test]
fn wider_types_hold_the_same_weights() {
    let micro = micro::dense();
    let mut wide = micro.clone();
    for tensor in wide.tensors.values_mut() {
        *tensor = Tensor::f32(&tensor.shape, bf16s(tensor));
    }
    assert_eq!(wide.logits(), micro.logits());
}

fn bf16s(tensor: &Tensor) -> Vec<f32> {
    tensor.bytes.as_chunks::<2>().0.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()).collect()
}

#[test]
fn fp8_blocks_are_their_products_in_bf16() {
    for scale_dtype in [Dtype::F32, Dtype::BF16] {
        let (mut fp8, mut plain) = (wide_moe(), wide_moe());
        let mut noise = Noise(11);
        let names: Vec<String> = plain.tensors.keys().cloned().collect();
        for name in names {
            let shape = plain.tensors[&name].shape.clone();
            let projection =
                name.contains("_proj") && !name.contains("in_proj_a") && !name.contains("in_proj_b");
            let [leading @ .., n, k] = &shape[..] else { continue };
            if !projection {
                continue;
            }
            let matrices: usize = leading.iter().product();
            let blocks = [n.div_ceil(128), k.div_ceil(128)];
            let codes: Vec<u8> = (0..matrices * n * k).map(|_| code(&mut noise)).collect();
            let scales: Vec<f32> = (0..matrices * blocks[0] * blocks[1])
                .map(|_| bf16::from_f32(0.002 + 0.001 * noise.value()).to_f32())
                .collect();
            let value = |index: usize| {
                let (matrix, row, column) = (index / (n * k), index / k % n, index % k);
                let block = (matrix * blocks[0] + row / 128) * blocks[1] + column / 128;
                e4m3(codes[index]) * scales[block]
            };
            plain.tensors.insert(name.clone(), Tensor::bf16(&shape, (0..codes.len()).map(value)));
            let scale_shape = [leading, &blocks[..]].concat();
            let scales = match scale_dtype {
                Dtype::F32 => Tensor::f32(&scale_shape, scales),
                _ => Tensor::bf16(&scale_shape, scales),
            };
            fp8.tensors.insert(format!("{name}_scale_inv"), scales);
            fp8.tensors.insert(name, Tensor { dtype: Dtype::F8_E4M3, shape, bytes: codes });
        }
        assert_eq!(fp8.logits(), plain.logits(), "scales in {scale_dtype:?}");
    }
}

/// Fused experts whose matrices are more than a block wide and not whole blocks.
fn wide_moe() -> Micro {
    let mut micro = fused(&micro::moe()).set("moe_intermediate_size", json!(150));
    for layer in ["model.layers.0", "model.layers.1", "mtp.layers.0"] {
        for (name, shape) in [("gate_up_proj", [EXPERTS, 300, HIDDEN]), ("down_proj", [EXPERTS, HIDDEN, 150])]
        {
            let zeros = Tensor::bf16(&shape, vec![0.0; shape.iter().product()]);
            micro.tensors.insert(format!("{layer}.mlp.experts.{name}"), zeros);
        }
    }
    micro
}

/// Any code but the two that are no number.
fn code(noise: &mut Noise) -> u8 {
    let code = noise.next_u64() as u8;
    if code & 0x7f == 0x7f { 0x3c } else { code }
}

/// OCP FP8 E4M3: bias 7, and 2^-9 steps below 2^-6.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa * 2f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[test]
fn a_tied_head_is_the_embedding() {
    let mut untied = micro::dense();
    untied.tensors.insert("lm_head.weight".to_string(), untied.tensors["model.embed_tokens.weight"].clone());
    let mut tied = untied.clone().set("tie_word_embeddings", json!(true));
    tied.tensors.remove("lm_head.weight");
    assert_eq!(tied.logits(), untied.logits());
    let model = tied.load().unwrap();
    assert_eq!(model.seats().iter().filter(|seat| seat.path() == "lm_head").count(), 1);
}

#[test]
fn older_configs_say_the_same() {
    let expected = micro::dense();
    let mut flat = expected.clone();
    let fields = flat.config.as_object_mut().unwrap();
    fields.remove("rope_parameters");
    fields.remove("layer_types");
    fields.extend([
        ("rope_theta".to_string(), json!(10_000)),
        ("partial_rotary_factor".to_string(), json!(0.5)),
        ("rope_scaling".to_string(), Value::Null),
        ("full_attention_interval".to_string(), json!(2)),
    ]);
    assert_eq!(flat.load().unwrap().config(), expected.load().unwrap().config());
    assert_eq!(flat.logits(), expected.logits());
}

#[test]
fn what_a_config_leaves_out_is_what_transformers_assumes() {
    let folder = tempfile::tempdir().unwrap();
    let config = |json: Value| {
        fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
        qwen3_5::Config::load(folder.path()).unwrap()
    };
    // The dense defaults are the 9B model's, the sparse ones the 35B-A3B model's.
    let dense = config(json!({ "model_type": "qwen3_5_text" }));
    assert_eq!((dense.vocab_size, dense.hidden_size, dense.layer_types.len()), (248_320, 4096, 32));
    assert_eq!((dense.num_attention_heads, dense.num_key_value_heads, dense.head_dim), (16, 4, 256));
    assert_eq!((dense.rotary_dim, dense.max_position_embeddings), (64, 32_768));
    assert_eq!(dense.ffn, FfnConfig::Dense { intermediate_size: 12_288 });
    let full = dense.layer_types.iter().positions_of(LayerType::FullAttention);
    assert_eq!(full, [3, 7, 11, 15, 19, 23, 27, 31]);

    let sparse = config(json!({ "model_type": "qwen3_5_moe" }));
    assert_eq!((sparse.hidden_size, sparse.layer_types.len(), sparse.num_key_value_heads), (2048, 40, 2));
    let FfnConfig::Sparse(experts) = sparse.ffn else { panic!("{:?}", sparse.ffn) };
    assert_eq!((experts.num_experts, experts.num_experts_per_tok), (256, 8));
}

trait PositionsOf {
    fn positions_of(self, layer_type: LayerType) -> Vec<usize>;
}

impl<'a, I: Iterator<Item = &'a LayerType>> PositionsOf for I {
    fn positions_of(self, layer_type: LayerType) -> Vec<usize> {
        self.enumerate().filter(|(_, t)| **t == layer_type).map(|(index, _)| index).collect()
    }
}

#[test]
fn end_tokens_come_from_the_generation_config_first() {
    let folder = micro::dense().write();
    for (generation, expected) in [
        (r#"{"eos_token_id": [17, 5]}"#, vec![17, 5]),
        (r#"{"eos_token_id": 9}"#, vec![9]),
        (r#"{"use_cache": true}"#, vec![3]),
    ] {
        fs::write(folder.path().join("generation_config.json"), generation).unwrap();
        assert_eq!(Model::load(folder.path()).unwrap().config().eos_token_ids, expected);
    }
}

#[test]
fn seats_are_the_projections_in_the_order_of_the_checkpoint() {
    let mut model = common::load("tiny-moe");
    let paths: Vec<String> = model.seats().iter().map(|seat| seat.path().to_string()).collect();
    let linear = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
        .map(|p| format!("linear_attn.{p}"));
    let full = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|p| format!("self_attn.{p}"));
    let shared = ["gate_proj", "up_proj", "down_proj"].map(|p| format!("mlp.shared_expert.{p}"));
    let mut expected = Vec::new();
    for (layer, mixer) in [
        ("model.layers.0", &linear[..]),
        ("model.layers.1", &linear),
        ("model.layers.2", &full),
        ("mtp.layers.0", &full),
    ] {
        if layer.starts_with("mtp") {
            expected.extend(["lm_head".to_string(), "mtp.fc".to_string()]);
        }
        expected.extend(mixer.iter().chain(&shared).map(|projection| format!("{layer}.{projection}")));
    }
    assert_eq!(paths, expected);
    for path in paths {
        let (n, k) = model.weights(&path).map(|weights| (weights.n(), weights.k())).unwrap();
        let seat = model.seat_mut(&path).unwrap();
        assert_eq!((seat.n(), seat.k()), (n, k), "{path}");
    }
    assert!(model.weights("model.embed_tokens").is_none() && model.seat_mut("model.norm").is_none());

    let banks: Vec<(String, [usize; 3])> =
        model.banks().into_iter().map(|bank| (bank.path, bank.dims)).collect();
    let dims = [16, 64, 256];
    let bank = |layer: &str| (format!("{layer}.mlp.experts"), dims);
    assert_eq!(
        banks,
        [bank("model.layers.0"), bank("model.layers.1"), bank("model.layers.2"), bank("mtp.layers.0")]
    );
    assert!(common::load("tiny-dense").banks().is_empty());
}
