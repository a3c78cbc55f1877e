//! Benches of `decode_loop` and of what a step of the host is made of: attention over both stores, the gated delta rule, the whole
//! step.

use std::ops::ControlFlow;

use anyhow::{Context, Result};
use benches::results::Row;
use benches::{gpu, protocol, random};
use decode_loop::{
    Arm, Attend, CudaHost, KvChoice, KvOptions, KvRows, KvShape, KvStore, LoopOptions, Progress, Request,
    Sampler, Sequence,
};
use device::{Buffer, CudaDevice, Device, Graph, Stream};
use half::bf16;
use linear_proj::ScaleMode;
use qwen3_5::cuda::{Bf16Kv, DeltaLayer, DeltaParameters, DeltaRows, DeltaShape, DeltaState};
use qwen3_5::{CudaModel, Model, Preset};
use structure_core::GuardMode;
use structures::BindOptions;

const FP8_KV: &str = "decode_loop/fp8_kv";
const BF16_KV: &str = "qwen3_5/bf16_kv";
const GATED_DELTA: &str = "qwen3_5/gated_delta";
const WHOLE_STEP: &str = "decode_loop/whole_step";

/// Query heads, KV heads and head dim of the 27B host.
const HEADS: (usize, usize, usize) = (24, 4, 256);
const CONTEXTS: [usize; 3] = [4096, 32_768, 131_072];
const QUERY_ROWS: [usize; 4] = [1, 4, 7, 16];
const DELTA_ROWS: [usize; 3] = [1, 4, 7];

/// What there is to measure.
pub const IDS: [&str; 4] = [FP8_KV, BF16_KV, GATED_DELTA, WHOLE_STEP];

/// Measures one of them.
pub fn run(id: &str, gpu: &CudaDevice, read_gbs: f64) -> Result<Vec<Row>> {
    let stream = gpu.new_stream()?;
    match id {
        GATED_DELTA => gated_delta(&stream, read_gbs),
        WHOLE_STEP => whole_steps(gpu, read_gbs),
        store => attention(store, &stream, read_gbs),
    }
}

/// Queries at the end of a context, each layer's keys and values read cold.
fn attention(id: &str, stream: &Stream, read_gbs: f64) -> Result<Vec<Row>> {
    let (heads, kv_heads, head_dim) = HEADS;
    let element = if id == FP8_KV { 1 } else { 2 };
    let mut rows = Vec::new();
    for ctx in CONTEXTS {
        let bytes = 2 * ctx * kv_heads * head_dim * element;
        let layers = protocol::copies(bytes);
        let shape = KvShape { layers, heads, kv_heads, head_dim, window: ctx };
        let mut store: Box<dyn KvStore> = match id {
            FP8_KV => {
                let factory = structures::decode_loop("fp8_kv")?.kv()?;
                (factory.cuda)(stream, &shape, &KvOptions::default())?
            }
            _ => Box::new(Bf16Kv::new(stream, &shape)?),
        };
        fill(&mut *store, stream)?;
        for m in QUERY_ROWS {
            let queries = random::uniform_bf16(m * heads * head_dim, 5);
            let queries = Buffer::from_host(stream, &queries, &[m, heads, head_dim])?;
            let mut out = Buffer::<bf16>::zeros(stream, &[m, heads, head_dim])?;
            let position = Buffer::from_host(stream, &[(ctx - m) as i32], &[1])?;
            let us = gpu::time(stream, layers, protocol::calls(layers, 1), |layer| {
                let out = out.view_mut();
                let (queries, position) = (queries.view(), position.view());
                store.attend(layer, &Attend { queries, out: &out, rows: m, position, stream })
            })?;
            let moved = (bytes + 2 * m * heads * head_dim * size_of::<bf16>()) as f64;
            let shape = format!("{heads}/{kv_heads}/{head_dim}");
            let row = Row::new(id, "attention", us, moved, read_gbs).of_loop(&shape, m, Some(ctx));
            eprintln!("{id}, context {ctx}, {m} rows: {us:.2} us, {:.3} of the floor", row.ratio);
            rows.push(row);
        }
    }
    Ok(rows)
}

