use std::io::{self, Write};
use std::ops::ControlFlow;

use anyhow::Result;
use decode_loop::{Arm, CudaHost, Progress, Request, Sampler};
use qwen3_5::{Model, Preset};
use serde_json::json;

use crate::args::Synth;
use crate::decode::Decode;
use crate::host::{self, Binding};
use crate::tokens;

/// Runs a text through a random model, and prints what a step took.
pub fn measure(args: &Synth, preset: Preset, decode: &Decode, binding: &Binding) -> Result<()> {
    eprintln!("{}: uploading random weights, binding", preset.name());
    let mut model = binding.upload(&Model::random(preset.config())?)?;

    let prompt: Vec<u32> =
        (0..args.context.max(1) as u32).map(|index| index.wrapping_mul(7919) % 100_000).collect();
    let request = Request { prompt: &prompt, max_new: args.tokens, stop: &[], sampler: Sampler::Greedy };
    let mut decode = decode.build(Arm::Cuda(&mut model), request.positions())?;
    let bar = tokens::bar(prompt.len() + args.tokens, "synth")?;
    let generation = decode.generate(&request, &mut |progress| {
        match progress {
            Progress::Prompt(read) => bar.set_position(read as u64),
            Progress::Token(_) => bar.inc(1),
        }
        ControlFlow::Continue(())
    })?;
    bar.finish_and_clear();
    let (launches, kv_bytes) = (decode.launches(), decode.kv_bytes());
    drop(decode);

    // The last step attends to every position but the last token's, the first one to the prompt; the middle is their mean.
    let floor = model.step_bytes(prompt.len() + args.tokens / 2)?;
    let step_us = 1e6 / generation.tokens_per_second().unwrap_or(f64::NAN);
    let floor_us = floor.total() as f64 / (args.read_gbs * 1e3);
    let ledger = host::ledger(&model).summary();
    let report = json!({
        "shape": preset.name(),
        "device": model.stream().device().name(),
        "bind": args.bind.bind,
        "kv": args.kv.kv,
        "context": prompt.len(),
        "tokens": generation.tokens.len(),
        "prompt_s": generation.prompt_seconds,
        "tok_s": generation.tokens_per_second(),
        "step_us": step_us,
        "weight_bytes": floor.weights,
        "state_bytes": floor.states,
        "kv_bytes_read": floor.kv,
        "kv_bytes": kv_bytes,
        "floor_us": floor_us,
        "ratio": floor_us / step_us,
        "launches": launches,
        "ledger": ledger,
    });
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{report:#}")?;
        return Ok(());
    }
    writeln!(
        out,
        "prompt {} tokens in {:.3} s\n{:.1} tokens/s, {step_us:.0} us a step, {} launches\n\
         floor {floor_us:.0} us at {} GB/s ({} bytes of weights, {} of states, {} of keys and values): {:.2}",
        prompt.len(),
        generation.prompt_seconds,
        1e6 / step_us,
        launches.unwrap_or(0),
        args.read_gbs,
        floor.weights,
        floor.states,
        floor.kv,
        floor_us / step_us,
    )?;
    Ok(())
}
