//! The loop, over hosts that look their logits up and over the small checkpoints: what it chooses, where it ends, what it leaves behind.

use std::ops::ControlFlow;
use std::path::PathBuf;

use ::decode_loop::{
    Arm as Host, DecodeLoop, Finish, Generation, LoopOptions, Progress, Request, Sampler, Sequence,
};
use libtest_mimic::Trial;
use qwen3_5::{CpuModel, Model};
use structure_core::Refusal;

use crate::arm::{Arm, on_each_arm};
use crate::random::Random;
use crate::table::{By, Table};

pub fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> = [
        on_each_arm("decode_loop::greedy_is_the_largest", greedy_is_the_largest),
        on_each_arm("decode_loop::draws_have_the_exact_probabilities", draws_have_the_exact_probabilities),
        on_each_arm("decode_loop::a_seed_repeats_and_goes_by_position", a_seed_repeats),
        on_each_arm("decode_loop::texts_end_where_they_should", texts_end),
        on_each_arm("decode_loop::a_cancelled_text_leaves_nothing", a_cancelled_text_leaves_nothing),
        on_each_arm("decode_loop::numbers_that_are_none_are_refused", numbers_that_are_none),
        on_each_arm("decode_loop::requests_are_checked_first", requests_are_checked),
        on_each_arm("decode_loop::twenty_thousand_tokens", twenty_thousand_tokens),
    ]
    .into_iter()
    .flatten()
    .collect();
    trials.push(Trial::test("cpu::decode_loop::the_checkpoints_golden_tokens", || {
        the_golden_tokens();
        Ok(())
    }));
    #[cfg(kernels_built)]
    trials.extend(gpu::trials());
    trials
}

const GREEDY: Sampler = Sampler::Greedy;

fn random(temperature: f32, top_k: Option<usize>, top_p: f32, seed: u64) -> Sampler {
    Sampler::Random { temperature, top_k, top_p, seed }
}

fn request<'a>(prompt: &'a [u32], max_new: usize, stop: &'a [u32], sampler: Sampler) -> Request<'a> {
    Request { prompt, max_new, stop, sampler }
}

fn generate(decode: &mut dyn DecodeLoop, request: &Request<'_>) -> Result<Generation, Refusal> {
    decode.generate(request, &mut |_| ControlFlow::Continue(()))
}

fn tokens(decode: &mut dyn DecodeLoop, prompt: &[u32], max_new: usize, sampler: Sampler) -> Vec<u32> {
    generate(decode, &request(prompt, max_new, &[], sampler)).unwrap().tokens
}

/// Logits with many ties, as those of a head that rounds to BF16.
fn rounded(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| (random.normal() * 16.0).round() / 8.0).collect()
}

fn greedy_is_the_largest(arm: &Arm) {
    let mut random = Random::new(71);
    for vocab in [1, 2, 5, 130, 2048, 4099, 248_320] {
        const ROWS: usize = 24;
        let mut logits = rounded(&mut random, ROWS * vocab);
        // The last id alone, the first and the last, both signs of zero, and nothing but minus infinity.
        let last = vocab - 1;
        logits[last] = 1e30;
        (logits[vocab], logits[vocab + last]) = (1e30, 1e30);
        logits[2 * vocab..3 * vocab].fill(0.0);
        logits[2 * vocab] = -0.0;
        logits[3 * vocab..4 * vocab].fill(f32::NEG_INFINITY);
        logits[4 * vocab + last / 2] = f32::INFINITY;
        let largest = |row: &[f32]| {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter().position(|&logit| logit == max).unwrap() as u32
        };
        let expected: Vec<u32> = logits.chunks_exact(vocab).map(largest).collect();
        assert_eq!(expected[..4], [last as u32, 0, 0, 0]);
        Table::new(vocab, By::Position, logits).with_loop(arm, ROWS, |decode| {
            for _ in 0..2 {
                assert_eq!(tokens(decode, &[0], ROWS, GREEDY), expected, "vocabulary of {vocab}");
            }
        });
    }
}