/// Random keys and values at every position of every layer.
fn fill(store: &mut dyn KvStore, stream: &Stream) -> Result<()> {
    const ROWS: usize = 4096;
    let KvShape { layers, kv_heads, head_dim, window, .. } = store.shape();
    let elements = |seed| random::uniform_bf16(ROWS * kv_heads * head_dim, seed);
    let keys = Buffer::from_host(stream, &elements(3), &[ROWS, kv_heads, head_dim])?;
    let values = Buffer::from_host(stream, &elements(4), &[ROWS, kv_heads, head_dim])?;
    for first in (0..window).step_by(ROWS) {
        let position = Buffer::from_host(stream, &[first as i32], &[1])?;
        let (keys, values, rows) = (keys.view(), values.view(), ROWS.min(window - first));
        for layer in 0..layers {
            store.append(layer, &KvRows { keys, values, rows, position: position.view(), stream })?;
        }
        stream.synchronize()?;
    }
    Ok(())
}

/// The mixer of the 27B host between its projections, each layer's state read cold.
fn gated_delta(stream: &Stream, read_gbs: f64) -> Result<Vec<Row>> {
    let shape = DeltaShape { key_heads: 16, heads: 48, key_dim: 128, value_dim: 128, taps: 4 };
    let filters = vec![0.25; shape.channels() * shape.taps];
    let (rate, dt_bias) = (vec![-2.0; shape.heads], vec![-3.0; shape.heads]);
    let scale = vec![1.0; shape.value_dim];
    let parameters =
        DeltaParameters { filters: &filters, rate: &rate, dt_bias: &dt_bias, scale: &scale, eps: 1e-6 };
    let layer = DeltaLayer::new(stream, &shape, &parameters)?;
    let copies = protocol::copies(shape.state_bytes(1));
    let mut states =
        (0..copies).map(|_| DeltaState::new(stream, &shape, 1)).collect::<Result<Vec<DeltaState>, _>>()?;
    let mut rows = Vec::new();
    for m in DELTA_ROWS {
        let input = |width: usize, seed| {
            Buffer::from_host(stream, &random::uniform_bf16(m * width, seed), &[m, width])
        };
        let (mixed, z) = (input(shape.channels(), 6)?, input(shape.values(), 7)?);
        let (b, a) = (input(shape.heads, 8)?, input(shape.heads, 9)?);
        let mut out = Buffer::<bf16>::zeros(stream, &[m, shape.values()])?;
        let us = gpu::time(stream, copies, protocol::calls(copies, 1), |copy| {
            let call = DeltaRows {
                mixed: mixed.view(),
                z: z.view(),
                b: b.view(),
                a: a.view(),
                out: out.view_mut(),
                rows: m,
                from: None,
                keep: false,
            };
            layer.queue(&mut states[copy], &call, stream)
        })?;
        let moved = 2 * shape.state_bytes(1) + m * (shape.channels() + 2 * shape.values()) * 2;
        let row = Row::new(GATED_DELTA, "gated_delta", us, moved as f64, read_gbs);
        let row = row.of_loop("48x128x128", m, None);
        eprintln!("{GATED_DELTA}, {m} rows: {us:.2} us, {:.3} of the floor", row.ratio);
        rows.push(row);
    }
    Ok(rows)
}

/// A host, what its seats are bound to, and its store.
struct Case {
    preset: Preset,
    binding: &'static str,
    rules: &'static [&'static str],
    fp8_kv: bool,
}

const CASES: [Case; 3] = [
    Case { preset: Preset::Dense27B, binding: "bf16, bf16_kv", rules: &[], fp8_kv: false },
    Case {
        preset: Preset::Dense27B,
        binding: "nvfp4_dynamic, w8a16_static head, fp8_kv",
        // The gates of a layer are 48 features each: too few to be worth a format.
        rules: &["*=nvfp4_dynamic", "*.in_proj_[ab]=host", "lm_head=w8a16_static"],
        fp8_kv: true,
    },
    Case { preset: Preset::Sparse35BA3B, binding: "bf16, bf16_kv", rules: &[], fp8_kv: false },
];

