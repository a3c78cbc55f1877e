//! The two small checkpoints, and what transformers computes with them.
#![allow(dead_code, reason = "each test binary uses some of it")]

pub mod micro;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use decode_loop::{Arm, Door, Generation, LoopOptions, Request, Sampler, Sequence};
use qwen3_5::{CpuModel, Model};
use safetensors::SafeTensors;
use serde::Deserialize;
use structure_core::Refusal;

pub fn assets() -> PathBuf {
    std::env::var_os("STRUCTURES_ASSETS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets"), PathBuf::from)
}

pub fn load(name: &str) -> Model {
    Model::load(assets().join(name)).unwrap()
}

/// `golden.json`.
#[derive(Deserialize)]
pub struct Golden {
    pub prompts: Vec<Prompt>,
    pub valid: Valid,
}

#[derive(Deserialize)]
pub struct Prompt {
    pub prompt_ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    pub top2_gap: Vec<f32>,
}

#[derive(Deserialize)]
pub struct Valid {
    pub tokens: usize,
    pub window: usize,
    pub ppl: f64,
}

impl Golden {
    pub fn load(name: &str) -> Self {
        serde_json::from_slice(&fs::read(assets().join(name).join("golden.json")).unwrap()).unwrap()
    }
}

/// `golden.safetensors`.
pub struct Tensors(Vec<u8>);

impl Tensors {
    pub fn load(name: &str) -> Self {
        Tensors(fs::read(assets().join(name).join("golden.safetensors")).unwrap())
    }

    pub fn f32s(&self, tensor: &str) -> Vec<f32> {
        self.words(tensor).into_iter().map(f32::from_le_bytes).collect()
    }

    pub fn ids(&self, tensor: &str) -> Vec<u32> {
        self.words(tensor).into_iter().map(u32::from_le_bytes).collect()
    }

    fn words(&self, tensor: &str) -> Vec<[u8; 4]> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        tensors.tensor(tensor).unwrap().data().as_chunks::<4>().0.to_vec()
    }
}

pub fn valid_tokens() -> Vec<u32> {
    let bytes = fs::read(assets().join("valid_tokens.u16")).unwrap();
    bytes.as_chunks::<2>().0.iter().map(|&id| u32::from(u16::from_le_bytes(id))).collect()
}

/// Greedy tokens, in the model's own window.
pub fn generate(model: &mut Model, prompt: &[u32], max_new: usize) -> Vec<u32> {
    try_generate(model, prompt, max_new).unwrap().tokens
}

pub fn try_generate(model: &mut Model, prompt: &[u32], max_new: usize) -> Result<Generation, Refusal> {
    let window = model.config().max_position_embeddings;
    let options = LoopOptions { sequence: Sequence { window, ..Sequence::default() } };
    let mut host = CpuModel::new(model);
    let mut decode = Door::of(&decode_loop_whole_step::ENTRY)?.build(Arm::Cpu(&mut host), &options)?;
    let request = Request { prompt, max_new, stop: &[], sampler: Sampler::Greedy };
    decode.generate(&request, &mut |_| ControlFlow::Continue(()))
}