/// What the sampler's words say, in FP64: the probability of each token.
fn probabilities(logits: &[f32], temperature: f64, top_k: usize, top_p: f64) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mass: Vec<f64> = logits.iter().map(|&logit| (f64::from(logit - max) / temperature).exp()).collect();
    let mut sorted = logits.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let kept =
        |cut: f32| logits.iter().zip(&mass).filter(move |(logit, _)| **logit >= cut).map(|(_, mass)| *mass);
    let by_rank = sorted[top_k.min(logits.len()) - 1];
    let all: f64 = kept(by_rank).sum();
    let cut = *sorted.iter().find(|&&cut| kept(cut.max(by_rank)).sum::<f64>() >= top_p * all).unwrap();
    let cut = cut.max(by_rank);
    let all: f64 = kept(cut).sum();
    logits.iter().zip(&mass).map(|(&logit, mass)| if logit >= cut { mass / all } else { 0.0 }).collect()
}

fn draws_have_the_exact_probabilities(arm: &Arm) {
    const DRAWS: usize = 20_000;
    let logits = vec![0.5, 2.0, -1.0, 1.0, 1.0, 0.0, f32::NEG_INFINITY, 1.75];
    let vocab = logits.len();
    Table::new(vocab, By::Position, logits.clone()).with_loop(arm, DRAWS, |decode| {
        for (temperature, top_k, top_p) in [
            (1.0, None, 1.0),
            (0.5, None, 1.0),
            (3.0, None, 1.0),
            (1.0, Some(3), 1.0),
            (1.0, None, 0.7),
            (1.5, Some(5), 0.8),
            (1.0, Some(1), 1.0),
        ] {
            let exact =
                probabilities(&logits, f64::from(temperature), top_k.unwrap_or(vocab), f64::from(top_p));
            let mut counts = vec![0usize; vocab];
            for token in tokens(decode, &[0], DRAWS, random(temperature, top_k, top_p, 5)) {
                counts[token as usize] += 1;
            }
            let mut chi_square = 0.0;
            for (&count, &probability) in counts.iter().zip(&exact) {
                let expected = probability * DRAWS as f64;
                if expected == 0.0 {
                    assert_eq!(count, 0, "{temperature}, {top_k:?}, {top_p}: {counts:?}");
                } else {
                    chi_square += (count as f64 - expected).powi(2) / expected;
                }
            }
            // Seven degrees of freedom exceed this once in a million.
            assert!(chi_square < 40.5, "{temperature}, {top_k:?}, {top_p}: {counts:?}, {chi_square}");
        }
    });
}

fn a_seed_repeats(arm: &Arm) {
    let mut numbers = Random::new(73);
    let table = Table::new(300, By::Position, numbers.normals(64 * 300, 1.0));
    table.with_loop(arm, 64, |decode| {
        let sampler = |seed| random(1.0, None, 0.95, seed);
        let text = tokens(decode, &[1, 2, 3], 40, sampler(9));
        assert_eq!(tokens(decode, &[1, 2, 3], 40, sampler(9)), text);
        assert_ne!(tokens(decode, &[1, 2, 3], 40, sampler(10)), text);
        assert_ne!(tokens(decode, &[1, 2, 3], 40, sampler(9 << 32)), text);
        // The text so far as a prompt goes on as the text did.
        let prompt = [&[1, 2, 3], &text[..15]].concat();
        assert_eq!(tokens(decode, &prompt, 25, sampler(9)), text[15..]);
    });
}

/// After token n comes n + 1, and 0 after the last.
fn counter(vocab: usize) -> Table {
    let one = |index: usize| f32::from(index % vocab == (index / vocab + 1) % vocab);
    Table::new(vocab, By::Token, (0..vocab * vocab).map(one).collect())
}

fn texts_end(arm: &Arm) {
    counter(100).with_loop(arm, 64, |decode| {
        let mut end = |prompt: &[u32], max_new, stop: &[u32]| {
            let generation = generate(decode, &request(prompt, max_new, stop, GREEDY)).unwrap();
            (generation.tokens, generation.finish)
        };
        assert_eq!(end(&[7], 3, &[]), (vec![8, 9, 10], Finish::Length));
        assert_eq!(end(&[7], 1, &[]), (vec![8], Finish::Length));
        assert_eq!(end(&[7], 0, &[]), (vec![], Finish::Length));
        assert_eq!(end(&[7], 30, &[11]), (vec![8, 9, 10, 11], Finish::Stop));
        assert_eq!(end(&[7], 30, &[8]), (vec![8], Finish::Stop));
        assert_eq!(end(&[7], 4, &[11]), (vec![8, 9, 10, 11], Finish::Stop), "both at once");
        assert_eq!(end(&[7], 30, &[99, 10, 4_000_000_000]), (vec![8, 9, 10], Finish::Stop));
        // A stop token of the text before ends nothing, nor does one in the prompt.
        assert_eq!(end(&[11, 7], 5, &[]), (vec![8, 9, 10, 11, 12], Finish::Length));
        assert_eq!(end(&[11, 7], 3, &[11]), (vec![8, 9, 10], Finish::Length));
        // The last token is never read, so that it needs no position.
        assert_eq!(end(&[7; 60], 5, &[]), (vec![8, 9, 10, 11, 12], Finish::Length));
        assert_eq!(end(&[7; 64], 1, &[]), (vec![8], Finish::Length));
    });
}

