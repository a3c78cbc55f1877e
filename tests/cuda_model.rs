//! The model on a GPU beside the model in host memory, and beside the golden tokens; its passes among themselves, by bits.

use std::fs;
use std::ops::Range;

use decode_loop::{CudaHost, KvChoice, KvOptions, Sampler, Sequence};
use device::{Device, Graph};
use half::bf16;
use libtest_mimic::Trial;
use linear_proj::{BoundProj, Host, LinearProj, Rows, RowsData, RowsMut, RowsMutData, ScaleMode};
use qwen3_5::{CudaModel, Model};
use serde::Deserialize;
use structure_core::{
    Band, DType, Fallback, Form, Formats, GuardMode, Place, Receipt, Refusal, Smoke, StructureId,
};
use structures::BindOptions;

use crate::arm::{Arm, on_gpu};
use crate::perplexity::assets;

pub fn trials() -> Vec<Trial> {
    vec![
        on_gpu("model::golden_tokens_of_tiny_dense", |arm| golden(arm, "tiny-dense")),
        on_gpu("model::golden_tokens_of_tiny_moe", |arm| golden(arm, "tiny-moe")),
        on_gpu("model::rows_together_are_rows_alone", rows_together_are_rows_alone),
        on_gpu("model::fp8_kv_chooses_the_same_tokens", fp8_kv_chooses_the_same_tokens),
        on_gpu("model::prompts_are_close", prompts_are_close),
        on_gpu("model::captured_steps_repeat", captured_steps_repeat),
        on_gpu("model::two_sequences_do_not_meet", two_sequences_do_not_meet),
        on_gpu("model::what_does_not_fit_is_refused", what_does_not_fit_is_refused),
        on_gpu("model::bound_seats_serve_every_step", bound_seats_serve_every_step),
    ]
}

const MODELS: [&str; 2] = ["tiny-dense", "tiny-moe"];
const VOCAB: usize = 2048;

/// How much further from FP32 arithmetic the GPU may be than [`edges`] are, in the median over many rows. Between the
/// embedding and the head a layer there rounds 11 results to BF16 on its longest way (norm, projections, convolution and delta
/// rule, their gated norm, output, sum; norm, gate and up, their product, down, sum), and `edges` round 7 of them; independent
/// roundings add up as squares: sqrt(11 / 7) = 1.25. The rest is for the spread of two samples of a few hundred rows.
const FURTHER: f64 = 1.25 * 1.3;

/// A projection of the host in memory with BF16 rows on both sides, as one on a GPU has.
struct Edges {
    dense: Vec<f32>,
    /// The head's logits are not rounded.
    rounds_out: bool,
    receipt: Receipt,
}

impl LinearProj for Edges {
    fn n(&self) -> usize {
        self.receipt.dims[0]
    }

    fn k(&self) -> usize {
        self.receipt.dims[1]
    }

    fn project(&mut self, x: Rows<'_>, mut y: RowsMut<'_>) -> Result<(), Refusal> {
        let (RowsData::Host(x), RowsMutData::Host(y)) = (x.data(), y.data()) else {
            return Err(Refusal::EmptyPrompt);
        };
        let x: Vec<f32> = x.to_bf16().into_iter().map(bf16::to_f32).collect();
        let features = |x| self.dense.chunks_exact(self.k()).map(move |w| linear_proj::dot(w, x));
        let sums: Vec<f32> = x.chunks_exact(self.k()).flat_map(features).collect();
        match self.rounds_out {
            true => y.write_bf16(sums.into_iter().map(bf16::from_f32)),
            false => y.write_f32(sums.into_iter()),
        }
        Ok(())
    }
}

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

impl BoundProj for Edges {
    fn form(&self) -> Form {
        let band = Band { min: 1, max: usize::MAX };
        Form { dtypes: &[DType::F32], width: self.k(), place: Place::Cpu, band, fallback: Fallback::Refuse }
    }

    fn receipt(&self) -> &Receipt {
        &self.receipt
    }

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        Ok(self.dense[features.start * self.k()..features.end * self.k()].to_vec())
    }
}

