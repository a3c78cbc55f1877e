use std::io::{self, Write};
use std::ops::ControlFlow;

use anyhow::Result;
use decode_loop::{Arm, CudaHost, Progress, Request, Sampler};
use linear_proj::{Host, SeatState};
use qwen3_5::{Config, FfnConfig, LayerType, Model, Preset};
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
    let window = request.positions();
    let mut decode = decode.build(Arm::Cuda(&mut model), window)?;
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
    let attended = prompt.len() as u64 + args.tokens as u64 / 2;
    let floor = Floor::new(model.config(), &model, kv_bytes * attended / window as u64);
    let step_us = 1e6 / generation.tokens_per_second().unwrap_or(f64::NAN);
    let floor_us = floor.bytes() as f64 / (args.read_gbs * 1e3);
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

/// The fewest bytes that one step moves.
struct Floor {
    /// Of projections as they are bound, and of the experts that serve a token.
    weights: u64,
    /// Of gated-delta layers, read and written.
    states: u64,
    /// Read.
    kv: u64,
}

impl Floor {
    fn new(config: &Config, host: &dyn Host, kv: u64) -> Self {
        const BF16: usize = 2;
        let seats = host.seats().into_iter().map(|seat| match seat.state() {
            SeatState::Host => (seat.n() * seat.k() * BF16) as u64,
            SeatState::Bound(receipt, _) => receipt.weight_bytes,
        });
        let experts = match &config.ffn {
            FfnConfig::Dense { .. } => 0,
            FfnConfig::Sparse(sparse) => {
                let expert = 3 * sparse.moe_intermediate_size * config.hidden_size * BF16;
                config.layer_types.len() * sparse.num_experts_per_tok * expert
            }
        };
        let deltas = config.layer_types.iter().filter(|kind| **kind == LayerType::LinearAttention).count();
        let state = config.linear_num_value_heads
            * config.linear_key_head_dim
            * config.linear_value_head_dim
            * size_of::<f32>();
        Floor { weights: seats.sum::<u64>() + experts as u64, states: (2 * deltas * state) as u64, kv }
    }

    fn bytes(&self) -> u64 {
        self.weights + self.states + self.kv
    }
}
