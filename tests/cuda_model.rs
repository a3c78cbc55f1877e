//! The model on a GPU beside the model in host memory, and beside the golden tokens; its passes among themselves, by bits.

use std::fs;

use decode_loop::{CudaHost, Sequence};
use device::{CudaDevice, Device, Graph};
use libtest_mimic::Trial;
use qwen3_5::{CudaModel, Model};
use serde::Deserialize;

use crate::arm::{Arm, on_gpu};
use crate::perplexity::assets;

pub fn trials() -> Vec<Trial> {
    vec![
        on_gpu("model::golden_tokens_of_tiny_dense", |arm| golden(arm, "tiny-dense")),
        on_gpu("model::golden_tokens_of_tiny_moe", |arm| golden(arm, "tiny-moe")),
        on_gpu("model::rows_together_are_rows_alone", rows_together_are_rows_alone),
        on_gpu("model::a_prompt_is_its_steps", a_prompt_is_its_steps),
        on_gpu("model::captured_steps_repeat", captured_steps_repeat),
    ]
}

const MODELS: [&str; 2] = ["tiny-dense", "tiny-moe"];
const VOCAB: usize = 2048;
const HIDDEN: f64 = 256.0;

/// Results that are rounded to BF16 between the embedding and the head, on the longest way through a layer of these hosts (the
/// gated delta rule: norm, projections, mixer, output, sum; then norm, gate and up, their product, down, sum), times 3 layers.
const ROUNDINGS: f64 = 3.0 * 11.0;

#[derive(Deserialize)]
struct Golden {
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    top2_gap: Vec<f32>,
}

fn cpu(name: &str) -> Model {
    Model::load(assets().join(name)).unwrap()
}

fn gpu(arm: &Arm, model: &Model) -> CudaModel {
    let Device::Cuda(device) = &arm.device else { panic!("a GPU arm has a GPU") };
    CudaModel::new(model, device).unwrap()
}

fn begin(model: &mut CudaModel, window: usize, rows: usize) {
    model.begin(&Sequence { window, rows, ..Sequence::default() }).unwrap();
}

/// The logits of the first `rows` rows of the last pass.
fn logits(model: &mut CudaModel, rows: usize) -> Vec<f32> {
    let stream = model.stream().clone();
    let mut logits = vec![0.0; rows * VOCAB];
    model.buffers().unwrap().logits.view().copy_to_host(&stream, &mut logits).unwrap();
    logits
}

/// Puts tokens and their position where the next step reads them.
fn place(model: &mut CudaModel, tokens: &[u32], position: usize) {
    let stream = model.stream().clone();
    let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    let mut buffers = model.buffers().unwrap();
    buffers.tokens.copy_from_host(&stream, &tokens).unwrap();
    buffers.position.copy_from_host(&stream, &[position as i32]).unwrap();
}

/// One step over tokens at a position; the logits of every row.
fn step(model: &mut CudaModel, tokens: &[u32], position: usize) -> Vec<f32> {
    place(model, tokens, position);
    model.step(tokens.len()).unwrap();
    logits(model, tokens.len())
}

/// The logits after a prompt and after each of the tokens that follow it, one step each.
fn forced(model: &mut CudaModel, prompt: &[u32], next: &[u32]) -> Vec<f32> {
    model.reset().unwrap();
    model.prompt(prompt).unwrap();
    let mut all = logits(model, 1);
    for (index, &token) in next.iter().enumerate() {
        all.extend(step(model, &[token], prompt.len() + index));
    }
    all
}

/// How far a row's logits may be from those of FP32 arithmetic. A rounding to BF16 is off by at most 2^-9 of the value, so by
/// 2^-9 / sqrt(3) in the root mean square; independent ones add up as squares, and what they leave of the hidden state, spread over
/// its directions, meets a row of the head. A Gaussian passes 6 deviations once in 5e8 draws.
fn bound(hidden: &[f32], head_norm: f64) -> f64 {
    let norm = hidden.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    6.0 * 2f64.powi(-9) / 3f64.sqrt() * ROUNDINGS.sqrt() * norm * head_norm / HIDDEN.sqrt()
}

