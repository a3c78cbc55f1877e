//! Loading maps files: a model of S bytes is held once, in pages that the system can drop again, and never as FP32.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

/// Large enough that the embedding and the head, decoded to FP32, would not fit under the bound.
const VOCAB: usize = 131_072;
const HIDDEN: usize = 256;

#[test]
fn peak_memory_stays_under_the_model_and_200_mb() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-dense");
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "generation_config.json", "mtp.safetensors"] {
        fs::copy(from.join(name), folder.path().join(name)).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    config["vocab_size"] = VOCAB.into();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    write_weights(&from, folder.path());

    let model_bytes: u64 = ["model.safetensors", "mtp.safetensors"]
        .map(|name| fs::metadata(folder.path().join(name)).unwrap().len())
        .iter()
        .sum();
    let as_fp32 = model_bytes + 2 * (VOCAB * HIDDEN * 4) as u64;
    let bound = model_bytes + 200_000_000;
    assert!(as_fp32 > bound, "the model is large enough to show a copy");

    let output = Command::new(env!("CARGO_BIN_EXE_structures"))
        .args(["generate", "--max-new", "4", "--json", "--prompt-tokens", "1,2,3", "--model"])
        .arg(folder.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let generation: Value = serde_json::from_slice(&output.stdout).unwrap();
    // Only Linux says what a process held at its peak.
    if let Some(peak) = generation["peak_rss_bytes"].as_u64() {
        assert!(peak < bound, "{peak} bytes at the peak, the model has {model_bytes}");
        assert!(peak > model_bytes / 2, "{peak} bytes is less than the weights that were read");
    }
}

/// The tensors of tiny-dense in one file, with the vocabulary of the embedding and the head enlarged.
fn write_weights(from: &Path, to: &Path) {
    let shards: Vec<Vec<u8>> = (1..=3)
        .map(|shard| fs::read(from.join(format!("model-0000{shard}-of-00003.safetensors"))).unwrap())
        .collect();
    let parsed: Vec<SafeTensors<'_>> =
        shards.iter().map(|shard| SafeTensors::deserialize(shard).unwrap()).collect();
    let mut tensors: HashMap<String, TensorView<'_>> =
        parsed.iter().flat_map(|shard| shard.tensors()).collect();
    // Finite BF16 of all small magnitudes: no exponent bits above those of 0x3b.
    let large: Vec<u8> = (0..VOCAB * HIDDEN).flat_map(|i| [(i * 37 % 251) as u8, 0x3b]).collect();
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let view = TensorView::new(Dtype::BF16, vec![VOCAB, HIDDEN], &large).unwrap();
        tensors.insert(name.to_string(), view);
    }
    safetensors::serialize_to_file(tensors, None, &to.join("model.safetensors")).unwrap();
}
