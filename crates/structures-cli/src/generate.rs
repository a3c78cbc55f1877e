use std::io::{self, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use decode_loop::{Arm, Generation, Progress, Request};
use device::Device;
use indicatif::ProgressBar;
use qwen3_5::{CpuModel, Model};
use serde_json::json;
use structure_core::Ledger;

use crate::args::Generate;
use crate::decode::{self, Decode};
use crate::host::{self, Binding};
use crate::interrupt::Interrupt;
use crate::text::Text;
use crate::tokens;

/// Prompts longer than that have a progress bar.
const LONG_PROMPT: usize = 512;

/// Continues a prompt.
pub fn run(args: &Generate) -> Result<ExitCode> {
    let decode = Decode::new(&args.kv)?;
    let (model, binding) = host::load_with(&args.model, &decode.registrations())?;
    let text = Text::load(&args.model.model)?;
    let prompt = match (&args.prompt_tokens, &args.prompt) {
        (Some(ids), _) => ids.clone(),
        (None, Some(prompt)) => text.encode(prompt)?,
        (None, None) => bail!("a prompt is needed"),
    };
    let stop = if args.ignore_eos { Vec::new() } else { model.config().eos_token_ids.clone() };
    let sampler = decode::sampler(&args.sampler);
    let request = Request { prompt: &prompt, max_new: args.max_new, stop: &stop, sampler };
    let job = Job { args, text: &text, request, decode, interrupt: Interrupt::watch()? };
    let outcome = match binding.device() {
        Device::Cpu => job.on_cpu(model, &binding)?,
        Device::Cuda(_) => job.on_gpu(model, &binding)?,
    };
    if args.json {
        print_json(&text, &prompt, binding.device(), &outcome)?;
    } else {
        print_summary(&prompt, &outcome)?;
    }
    Ok(job.interrupt.exit_code())
}

/// One text to generate.
struct Job<'a> {
    args: &'a Generate,
    text: &'a Text,
    request: Request<'a>,
    decode: Decode,
    interrupt: Interrupt,
}

/// What became of it.
struct Outcome {
    generation: Generation,
    kv_bytes: u64,
    ledger: Ledger,
}

impl Job<'_> {
    fn on_cpu(&self, mut model: Model, binding: &Binding) -> Result<Outcome> {
        binding.bind(&mut model)?;
        let (generation, kv_bytes) = self.generate(Arm::Cpu(&mut CpuModel::new(&mut model)))?;
        Ok(Outcome { generation, kv_bytes, ledger: host::ledger(&model) })
    }

    #[cfg(kernels_built)]
    fn on_gpu(&self, model: Model, binding: &Binding) -> Result<Outcome> {
        let mut model = binding.upload(&model)?;
        let (generation, kv_bytes) = self.generate(Arm::Cuda(&mut model))?;
        Ok(Outcome { generation, kv_bytes, ledger: host::ledger(&model) })
    }

    #[cfg(not(kernels_built))]
    fn on_gpu(&self, _: Model, _: &Binding) -> Result<Outcome> {
        bail!("{}", qwen3_5::KERNELS.why_not)
    }

    fn generate(&self, host: Arm<'_>) -> Result<(Generation, u64)> {
        let mut decode = self.decode.build(host, self.args.window.unwrap_or(self.request.positions()))?;
        let mut printer = Printer::new(self.text, self.request.prompt, !self.args.json);
        let mut bar = None;
        let generation = decode.generate(&self.request, &mut |progress| {
            let flow = match progress {
                Progress::Prompt(read) => {
                    show_prompt(&mut bar, read, self.request.prompt.len());
                    ControlFlow::Continue(())
                }
                Progress::Token(token) => printer.token(token),
            };
            if flow.is_break() { flow } else { self.interrupt.flow() }
        })?;
        printer.end()?;
        Ok((generation, decode.kv_bytes()))
    }
}

/// Shows how much of a long prompt has been read, on a terminal.
fn show_prompt(bar: &mut Option<ProgressBar>, read: usize, prompt: usize) {
    if bar.is_none() && prompt > LONG_PROMPT {
        *bar = tokens::bar(prompt, "prompt").ok();
    }
    if let Some(bar) = bar {
        bar.set_position(read as u64);
        if read == prompt {
            bar.finish_and_clear();
        }
    }
}

/// Prints the prompt and then tokens as they come; nothing before the first, as the prompt may yet be refused. Remembers the
/// first error, as a callback cannot return one.
struct Printer<'a> {
    text: &'a Text,
    prompt: Option<&'a [u32]>,
    stream: crate::text::Streamed<'a>,
    live: bool,
    failed: Option<anyhow::Error>,
}

impl<'a> Printer<'a> {
    fn new(text: &'a Text, prompt: &'a [u32], live: bool) -> Self {
        Printer { text, prompt: Some(prompt), stream: text.stream(), live, failed: None }
    }

    fn token(&mut self, token: u32) -> ControlFlow<()> {
        if !self.live {
            return ControlFlow::Continue(());
        }
        match self.print_token(token) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.failed = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    fn print_token(&mut self, token: u32) -> Result<()> {
        self.print_prompt()?;
        print(&self.stream.push(token)?)
    }

    fn print_prompt(&mut self) -> Result<()> {
        self.prompt.take().map_or(Ok(()), |prompt| print(&self.text.decode(prompt)?))
    }

    fn end(mut self) -> Result<()> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        if !self.live {
            return Ok(());
        }
        self.print_prompt()?;
        print(&format!("{}\n", self.stream.rest()?))
    }
}

fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

fn print_json(text: &Text, prompt: &[u32], device: &Device, outcome: &Outcome) -> Result<()> {
    let Outcome { generation, kv_bytes, ledger } = outcome;
    let object = json!({
        "prompt_ids": prompt,
        "new_ids": generation.tokens,
        "text": text.decode(&generation.tokens).context("the new tokens have no text")?,
        "finish": generation.finish,
        "device": device.to_string(),
        "timings": {
            "prompt_s": generation.prompt_seconds,
            "decode_s": generation.decode_seconds,
            "tokens_per_s": generation.tokens_per_second(),
        },
        "kv_bytes": kv_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
        "ledger": { "summary": ledger.summary(), "seats": ledger.seats },
    });
    print(&format!("{object:#}\n"))
}

/// The most memory that this process has held, mapped files among it; Linux says so, others do not.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}

fn print_summary(prompt: &[u32], outcome: &Outcome) -> Result<()> {
    let Outcome { generation, kv_bytes, ledger } = outcome;
    let mut lines = format!(
        "\nprompt {} tokens in {:.3} s; {} new tokens",
        prompt.len(),
        generation.prompt_seconds,
        generation.tokens.len()
    );
    if let Some(rate) = generation.tokens_per_second() {
        lines += &format!(", {rate:.1} tokens/s");
    }
    lines += &format!("; keys and values {kv_bytes} bytes");
    let sum = ledger.summary();
    if sum.seats > 0 {
        lines += &format!(
            "\nledger: {} seats, {} calls = {} served + {} dispatched by band + {} fallbacks + {} refused",
            sum.seats, sum.calls, sum.served, sum.dispatched_by_band, sum.fallbacks, sum.refused
        );
    }
    print(&format!("{lines}\n"))
}
