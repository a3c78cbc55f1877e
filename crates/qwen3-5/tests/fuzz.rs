//! Damaged files: refused or loaded, never a panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs;

use common::micro;
use proptest::prelude::*;
use qwen3_5::Model;
use serde_json::Value;

/// What is done to a file.
#[derive(Clone, Debug)]
enum Damage {
    Flip {
        at: usize,
        bit: u8,
    },
    Cut {
        at: usize,
    },
    Remove {
        at: usize,
        len: usize,
    },
    Repeat {
        at: usize,
        len: usize,
    },
    /// Puts a text in place of the nth number or quoted word, which keeps most JSON whole.
    Replace {
        nth: usize,
        with: String,
    },
}

fn damage() -> impl Strategy<Value = Damage> {
    let text = prop::sample::select(vec![
        "0",
        "1",
        "-1",
        "7",
        "1e999",
        "18446744073709551615",
        "18446744073709551616",
        "9223372036854775807",
        "null",
        "true",
        "[]",
        "{}",
        "\"\"",
        "\"BF16\"",
        "\"F64\"",
        "\"F4\"",
        "\"../x\"",
        "\"model.safetensors\"",
        "[0,0]",
    ]);
    prop_oneof![
        (any::<usize>(), 0u8..8).prop_map(|(at, bit)| Damage::Flip { at, bit }),
        any::<usize>().prop_map(|at| Damage::Cut { at }),
        (any::<usize>(), 1usize..64).prop_map(|(at, len)| Damage::Remove { at, len }),
        (any::<usize>(), 1usize..64).prop_map(|(at, len)| Damage::Repeat { at, len }),
        (any::<usize>(), text).prop_map(|(nth, with)| Damage::Replace { nth, with: with.to_string() }),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage, json: std::ops::Range<usize>) {
    if bytes.is_empty() {
        return;
    }
    let len = bytes.len();
    match *damage {
        Damage::Flip { at, bit } => bytes[at % len] ^= 1 << bit,
        Damage::Cut { at } => bytes.truncate(at % len),
        Damage::Remove { at, len: removed } => {
            let at = at % len;
            bytes.drain(at..(at + removed).min(len));
        }
        Damage::Repeat { at, len: repeated } => {
            let at = at % len;
            let part = bytes[at..(at + repeated).min(len)].to_vec();
            bytes.splice(at..at, part);
        }
        Damage::Replace { nth, ref with } => {
            let Some(text) = bytes.get(json.clone()).and_then(|json| str::from_utf8(json).ok()) else {
                return;
            };
            let tokens = tokens(text);
            if let Some(token) = tokens.get(nth % tokens.len().max(1)) {
                let at = json.start + token.start..json.start + token.end;
                bytes.splice(at, with.bytes());
            }
        }
    }
}

/// Where the quoted words and numbers of a JSON text are.
fn tokens(text: &str) -> Vec<std::ops::Range<usize>> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        at += 1;
        match bytes[start] {
            b'"' => {
                while at < bytes.len() && bytes[at] != b'"' {
                    at += 1;
                }
                at = (at + 1).min(bytes.len());
            }
            b'0'..=b'9' => {
                while at < bytes.len() && bytes[at].is_ascii_digit() {
                    at += 1;
                }
            }
            _ => continue,
        }
        tokens.push(start..at);
    }
    tokens
}

/// Loads what is left, and uses it if it loads.
fn load(folder: &std::path::Path) {
    match Model::load(folder) {
        Err(refusal) => assert!(!refusal.to_string().contains('\n'), "{refusal}"),
        Ok(mut model) => {
            let mut state = model.new_state(1).unwrap();
            let hidden = model.forward(&mut state, &[0]).unwrap();
            model.logits(&hidden).unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_json(file in 0usize..3, damages in prop::collection::vec(damage(), 1..3)) {
        let folder = micro::moe().write_sharded();
        fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [1, 2], "n": 1}"#).unwrap();
        let path = folder.path().join(["config.json", "model.safetensors.index.json", "generation_config.json"][file]);
        let mut bytes = fs::read(&path).unwrap();
        for damage in &damages {
            let json = 0..bytes.len();
            apply(&mut bytes, damage, json);
        }
        fs::write(path, bytes).unwrap();
        load(folder.path());
    }

    #[test]
    fn damaged_shards(damages in prop::collection::vec(damage(), 1..3), fix_length in any::<bool>()) {
        let folder = micro::dense().write();
        let path = folder.path().join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        // Half of the damage is to the header, whose length is put right again so that it is read.
        let mut head = bytes[8..8 + header].to_vec();
        let data = bytes.split_off(8 + header);
        for damage in &damages {
            if fix_length {
                let json = 0..head.len();
                apply(&mut head, damage, json);
                bytes = [&(head.len() as u64).to_le_bytes()[..], &head].concat();
            } else {
                apply(&mut bytes, damage, 8..8 + header);
            }
        }
        fs::write(path, [bytes, data].concat()).unwrap();
        load(folder.path());
    }
}

#[test]
fn damage_finds_the_parts_of_a_header() {
    let text = r#"{"a": {"dtype": "BF16", "shape": [2, 31]}}"#;
    let found: Vec<&str> = tokens(text).into_iter().map(|at| &text[at]).collect();
    assert_eq!(found, ["\"a\"", "\"dtype\"", "\"BF16\"", "\"shape\"", "2", "31"]);
    let mut bytes = text.as_bytes().to_vec();
    apply(&mut bytes, &Damage::Replace { nth: 5, with: "7".to_string() }, 0..text.len());
    assert_eq!(serde_json::from_slice::<Value>(&bytes).unwrap()["a"]["shape"][1], 7);
}