fn a_cancelled_text_leaves_nothing(arm: &Arm) {
    counter(100).with_loop(arm, 4096, |decode| {
        for cancel_at in [1, 2, 3, 50] {
            let mut seen = Vec::new();
            let generation = decode
                .generate(&request(&[7], 4000, &[], GREEDY), &mut |progress| {
                    if let Progress::Token(token) = progress {
                        seen.push(token);
                    }
                    if seen.len() == cancel_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                })
                .unwrap();
            let expected: Vec<u32> = (0..cancel_at as u32).map(|step| (8 + step) % 100).collect();
            assert_eq!((&generation.tokens, generation.finish), (&expected, Finish::Cancelled));
            assert_eq!(seen, expected);
            assert_eq!(tokens(decode, &[40, 41], 5, GREEDY), [42, 43, 44, 45, 46]);
        }
        // While the prompt is read.
        let cancelled = decode.generate(&request(&[7], 5, &[], GREEDY), &mut |progress| match progress {
            Progress::Prompt(_) => ControlFlow::Break(()),
            Progress::Token(token) => panic!("token {token} of a cancelled prompt"),
        });
        let cancelled = cancelled.unwrap();
        assert_eq!((cancelled.tokens, cancelled.finish), (vec![], Finish::Cancelled));
        assert_eq!(tokens(decode, &[40, 41], 2, GREEDY), [42, 43]);
    });
}

fn numbers_that_are_none(arm: &Arm) {
    const VOCAB: usize = 5003;
    let mut random_numbers = Random::new(79);
    let mut logits = random_numbers.normals(8 * VOCAB, 1.0);
    logits[3 * VOCAB + 4711] = f32::NAN;
    logits[3 * VOCAB + 4800] = -f32::NAN;
    logits[5 * VOCAB + 17] = f32::INFINITY;
    logits[6 * VOCAB..7 * VOCAB].fill(f32::NEG_INFINITY);
    let draw = random(1.0, Some(50), 0.9, 1);
    Table::new(VOCAB, By::Position, logits).with_loop(arm, 8, |decode| {
        for sampler in [GREEDY, draw] {
            let mut seen = 0;
            let refusal = decode
                .generate(&request(&[0], 8, &[], sampler), &mut |progress| {
                    seen += usize::from(matches!(progress, Progress::Token(_)));
                    ControlFlow::Continue(())
                })
                .unwrap_err();
            assert!(
                matches!(&refusal, Refusal::NonFinite { index: 4711, value, .. } if value.is_nan()),
                "{refusal}"
            );
            assert_eq!(seen, 3);
            // The loop goes on with the next text.
            assert_eq!(tokens(decode, &[0], 3, sampler).len(), 3);
        }
        let error = |decode: &mut dyn DecodeLoop, prompt: &[u32]| {
            generate(decode, &request(prompt, 1, &[], draw)).unwrap_err()
        };
        let infinite = |index, value| Refusal::NonFinite { what: "logits".to_string(), index, value };
        assert_eq!(error(decode, &[0; 6]), infinite(17, f32::INFINITY));
        assert_eq!(error(decode, &[0; 7]), infinite(0, f32::NEG_INFINITY));
        assert_eq!(tokens(decode, &[0; 6], 1, GREEDY), [17]);
        assert_eq!(tokens(decode, &[0; 7], 1, GREEDY), [0]);
    });
}

