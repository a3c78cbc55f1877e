//! The host beside transformers, on both small checkpoints.
//!
//! The golden files were recorded from modules that had been cast to BF16 as a whole, rotary frequencies included. That moves
//! hidden states by up to 3e-2, so that tensors are compared under the same rounding; tokens and perplexity are
//! compared as the host loads the checkpoints, which is as transformers does.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::{Golden, Tensors, generate, load, valid_tokens};
use decode_loop::Sampler;
use qwen3_5::{Hidden, Model};

/// How far FP32 results in another order of summation may be from the golden ones.
const TOLERANCE: f32 = 2e-3;
/// Below this gap between the two best logits, another order may choose the other token.
const NEAR_TIE: f32 = 2e-4;

fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let worst = got.iter().zip(expected).map(|(got, expected)| (got - expected).abs()).fold(0.0, f32::max);
    println!("{what}: within {worst:e}");
    assert!(worst <= TOLERANCE, "{what}: {worst} from the golden values");
}

fn greedy_tokens(name: &str) {
    let mut model = load(name);
    for (index, prompt) in Golden::load(name).prompts.iter().enumerate() {
        let golden = &prompt.greedy_ids;
        // Whatever was forced, the tokens before are the golden ones, and generation goes on from them.
        let mut forced = 0;
        while forced < golden.len() {
            let context = [&prompt.prompt_ids[..], &golden[..forced]].concat();
            let tokens = generate(&mut model, &context, golden.len() - forced);
            let same = tokens.iter().zip(&golden[forced..]).take_while(|(new, golden)| new == golden).count();
            forced += same;
            if forced < golden.len() {
                let (new, golden, gap) = (tokens[same], golden[forced], prompt.top2_gap[forced]);
                println!("{name}: prompt {index}, token {forced} is {new}, golden {golden}, top-2 gap {gap}");
                assert!(gap < NEAR_TIE, "prompt {index}, token {forced}: {new}, golden {golden}, gap {gap}");
                forced += 1;
            }
        }
    }
}

#[test]
fn greedy_tokens_dense() {
    greedy_tokens("tiny-dense");
}

#[test]
fn greedy_tokens_moe() {
    greedy_tokens("tiny-moe");
}

fn tensors(name: &str) {
    let (mut model, golden) = (load(name), Tensors::load(name));
    model.round_rope_frequencies();
    let tokens = golden.ids("input_ids");
    let mut state = model.new_state(tokens.len()).unwrap();
    let mut seen = Vec::new();
    let hidden = model
        .forward_observed(&mut state, &tokens, &mut |layer, input| {
            assert_close(&format!("{name} hidden.{layer}"), input, &golden.f32s(&format!("hidden.{layer}")));
            seen.push(layer);
        })
        .unwrap();
    assert_eq!(seen, [0, 1, 2]);
    assert_close(&format!("{name} last_hidden"), hidden.elements(), &golden.f32s("last_hidden"));
    assert_close(&format!("{name} logits"), &model.logits(&hidden).unwrap(), &golden.f32s("logits"));

    let drafted = draft(&mut model, &hidden, &tokens, tokens.len());
    assert_close(
        &format!("{name} draft_logits"),
        &model.logits(&drafted).unwrap(),
        &golden.f32s("draft_logits"),
    );
    let in_chunks = draft(&mut model, &hidden, &tokens, 5);
    assert_eq!(drafted, in_chunks, "drafts differ in their bits when they come in chunks");
}

/// Each token's hidden state and the token after it, `chunk` at a time.
fn draft(model: &mut Model, hidden: &Hidden, tokens: &[u32], chunk: usize) -> Hidden {
    let mut state = model.new_draft_state(tokens.len()).unwrap();
    let mut last = None;
    let mut rows = Vec::new();
    for (index, tokens) in tokens[1..].chunks(chunk).enumerate() {
        let hidden = hidden.slice(index * chunk..index * chunk + tokens.len());
        let drafted = model.draft(&mut state, &hidden, tokens).unwrap();
        rows.push(drafted.elements().to_vec());
        last = Some(drafted);
    }
    let mut all = last.unwrap();
    if rows.len() > 1 {
        all = Hidden::from_rows(all.width(), rows.concat()).unwrap();
    }
    all
}

#[test]
fn tensors_dense() {
    tensors("tiny-dense");
}

#[test]
fn tensors_moe() {
    tensors("tiny-moe");
}

fn perplexity(name: &str) {
    let (mut model, golden) = (load(name), Golden::load(name).valid);
    let tokens = valid_tokens();
    let mut done = Vec::new();
    let result = model
        .perplexity(&tokens[..=golden.tokens], golden.window, 64, &mut |tokens| done.push(tokens))
        .unwrap();
    println!("{name}: {result:?}, golden {}", golden.ppl);
    assert_eq!((result.tokens, done.last()), (golden.tokens, Some(&golden.tokens)));
    assert!((result.ppl / golden.ppl - 1.0).abs() < 1e-3, "{result:?}, golden {}", golden.ppl);
}

#[test]
fn perplexity_dense() {
    perplexity("tiny-dense");
}

#[test]
fn perplexity_moe() {
    perplexity("tiny-moe");
}

#[test]
fn cached_decode_has_the_bits_of_one_pass() {
    for name in ["tiny-dense", "tiny-moe"] {
        let mut model = load(name);
        let tokens = &valid_tokens()[..70];
        let mut state = model.new_state(tokens.len()).unwrap();
        let hidden = model.forward(&mut state, tokens).unwrap();
        let logits = model.logits(&hidden).unwrap();
        for chunk in [1, 2, 7, 16, 64] {
            let mut state = model.new_state(tokens.len()).unwrap();
            let (mut rows, mut row_logits) = (Vec::new(), Vec::new());
            for tokens in tokens.chunks(chunk) {
                let hidden = model.forward(&mut state, tokens).unwrap();
                row_logits.extend(model.logits(&hidden).unwrap());
                rows.extend_from_slice(hidden.elements());
            }
            let bits = |xs: &[f32]| xs.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&rows), bits(hidden.elements()), "{name} in chunks of {chunk}");
            assert_eq!(bits(&row_logits), bits(&logits), "{name} logits in chunks of {chunk}");
        }
        assert!(Sampler::Greedy.choose(&logits, 0).is_ok());
    }
}
