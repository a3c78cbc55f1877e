//! NVFP4 checkpoints as compressed-tensors and as ModelOpt write them: read as they are, and refused by name.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeMap;
use std::fs;

use common::micro::{Micro, Tensor, logits};
use linear_proj::Host;
use number_formats::nvfp4::{Nvfp4Tensor, quantize_row_under};
use qwen3_5::Model;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

/// The seats that are packed: one of each mixer, a feed-forward, and the head.
const PACKED: [&str; 5] = [
    "model.layers.0.linear_attn.in_proj_qkv",
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.2.self_attn.o_proj",
    "lm_head",
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Spelling {
    CompressedTensors,
    ModelOpt,
}

/// The tensors of tiny-dense in one file.
fn tiny_dense() -> Micro {
    let folder = common::assets().join("tiny-dense");
    let config = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let mut tensors = BTreeMap::new();
    for shard in 1..=3 {
        let bytes = fs::read(folder.join(format!("model-0000{shard}-of-00003.safetensors"))).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            tensors.insert(name, Tensor { dtype, shape, bytes });
        }
    }
    Micro { config, tensors }
}

/// A projection of tiny-dense as NVFP4, and the divisor that its global scale is stored as.
fn packed(micro: &Micro, path: &str) -> (Nvfp4Tensor, f32) {
    let Tensor { shape, bytes, .. } = &micro.tensors[&format!("{path}.weight")];
    let (n, k) = (shape[0], shape[1]);
    let weights: Vec<f32> =
        bytes.as_chunks::<2>().0.iter().map(|&bytes| half::bf16::from_le_bytes(bytes).to_f32()).collect();
    let divisor = 2688.0 / weights.iter().fold(0f32, |amax, w| amax.max(w.abs()));
    let (mut codes, mut scales) = (vec![0; n * k / 2], vec![0; n * k / 16]);
    quantize_row_under(&weights, 1.0 / divisor, &mut codes, &mut scales);
    (Nvfp4Tensor::from_compressed_tensors(codes, scales, n, k, divisor).unwrap(), divisor)
}

/// tiny-dense with some projections packed, and the same with their values in FP32.
fn checkpoints(spelling: Spelling) -> (Micro, Micro) {
    let (mut micro, mut plain) = (tiny_dense(), tiny_dense());
    for path in PACKED {
        let (tensor, divisor) = packed(&micro, path);
        let (n, k) = (tensor.n(), tensor.k());
        let mut values = vec![0.0; n * k];
        tensor.dequantize(&mut values).unwrap();
        plain.tensors.insert(format!("{path}.weight"), Tensor::f32(&[n, k], values));

        micro.tensors.remove(&format!("{path}.weight"));
        let codes = Tensor { dtype: Dtype::U8, shape: vec![n, k / 2], bytes: tensor.codes().to_vec() };
        let scales =
            Tensor { dtype: Dtype::F8_E4M3, shape: vec![n, k / 16], bytes: tensor.scales().to_vec() };
        let (names, scalars) = match spelling {
            Spelling::CompressedTensors => (
                ["weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"],
                [Tensor::f32(&[1], [divisor]), Tensor::f32(&[1], [448.0])],
            ),
            Spelling::ModelOpt => (
                ["weight", "weight_scale", "weight_scale_2", "input_scale"],
                [Tensor::f32(&[], [1.0 / divisor]), Tensor::f32(&[], [0.002])],
            ),
        };
        let [global, activations] = scalars;
        for (name, tensor) in names.into_iter().zip([codes, scales, global, activations]) {
            micro.tensors.insert(format!("{path}.{name}"), tensor);
        }
    }
    (micro, plain)
}

#[test]
fn both_spellings_are_the_values_of_their_codes() {
    for spelling in [Spelling::CompressedTensors, Spelling::ModelOpt] {
        let (micro, plain) = checkpoints(spelling);
        assert_eq!(logits(&mut micro.load().unwrap()), logits(&mut plain.load().unwrap()), "{spelling:?}");

        // What an implementation of NVFP4 takes over: the very codes, scales and global.
        let model = micro.load().unwrap();
        let original = tiny_dense();
        for path in PACKED {
            let view = model.weights(path).unwrap().nvfp4().expect(path);
            assert_eq!(view, packed(&original, path).0.view(), "{spelling:?}: {path}");
        }
        assert!(model.weights("model.layers.0.mlp.up_proj").unwrap().nvfp4().is_none());
    }
}

#[test]
fn codes_and_scales_may_lie_in_different_shards() {
    let (micro, plain) = checkpoints(Spelling::CompressedTensors);
    let mut model = Model::load(micro.write_sharded().path()).unwrap();
    assert_eq!(logits(&mut model), logits(&mut plain.load().unwrap()));
}