/// Wherever the golden gap between the two best logits is more than twice the bound, the best token is the golden one.
fn golden(arm: &Arm, name: &str) {
    let golden: Golden =
        serde_json::from_slice(&fs::read(assets().join(name).join("golden.json")).unwrap()).unwrap();
    let mut host = cpu(name);
    let mut model = gpu(arm, &host);
    let head = linear_proj::Host::weights(&host, "lm_head").unwrap().to_f32();
    let head_norm = |row: &[f32]| row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>().sqrt();
    let head_norm = head.chunks_exact(HIDDEN as usize).map(head_norm).fold(0.0, f64::max);
    begin(&mut model, 256, 1);
    let (mut decided, mut same, mut all, mut worst) = (0, 0, 0, 0f64);
    for Prompt { prompt_ids, greedy_ids, top2_gap } in &golden.prompts {
        let next = &greedy_ids[..greedy_ids.len() - 1];
        let got = forced(&mut model, prompt_ids, next);
        let tokens = [&prompt_ids[..], next].concat();
        let mut state = host.new_state(tokens.len()).unwrap();
        let hidden = host.forward(&mut state, &tokens).unwrap().slice(prompt_ids.len() - 1..tokens.len());
        let expected = host.logits(&hidden).unwrap();
        let rows = got.chunks_exact(VOCAB).zip(expected.chunks_exact(VOCAB));
        for (row, (got, expected)) in rows.enumerate() {
            let bound = bound(hidden.slice(row..row + 1).elements(), head_norm);
            let apart = got.iter().zip(expected).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
            worst = worst.max(apart / bound);
            assert!(apart <= bound, "{name}: logits after token {row} are {apart} apart, bound {bound}");
            let best = decode_loop::Sampler::Greedy.choose(got, 0).unwrap();
            same += usize::from(best == greedy_ids[row]);
            all += 1;
            if f64::from(top2_gap[row]) > 2.0 * bound {
                decided += 1;
                assert_eq!(
                    best, greedy_ids[row],
                    "{name}: token {row}, gap {}, bound {bound}",
                    top2_gap[row]
                );
            }
        }
    }
    println!(
        "{name}: {same} of {all} tokens are the golden ones, {decided} had to be; logits within {worst:.2} of the bound"
    );
    assert!(decided * 4 > all, "{name}: the bound leaves {decided} of {all} tokens to decide");
}

/// Several tokens in one step have the bits that one step each has: their logits, and whatever the next step reads.
fn rows_together_are_rows_alone(arm: &Arm) {
    let tokens: Vec<u32> = (0..40).map(|i| (i * 733 + 11) % VOCAB as u32).collect();
    for name in MODELS {
        let mut model = gpu(arm, &cpu(name));
        begin(&mut model, 128, 16);
        for rows in [2, 7, 8, 9, 16] {
            let (prompt, next) = tokens.split_at(20);
            let alone = forced(&mut model, prompt, &next[..rows + 1]);
            model.reset().unwrap();
            model.prompt(prompt).unwrap();
            let together = step(&mut model, &next[..rows], prompt.len());
            assert!(together == alone[VOCAB..][..rows * VOCAB], "{name}: {rows} rows");
            let after = step(&mut model, &next[rows..rows + 1], prompt.len() + rows);
            assert!(after == alone[(rows + 1) * VOCAB..], "{name}: the step after {rows} rows");
        }
    }
}

/// A prompt in one pass and one step a token agree within the bound of either from exact arithmetic.
fn a_prompt_is_its_steps(arm: &Arm) {
    for name in MODELS {
        let mut host = cpu(name);
        let mut model = gpu(arm, &host);
        begin(&mut model, 1024, 1);
        for len in [1usize, 2, 16, 17, 63, 64, 65, 300, 700] {
            let tokens: Vec<u32> = (0..len as u32).map(|i| (i * 733 + 11) % VOCAB as u32).collect();
            let mut state = host.new_state(len).unwrap();
            let hidden = host.forward(&mut state, &tokens).unwrap().last();
            let expected = host.logits(&hidden).unwrap();
            model.reset().unwrap();
            model.prompt(&tokens).unwrap();
            let got = logits(&mut model, 1);
            let head = linear_proj::Host::weights(&host, "lm_head").unwrap().to_f32();
            let head_norm = |row: &[f32]| row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>().sqrt();
            let head_norm = head.chunks_exact(HIDDEN as usize).map(head_norm).fold(0.0, f64::max);
            let bound = bound(hidden.elements(), head_norm);
            let apart = got.iter().zip(&expected).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
            assert!(apart <= bound, "{name}: {len} tokens: logits {apart} apart, bound {bound}");
        }
    }
}

/// A captured step, replayed, has the bits of the step; and a sequence has the same bits every time, from the first one on.
fn captured_steps_repeat(arm: &Arm) {
    let tokens: Vec<u32> = (0..60).map(|i| (i * 733 + 11) % VOCAB as u32).collect();
    for name in MODELS {
        let mut model = gpu(arm, &cpu(name));
        begin(&mut model, 128, 1);
        let (prompt, next) = tokens.split_at(25);
        let first = forced(&mut model, prompt, next);
        assert!(first == forced(&mut model, prompt, next), "{name}: a second time");
        let stream = model.stream().clone();
        let mut graph = Graph::capture(&stream, |_| model.step(1)).unwrap();
        model.reset().unwrap();
        model.prompt(prompt).unwrap();
        for (index, &token) in next.iter().enumerate() {
            place(&mut model, &[token], prompt.len() + index);
            graph.launch().unwrap();
            assert!(logits(&mut model, 1) == first[(index + 1) * VOCAB..][..VOCAB], "{name}: replay {index}");
        }
    }
}