/// The same model with the rows of every projection rounded to BF16 on their way in and out, and all else as it was.
fn edges(name: &str) -> Model {
    let mut model = cpu(name);
    for path in model.seats().iter().map(|seat| seat.path().to_string()).collect::<Vec<_>>() {
        let weights = model.weights(&path).unwrap();
        let receipt = Receipt {
            id: StructureId { structure: "linear_proj", variant: "edges" },
            seat: path.clone(),
            device: "cpu".to_string(),
            dims: [weights.n(), weights.k()],
            bias: false,
            source_dtype: weights.dtype(),
            formats: Formats { weights: "as they are", activations: "BF16" },
            weight_bytes: 0,
            conversion_error: 0.0,
            band: Band { min: 1, max: usize::MAX },
            smoke: Smoke { rows: 0, worst: 0.0 },
            kernel_source: String::new(),
            version: String::new(),
        };
        let proj = Box::new(Edges { dense: weights.to_f32(), rounds_out: path != "lm_head", receipt });
        model.seat_mut(&path).unwrap().bind(proj, GuardMode::Strict).unwrap();
    }
    model
}

/// The logits of the rows from `first` on, `[rows, VOCAB]`.
fn host_logits(host: &mut Model, tokens: &[u32], first: usize) -> Vec<f32> {
    let mut state = host.new_state(tokens.len()).unwrap();
    let hidden = host.forward(&mut state, tokens).unwrap().slice(first..tokens.len());
    host.logits(&hidden).unwrap()
}

/// The largest distance between two rows of logits, row by row.
fn apart(a: &[f32], b: &[f32]) -> Vec<f64> {
    let rows = a.chunks_exact(VOCAB).zip(b.chunks_exact(VOCAB));
    rows.map(|(a, b)| a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max)).collect()
}

/// Of the sparse host a few rows are far off for another reason: two experts nearly tie, and a rounding chooses between them. The
/// median does not see those.
fn median(mut distances: Vec<f64>) -> f64 {
    distances.sort_by(f64::total_cmp);
    distances[distances.len() / 2]
}

/// Logits are as far from FP32 arithmetic as roundings to BF16 put them, and wherever the golden gap between the two best logits is
/// more than twice the furthest of those, the best token is the golden one.
fn golden(arm: &Arm, name: &str) {
    let text = fs::read(assets().join(name).join("golden.json")).unwrap();
    let golden: Golden = serde_json::from_slice(&text).unwrap();
    let (mut exact, mut rounded) = (cpu(name), edges(name));
    let mut model = gpu(arm, &exact);
    begin(&mut model, 256, 1);
    let (mut ours, mut theirs, mut choices) = (Vec::new(), Vec::new(), Vec::new());
    for Prompt { prompt_ids, greedy_ids, top2_gap } in &golden.prompts {
        let next = &greedy_ids[..greedy_ids.len() - 1];
        let tokens = [&prompt_ids[..], next].concat();
        let got = forced(&mut model, prompt_ids, next);
        let expected = host_logits(&mut exact, &tokens, prompt_ids.len() - 1);
        ours.extend(apart(&got, &expected));
        theirs.extend(apart(&host_logits(&mut rounded, &tokens, prompt_ids.len() - 1), &expected));
        let best = got.chunks_exact(VOCAB).map(|row| Sampler::Greedy.choose(row, 0).unwrap());
        choices.extend(best.zip(greedy_ids.iter().copied()).zip(top2_gap.iter().copied()));
    }
    let bound = 2.0 * FURTHER * theirs.iter().copied().fold(0.0, f64::max);
    let (ours, theirs) = (median(ours), median(theirs));
    let same = choices.iter().filter(|((best, golden), _)| best == golden).count();
    let decided = choices.iter().filter(|(_, gap)| f64::from(*gap) > bound);
    println!(
        "{name}: logits {ours:.4} from FP32 arithmetic, BF16 edges {theirs:.4}; {same} of {} tokens are the golden ones, \
         {} had to be (gaps above {bound:.3})",
        choices.len(),
        decided.clone().count()
    );
    assert!(ours <= FURTHER * theirs, "{name}: {ours} from FP32 arithmetic, edges {theirs}");
    for ((best, golden), gap) in decided {
        assert_eq!(best, golden, "{name}: gap {gap}, bound {bound}");
    }
}