/// Tokens of the prompt, and those that are timed after it.
const PROMPT: usize = 4096;
const TOKENS: usize = 128;

fn whole_steps(gpu: &CudaDevice, read_gbs: f64) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut host: Option<(Preset, CudaModel)> = None;
    for case in CASES {
        // One host after another: two do not fit.
        let mut model = match host.take() {
            Some((preset, model)) if preset == case.preset => model,
            other => {
                drop(other);
                CudaModel::new(&Model::random(case.preset.config())?, gpu)?
            }
        };
        bind(&mut model, gpu, case.rules)?;
        rows.extend(whole_step(&mut model, &case, read_gbs)?);
        host = Some((case.preset, model));
    }
    Ok(rows)
}

fn bind(model: &mut CudaModel, gpu: &CudaDevice, rules: &[&str]) -> Result<()> {
    let rules = rules.iter().map(|rule| rule.parse()).collect::<Result<Vec<_>, _>>()?;
    let (device, workspace) = (Device::Cuda(gpu.clone()), model.workspace().clone());
    let options = BindOptions {
        device: &device,
        staged: false,
        mode: GuardMode::Strict,
        scale_mode: ScaleMode::TwoLevel,
        calibration: None,
        workspace: Some(&workspace),
    };
    if let Some(reason) = structures::bind(model, &rules, options)?.first_refusal() {
        anyhow::bail!("{reason}");
    }
    Ok(())
}

fn whole_step(model: &mut CudaModel, case: &Case, read_gbs: f64) -> Result<Vec<Row>> {
    let kv = match case.fp8_kv {
        true => KvChoice::Store(structures::decode_loop("fp8_kv")?.kv()?, KvOptions::default()),
        false => KvChoice::Host,
    };
    let sequence = Sequence { window: PROMPT + TOKENS, rows: 1, kv };
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| i * 733 % 248_320).collect();
    let request = Request { prompt: &prompt, max_new: TOKENS, stop: &[], sampler: Sampler::Greedy };
    let door = structures::decode_loop("whole_step")?;
    let mut decode = door.build(Arm::Cuda(model), &LoopOptions { sequence })?;
    let mut runs = Vec::new();
    for _ in 0..3 {
        runs.push(decode.generate(&request, &mut |_: Progress| ControlFlow::Continue(()))?);
    }
    drop(decode);
    runs.sort_by(|a, b| a.decode_seconds.total_cmp(&b.decode_seconds));
    let run = &runs[1];
    let tok_s = run.tokens_per_second().context("no token after the first")?;
    let stream = model.stream().clone();
    let bytes = model.step_bytes(PROMPT + TOKENS / 2)?.total() as f64;
    let launches = Graph::capture(&stream, |_| model.step(1))?.nodes()?;
    let shape = case.preset.name();
    let row = Row::new(WHOLE_STEP, "step", 1e6 / tok_s, bytes, read_gbs).of_loop(shape, 1, Some(PROMPT));
    let step =
        Row { binding: Some(case.binding.to_string()), tok_s: Some(tok_s), launches: Some(launches), ..row };
    // All weights are read once at least.
    let prompt = Row::new(WHOLE_STEP, "prompt", run.prompt_seconds * 1e6, bytes, read_gbs);
    let prompt = Row {
        binding: step.binding.clone(),
        tok_s: Some(PROMPT as f64 / run.prompt_seconds),
        ..prompt.of_loop(shape, PROMPT, None)
    };
    eprintln!(
        "{shape}, {}: {tok_s:.1} tokens/s, {:.3} of the floor, {launches} launches; prompt {:.3} s",
        case.binding, step.ratio, run.prompt_seconds
    );
    Ok(vec![step, prompt])
}