#[test]
fn what_is_missing_misshapen_or_unread_is_named() {
    let head = |spelling: Spelling, change: &dyn Fn(&mut BTreeMap<String, Tensor>)| {
        let (mut micro, _) = checkpoints(spelling);
        change(&mut micro.tensors);
        micro.load().map(|_| ()).unwrap_err().to_string()
    };
    let f32s = |shape: &[usize], values: &[f32]| Tensor::f32(shape, values.iter().copied());
    for (spelling, codes, global) in [
        (Spelling::CompressedTensors, "weight_packed", "weight_global_scale"),
        (Spelling::ModelOpt, "weight", "weight_scale_2"),
    ] {
        for name in ["weight_scale", global] {
            let line = head(spelling, &|tensors| {
                tensors.remove(&format!("lm_head.{name}"));
            });
            assert!(line.ends_with(&format!("tensor `lm_head.{name}` is missing")), "{line}");
        }
        let line = head(spelling, &|tensors| {
            tensors.get_mut(&format!("lm_head.{codes}")).unwrap().shape = vec![1024, 256];
        });
        assert_eq!(line, format!("lm_head.{codes}: shape [1024, 256], expected [2048, 128]"));
        let line = head(spelling, &|tensors| {
            tensors.get_mut("lm_head.weight_scale").unwrap().shape = vec![16, 2048];
        });
        assert_eq!(line, "lm_head.weight_scale: shape [16, 2048], expected [2048, 16]");
        let line = head(spelling, &|tensors| {
            tensors.get_mut("lm_head.weight_scale").unwrap().dtype = Dtype::U8;
        });
        assert_eq!(line, "lm_head.weight_scale: dtype U8 is not one of F8_E4M3");
        let line = head(spelling, &|tensors| {
            tensors.insert(format!("lm_head.{global}"), f32s(&[2], &[1.0, 1.0]));
        });
        assert_eq!(line, format!("lm_head.{global}: shape [2], expected [1]"));
        for (value, problem) in [(-1.0, "is -1; it must be finite and"), (f32::NAN, "element 0 is NaN")] {
            let line = head(spelling, &|tensors| {
                tensors.insert(format!("lm_head.{global}"), f32s(&[1], &[value]));
            });
            assert!(line.starts_with(&format!("lm_head.{global}")) && line.contains(problem), "{line}");
        }
        let line = head(spelling, &|tensors| {
            tensors.get_mut("lm_head.weight_scale").unwrap().bytes[7] = 0xb8;
        });
        assert_eq!(line, "lm_head: block scale 7 is 0xb8; it must be a UE4M3 code, at most 0x7e");
        // What is no tensor of either form, beside a form that is whole.
        let line = head(spelling, &|tensors| {
            tensors.insert("lm_head.weight_zero_point".to_string(), f32s(&[1], &[0.0]));
        });
        assert!(
            line.contains("1 tensors are not read by the model, the first is `lm_head.weight_zero_point`")
        );
    }
    // A divisor of zero, and a dense weight beside a packed one.
    let line = head(Spelling::CompressedTensors, &|tensors| {
        tensors.insert("lm_head.weight_global_scale".to_string(), f32s(&[1], &[0.0]));
    });
    assert_eq!(
        line,
        "lm_head.weight_global_scale is 0; it must be finite and above zero, and so must its inverse"
    );
    let line = head(Spelling::CompressedTensors, &|tensors| {
        tensors.insert("lm_head.weight".to_string(), Tensor::bf16(&[2048, 256], vec![0.0; 2048 * 256]));
    });
    assert!(line.contains("the first is `lm_head.weight`"), "{line}");
}

#[test]
fn an_input_size_that_is_not_whole_blocks_is_refused() {
    let mut micro = common::micro::dense();
    micro.tensors.remove("lm_head.weight");
    let zeros = |dtype, shape: [usize; 2]| Tensor {
        dtype,
        shape: shape.to_vec(),
        bytes: vec![0; shape.iter().product()],
    };
    micro.tensors.insert("lm_head.weight_packed".to_string(), zeros(Dtype::U8, [19, 12]));
    micro.tensors.insert("lm_head.weight_scale".to_string(), zeros(Dtype::F8_E4M3, [19, 1]));
    micro.tensors.insert("lm_head.weight_global_scale".to_string(), Tensor::f32(&[1], [1.0]));
    let line = micro.load().map(|_| ()).unwrap_err().to_string();
    assert_eq!(line, "lm_head: K = 24 is outside 0..=16777216 in steps of 16");
}