/// Over keys and values in E4M3 at least 95 of 100 tokens of the golden texts are still the best, and the store takes half.
fn fp8_kv_chooses_the_same_tokens(arm: &Arm) {
    for name in MODELS {
        let text = fs::read(assets().join(name).join("golden.json")).unwrap();
        let golden: Golden = serde_json::from_slice(&text).unwrap();
        let mut model = gpu(arm, &cpu(name));
        let window = 2048;
        begin(&mut model, window, 1);
        let bf16_bytes = model.kv_bytes();
        let store = structures::decode_loop("fp8_kv").unwrap().kv().unwrap();
        let kv = KvChoice::Store(store, KvOptions::default());
        model.begin(&Sequence { window, rows: 1, kv }).unwrap();
        // Page tables and the scratch of the splits are all that is not halved.
        println!("{name}: {} bytes of keys and values, {bf16_bytes} in BF16", model.kv_bytes());
        assert!(model.kv_bytes() < bf16_bytes * 3 / 4, "{name}: {} of {bf16_bytes} bytes", model.kv_bytes());
        let (mut same, mut all) = (0, 0);
        for Prompt { prompt_ids, greedy_ids, .. } in &golden.prompts {
            let got = forced(&mut model, prompt_ids, &greedy_ids[..greedy_ids.len() - 1]);
            let best = got.chunks_exact(VOCAB).map(|row| Sampler::Greedy.choose(row, 0).unwrap());
            same += best.zip(greedy_ids).filter(|(best, golden)| best == *golden).count();
            all += greedy_ids.len();
        }
        println!("{name}, fp8_kv: {same} of {all} tokens are the golden ones");
        assert!(same * 100 >= all * 95, "{name}: {same} of {all}");
    }
}