fn requests_are_checked(arm: &Arm) {
    counter(100).with_loop(arm, 64, |decode| {
        let mut refusal = |prompt: &[u32], max_new, sampler| {
            let mut called = false;
            let refusal = decode
                .generate(&request(prompt, max_new, &[], sampler), &mut |_| {
                    called = true;
                    ControlFlow::Continue(())
                })
                .unwrap_err();
            assert!(!called, "{refusal} came after work");
            refusal
        };
        assert_eq!(refusal(&[], 4, GREEDY), Refusal::EmptyPrompt);
        assert_eq!(refusal(&[1, 100], 4, GREEDY), Refusal::TokenOutside { token: 100, vocab: 100 });
        assert_eq!(refusal(&[1; 60], 6, GREEDY), Refusal::WindowExceeded { needed: 65, window: 64 });
        assert_eq!(refusal(&[1; 65], 0, GREEDY), Refusal::WindowExceeded { needed: 65, window: 64 });
        let needed = usize::MAX;
        assert_eq!(refusal(&[1; 2], needed, GREEDY), Refusal::WindowExceeded { needed, window: 64 });
        for sampler in [random(0.0, None, 1.0, 1), random(1.0, Some(0), 1.0, 1), random(1.0, None, 1.01, 1)] {
            assert!(matches!(refusal(&[1], 4, sampler), Refusal::ValueOutside { .. }), "{sampler:?}");
        }
    });
    let door = structures::decode_loop("whole_step").unwrap();
    let mut model = Model::load(assets().join("tiny-dense")).unwrap();
    let mut host = CpuModel::new(&mut model);
    let mut build = |window| {
        let options = LoopOptions { sequence: Sequence { window, ..Sequence::default() } };
        door.build(Host::Cpu(&mut host), &options).err()
    };
    assert_eq!(build(4096), None);
    assert_eq!(build(4097), Some(Refusal::WindowExceeded { needed: 4097, window: 4096 }));
    let empty = build(0).unwrap().to_string();
    assert_eq!(empty, "decode_loop/whole_step: window = 0 is outside 1..=1073741824");
}

fn twenty_thousand_tokens(arm: &Arm) {
    const TOKENS: usize = 20_000;
    counter(256).with_loop(arm, 32_768, |decode| {
        let expected: Vec<u32> = (0..TOKENS as u32).map(|step| (8 + step) % 256).collect();
        assert_eq!(tokens(decode, &[7], 100, GREEDY), expected[..100]);
        let memory = || match &arm.device {
            device::Device::Cpu => 0,
            device::Device::Cuda(gpu) => gpu.memory().unwrap().free,
        };
        let (free, resident) = (memory(), resident_bytes());
        assert_eq!(tokens(decode, &[7], TOKENS, GREEDY), expected);
        assert_eq!(memory(), free, "device memory");
        // The tokens themselves, here and there, and what the allocator keeps.
        let grown = resident_bytes().saturating_sub(resident);
        assert!(grown < 4 << 20, "host memory grew by {grown} bytes");
        assert_eq!(tokens(decode, &[7], 100, GREEDY), expected[..100]);
    });
}

/// What this process has in memory; Linux says so.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

fn assets() -> PathBuf {
    std::env::var_os("STRUCTURES_ASSETS")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../assets"), PathBuf::from)
}

/// The first prompt of each checkpoint, twice, and cut short between: a sequence that is begun again has forgotten the one before.
fn the_golden_tokens() {
    const TOKENS: usize = 16;
    for name in ["tiny-dense", "tiny-moe"] {
        let folder = assets().join(name);
        let golden: serde_json::Value =
            serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap();
        let ids =
            |key: &str| -> Vec<u32> { serde_json::from_value(golden["prompts"][0][key].clone()).unwrap() };
        let (prompt, expected) = (ids("prompt_ids"), ids("greedy_ids"));
        let mut model = Model::load(&folder).unwrap();
        let mut host = CpuModel::new(&mut model);
        let window = prompt.len() + TOKENS - 1;
        let options = LoopOptions { sequence: Sequence { window, ..Sequence::default() } };
        let door = structures::decode_loop("whole_step").unwrap();
        let mut decode = door.build(Host::Cpu(&mut host), &options).unwrap();
        assert_eq!(tokens(&mut *decode, &prompt, TOKENS, GREEDY), expected[..TOKENS], "{name}");
        let generation = generate(&mut *decode, &request(&prompt, TOKENS, &[expected[3]], GREEDY)).unwrap();
        let end = expected.iter().position(|&token| token == expected[3]).unwrap();
        assert_eq!((&generation.tokens[..], generation.finish), (&expected[..=end], Finish::Stop), "{name}");
        assert_eq!(tokens(&mut *decode, &prompt, TOKENS, GREEDY), expected[..TOKENS], "{name}, again");
        assert!(decode.kv_bytes() > 0);
    }
}

