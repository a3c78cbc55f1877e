use std::fs;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use qwen3_5::{Model, Perplexity};
use serde_json::json;

use crate::args::Eval;
use crate::host;

/// Rows of one pass: the widest decode band, so that what is bound is what is measured.
const ROWS: usize = 16;

/// Measures perplexity.
pub fn run(args: &Eval) -> Result<()> {
    let tokens = read_tokens(&args.tokens)?;
    let (mut model, binding) = host::load(&args.model)?;
    let tokens = limited(&tokens, args)?;

    let host_form = measure(&mut model, tokens, args.window, "host")?;
    let bound = if binding.is_empty() {
        None
    } else {
        let plan = binding.bind(&mut model)?;
        Some((
            plan.summary(),
            measure(&mut model, tokens, args.window, "bound")?,
            host::ledger(&model).summary(),
        ))
    };

    let mut out = io::stdout().lock();
    if args.json {
        let bound = bound.map(|(plan, perplexity, ledger)| {
            json!({ "perplexity": perplexity, "plan": plan, "ledger": ledger, "ratio": perplexity.ppl / host_form.ppl })
        });
        writeln!(out, "{:#}", json!({ "window": args.window, "host": host_form, "bound": bound }))?;
        return Ok(());
    }
    writeln!(
        out,
        "host   perplexity {:.4}  nll {:.5}  over {} tokens",
        host_form.ppl, host_form.nll, host_form.tokens
    )?;
    if let Some((plan, perplexity, ledger)) = bound {
        let change = (perplexity.ppl / host_form.ppl - 1.0) * 100.0;
        writeln!(out, "bound  perplexity {:.4}  nll {:.5}  {change:+.3} %", perplexity.ppl, perplexity.nll)?;
        writeln!(
            out,
            "ledger: {} seats, {} calls = {} served + {} dispatched by band + {} fallbacks + {} refused",
            plan.bound,
            ledger.calls,
            ledger.served,
            ledger.dispatched_by_band,
            ledger.fallbacks,
            ledger.refused
        )?;
    }
    Ok(())
}

/// A file of 16-bit little-endian ids.
fn read_tokens(path: &Path) -> Result<Vec<u32>> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    let (ids, rest) = bytes.as_chunks::<2>();
    if !rest.is_empty() {
        bail!("{}: {} bytes is an odd length; token ids are 16-bit", path.display(), bytes.len());
    }
    Ok(ids.iter().map(|&id| u32::from(u16::from_le_bytes(id))).collect())
}

/// The tokens of as many whole windows as `--limit` allows, and the one that the last position predicts.
fn limited<'a>(tokens: &'a [u32], args: &Eval) -> Result<&'a [u32]> {
    if args.window == 0 {
        bail!("--window is 0; it must be at least 1");
    }
    let predictable = tokens.len().saturating_sub(1).min(args.limit.unwrap_or(usize::MAX));
    let windows = predictable / args.window;
    if windows == 0 {
        bail!(
            "{}: {} tokens, of which {predictable} can be predicted, are less than one window of {}",
            args.tokens.display(),
            tokens.len(),
            args.window
        );
    }
    Ok(&tokens[..=windows * args.window])
}

fn measure(model: &mut Model, tokens: &[u32], window: usize, what: &'static str) -> Result<Perplexity> {
    let bar = ProgressBar::new(tokens.len() as u64 - 1).with_message(what);
    bar.set_style(ProgressStyle::with_template(
        "{msg:6} [{bar:40}] {pos}/{len} tokens, {per_sec}, {eta} left",
    )?);
    let perplexity = model.perplexity(tokens, window, ROWS, &mut |done| bar.set_position(done as u64));
    bar.finish_and_clear();
    Ok(perplexity?)
}
