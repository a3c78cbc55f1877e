use std::io::{self, Write};
use std::ops::ControlFlow;

use anyhow::{Context, Result, bail};
use qwen3_5::{Generate as Options, Generation};
use serde_json::json;
use structure_core::Ledger;

use crate::args::Generate;
use crate::host;
use crate::text::Text;

/// Continues a prompt.
pub fn run(args: &Generate) -> Result<()> {
    let (mut model, binding) = host::load(&args.model)?;
    let text = Text::load(&args.model.model)?;
    let prompt = match (&args.prompt_tokens, &args.prompt) {
        (Some(ids), _) => ids.clone(),
        (None, Some(prompt)) => text.encode(prompt)?,
        (None, None) => bail!("a prompt is needed"),
    };
    binding.bind(&mut model)?;

    let stop = if args.ignore_eos { Vec::new() } else { model.config().eos_token_ids.clone() };
    let options = Options { max_new: args.max_new, stop: &stop };
    let mut printer = Printer::new(&text, &prompt, !args.json);
    let generation = model.generate(&prompt, &options, &mut |token| printer.token(token))?;
    printer.end()?;

    let ledger = host::ledger(&model);
    if args.json {
        print_json(&text, &prompt, &generation, &ledger)
    } else {
        print_summary(&prompt, &generation, &ledger)
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

fn print_json(text: &Text, prompt: &[u32], generation: &Generation, ledger: &Ledger) -> Result<()> {
    let object = json!({
        "prompt_ids": prompt,
        "new_ids": generation.tokens,
        "text": text.decode(&generation.tokens).context("the new tokens have no text")?,
        "timings": {
            "prompt_s": generation.prompt_seconds,
            "decode_s": generation.decode_seconds,
            "tokens_per_s": generation.tokens_per_second(),
        },
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

fn print_summary(prompt: &[u32], generation: &Generation, ledger: &Ledger) -> Result<()> {
    let mut lines = format!(
        "\nprompt {} tokens in {:.3} s; {} new tokens",
        prompt.len(),
        generation.prompt_seconds,
        generation.tokens.len()
    );
    if let Some(rate) = generation.tokens_per_second() {
        lines += &format!(", {rate:.1} tokens/s");
    }
    let sum = ledger.summary();
    if sum.seats > 0 {
        lines += &format!(
            "\nledger: {} seats, {} calls = {} served + {} dispatched by band + {} fallbacks + {} refused",
            sum.seats, sum.calls, sum.served, sum.dispatched_by_band, sum.fallbacks, sum.refused
        );
    }
    print(&format!("{lines}\n"))
}