/// Several tokens in one step have the bits that one step each has: their logits, and whatever the next step reads.
fn rows_together_are_rows_alone(arm: &Arm) {
    let tokens: Vec<u32> = (0..40).map(|i| (i * 733 + 11) % VOCAB as u32).collect();
    let store = structures::decode_loop("fp8_kv").unwrap().kv().unwrap();
    let stores = [KvChoice::Host, KvChoice::Store(store, KvOptions::default())];
    for (name, kv) in MODELS.into_iter().flat_map(|name| stores.map(|kv| (name, kv))) {
        let mut model = gpu(arm, &cpu(name));
        model.begin(&Sequence { window: 128, rows: 16, kv }).unwrap();
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

/// Prompts in one pass are as far from FP32 arithmetic as steps are, whatever their length.
fn prompts_are_close(arm: &Arm) {
    for name in MODELS {
        let (mut exact, mut rounded) = (cpu(name), edges(name));
        let mut model = gpu(arm, &exact);
        begin(&mut model, 1024, 1);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for len in (1..=16).chain([17, 31, 32, 33, 63, 64, 65, 100, 257, 300, 511, 700]) {
            let tokens: Vec<u32> = (0..len as u32).map(|i| (i * 733 + len as u32) % VOCAB as u32).collect();
            let expected = host_logits(&mut exact, &tokens, len - 1);
            model.reset().unwrap();
            model.prompt(&tokens).unwrap();
            ours.extend(apart(&logits(&mut model, 1), &expected));
            theirs.extend(apart(&host_logits(&mut rounded, &tokens, len - 1), &expected));
        }
        let (ours, theirs) = (median(ours), median(theirs));
        println!("{name}: prompts are {ours:.4} from FP32 arithmetic, BF16 edges {theirs:.4}");
        assert!(ours <= FURTHER * theirs, "{name}: {ours} from FP32 arithmetic, edges {theirs}");
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

/// Two models on one GPU, step by step in turns, each on its own stream: the bits of either alone.
fn two_sequences_do_not_meet(arm: &Arm) {
    let tokens: Vec<u32> = (0..50).map(|i| (i * 733 + 11) % VOCAB as u32).collect();
    let (prompt, next) = tokens.split_at(30);
    let hosts = MODELS.map(cpu);
    let mut models = [0, 1].map(|index| gpu(arm, &hosts[index]));
    models.iter_mut().for_each(|model| begin(model, 128, 1));
    let alone = [0, 1].map(|index| forced(&mut models[index], prompt, next));
    for model in &mut models {
        model.reset().unwrap();
        model.prompt(prompt).unwrap();
    }
    for (index, &token) in next.iter().enumerate() {
        models.iter_mut().for_each(|model| place(model, &[token], prompt.len() + index));
        models.iter_mut().for_each(|model| model.step(1).unwrap());
        for (model, alone) in models.iter_mut().zip(&alone) {
            assert!(logits(model, 1) == alone[(index + 1) * VOCAB..][..VOCAB], "step {index}");
        }
    }
}

/// Each before anything is allocated or queued; what follows it is right.
fn what_does_not_fit_is_refused(arm: &Arm) {
    let mut model = gpu(arm, &cpu("tiny-dense"));
    assert!(matches!(model.prompt(&[1]), Err(Refusal::ValueOutside { .. })), "no sequence");
    let sequence = |window, rows| Sequence { window, rows, ..Sequence::default() };
    let positions = model.config().max_position_embeddings;
    let refusal = model.begin(&sequence(positions + 1, 1)).unwrap_err();
    assert_eq!(refusal, Refusal::WindowExceeded { needed: positions + 1, window: positions });
    let refusal = model.begin(&sequence(64, 17)).unwrap_err().to_string();
    assert_eq!(refusal, "a step: rows = 17 is outside 1..=16");

    begin(&mut model, 64, 1);
    let tokens: Vec<u32> = (0..60).map(|i| (i * 733 + 11) % VOCAB as u32).collect();
    let expected = forced(&mut model, &tokens[..50], &tokens[50..]);
    assert!(matches!(model.step(2), Err(Refusal::DimOutside { dim: "rows", value: 2, .. })));
    assert_eq!(model.prompt(&[]), Err(Refusal::EmptyPrompt));
    assert_eq!(model.prompt(&[7, VOCAB as u32]), Err(Refusal::TokenOutside { token: 2048, vocab: VOCAB }));
    model.reset().unwrap();
    assert_eq!(model.prompt(&[1; 65]), Err(Refusal::WindowExceeded { needed: 65, window: 64 }));
    model.prompt(&[1; 40]).unwrap();
    assert_eq!(model.prompt(&[1; 25]), Err(Refusal::WindowExceeded { needed: 65, window: 64 }));
    assert!(forced(&mut model, &tokens[..50], &tokens[50..]) == expected, "after all of these");
}

/// With INT8 bound to every seat the model's steps are still row-invariant, no call falls back, and detaching gives the host's bits.
fn bound_seats_serve_every_step(arm: &Arm) {
    let tokens: Vec<u32> = (0..40).map(|i| (i * 733 + 11) % VOCAB as u32).collect();
    let (prompt, next) = tokens.split_at(20);
    for name in MODELS {
        let mut model = gpu(arm, &cpu(name));
        begin(&mut model, 128, 8);
        let host = forced(&mut model, prompt, next);
        let workspace = model.workspace().clone();
        let options = BindOptions {
            device: &arm.device,
            staged: false,
            mode: GuardMode::Fallback,
            scale_mode: ScaleMode::TwoLevel,
            calibration: None,
            workspace: Some(&workspace),
        };
        let plan = structures::bind(&mut model, &["*=w8a16_static".parse().unwrap()], options).unwrap();
        assert_eq!(plan.first_refusal(), None, "{name}");
        let alone = forced(&mut model, prompt, next);
        assert!(alone != host, "{name}: INT8 weights give other logits");
        model.reset().unwrap();
        model.prompt(prompt).unwrap();
        let together = step(&mut model, &next[..7], prompt.len());
        assert!(together == alone[VOCAB..][..7 * VOCAB], "{name}: 7 rows");
        for seat in model.seats() {
            let (.., ledger) = seat.ledger_row().unwrap();
            assert_eq!(ledger.fallbacks, 0, "{name}: {}", seat.path());
        }
        for path in model.seats().iter().map(|seat| seat.path().to_string()).collect::<Vec<_>>() {
            model.seat_mut(&path).unwrap().detach();
        }
        assert!(forced(&mut model, prompt, next) == host, "{name}: detached");
    }
}
