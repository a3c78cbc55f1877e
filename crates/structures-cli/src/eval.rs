use std::io::{self, Write};

use anyhow::Result;
use qwen3_5::{Model, Perplexity};
use serde_json::json;

use crate::args::Eval;
use crate::{host, tokens};

/// Rows of one pass: the widest decode band, so that what is bound is what is measured.
const ROWS: usize = 16;

/// Measures perplexity.
pub fn run(args: &Eval) -> Result<()> {
    let text = tokens::read(&args.text)?;
    let (mut model, binding) = host::load(&args.model)?;

    let host_form = measure(&mut model, &text, args.text.window, "host")?;
    let bound = if binding.is_empty() {
        None
    } else {
        let plan = binding.bind(&mut model)?;
        Some((
            plan.summary(),
            measure(&mut model, &text, args.text.window, "bound")?,
            host::ledger(&model).summary(),
        ))
    };

    let mut out = io::stdout().lock();
    if args.json {
        let bound = bound.map(|(plan, perplexity, ledger)| {
            json!({ "perplexity": perplexity, "plan": plan, "ledger": ledger, "ratio": perplexity.ppl / host_form.ppl })
        });
        writeln!(out, "{:#}", json!({ "window": args.text.window, "host": host_form, "bound": bound }))?;
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

fn measure(model: &mut Model, text: &[u32], window: usize, what: &'static str) -> Result<Perplexity> {
    let bar = tokens::bar(text.len() - 1, what)?;
    let perplexity = model.perplexity(text, window, ROWS, &mut |done| bar.set_position(done as u64));
    bar.finish_and_clear();
    Ok(perplexity?)
}
