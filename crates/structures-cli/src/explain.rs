use std::io::{self, Write};

use anyhow::Result;
use serde_json::json;

use crate::args::Explain;
use crate::host;

/// Prints what would serve each seat. Refusals are part of the answer, not an error.
pub fn run(args: &Explain) -> Result<()> {
    let (mut model, binding) = host::load(&args.model)?;
    let plan = binding.plan(&mut model)?;
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", json!({ "summary": plan.summary(), "seats": plan.rows() }))?;
    } else {
        writeln!(out, "{}", plan.table())?;
    }
    Ok(())
}