#[cfg(kernels_built)]
mod gpu {
    use ::decode_loop::{CudaHost, Door};

    use super::*;
    use crate::arm::on_gpu;
    use crate::table::gpu::CudaTable;

    pub fn trials() -> Vec<Trial> {
        vec![
            on_gpu("decode_loop::draws_are_the_cpu_arms", draws_are_the_cpu_arms),
            on_gpu("decode_loop::overlap_changes_nothing", overlap_changes_nothing),
            on_gpu("decode_loop::the_position_ends_with_the_text", the_position_ends_with_the_text),
        ]
    }

    /// Every step of a draw is exact or one IEEE operation, so that both arms draw the same tokens.
    fn draws_are_the_cpu_arms(arm: &Arm) {
        let mut numbers = Random::new(83);
        for vocab in [1, 7, 129, 2048, 4099, 50_001, 248_320] {
            const ROWS: usize = 16;
            let mut logits = numbers.normals(ROWS * vocab, 3.0);
            // Half of the rows with ties at every cut, one of a single value, one with few that can be drawn at all.
            let half = logits.len() / 2;
            logits[half..].copy_from_slice(&rounded(&mut numbers, ROWS * vocab - half));
            logits[vocab..2 * vocab].fill(1.5);
            logits[2 * vocab..3 * vocab].fill(f32::NEG_INFINITY);
            logits[2 * vocab + vocab / 2] = -3.0;
            logits[3 * vocab - 1] = -4.0;
            let table = Table::new(vocab, By::Position, logits);
            for (temperature, top_k, top_p) in [
                (1.0, None, 1.0),
                (0.3, None, 1.0),
                (100.0, None, 1.0),
                (1e-6, None, 0.5),
                (1.0, Some(1), 1.0),
                (1.0, Some(50), 1.0),
                (0.8, Some(5000), 0.9),
                (1.0, None, 0.9),
                (2.0, None, 0.999),
                (1.0, Some(vocab), 1e-30),
            ] {
                for seed in [0, u64::MAX - 5] {
                    let sampler = random(temperature, top_k, top_p, seed);
                    let run =
                        |arm: &Arm| table.with_loop(arm, ROWS, |decode| tokens(decode, &[0], ROWS, sampler));
                    assert_eq!(run(arm), run(&Arm::cpu()), "vocabulary of {vocab}, {sampler:?}");
                }
            }
        }
    }

    fn overlap_changes_nothing(arm: &Arm) {
        let stream = arm.stream();
        let mut numbers = Random::new(89);
        let table = Table::new(512, By::Token, numbers.normals(512 * 512, 2.0));
        let mut texts = Vec::new();
        for overlap in [false, true] {
            stream.set_overlap(overlap);
            let mut host = CudaTable::new(&stream, &table);
            let options = LoopOptions { sequence: Sequence { window: 600, ..Sequence::default() } };
            let door: Door = structures::decode_loop("whole_step").unwrap();
            let mut decode = door.build(Host::Cuda(&mut host), &options).unwrap();
            for sampler in [GREEDY, random(1.0, Some(100), 0.9, 3)] {
                texts.push(tokens(&mut *decode, &[5], 600, sampler));
            }
        }
        assert_eq!(texts[..2], texts[2..]);
    }

    /// However many replays were queued past the end, the position is that of the last token that was read.
    fn the_position_ends_with_the_text(arm: &Arm) {
        let stream = arm.stream();
        let mut host = CudaTable::new(&stream, &counter(100));
        let options = LoopOptions { sequence: Sequence { window: 64, ..Sequence::default() } };
        let door: Door = structures::decode_loop("whole_step").unwrap();
        for (prompt, max_new, stop, position) in
            [(vec![7; 3], 20, vec![], 21), (vec![7; 3], 20, vec![12], 6), (vec![7; 60], 5, vec![], 63)]
        {
            let mut decode = door.build(Host::Cuda(&mut host), &options).unwrap();
            generate(&mut *decode, &request(&prompt, max_new, &stop, GREEDY)).unwrap();
            drop(decode);
            let stream = host.stream().clone();
            assert_eq!(host.position.to_host(&stream).unwrap(), [position]);
        }
    }
}
