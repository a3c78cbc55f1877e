use std::io::{self, Write};

use anyhow::Result;
use serde_json::json;

use crate::args::List;

/// Prints the registry.
pub fn run(args: &List) -> Result<()> {
    let registrations = structures::list()?;
    let mut out = io::stdout().lock();
    if !args.json {
        writeln!(out, "{}", structures::registrations_table(&registrations))?;
        return Ok(());
    }
    let rows: Vec<_> = registrations
        .iter()
        .map(|registration| {
            json!({
                "id": registration.id,
                "summary": registration.summary,
                "envelope": registration.envelope,
                "formats": registration.formats,
                "calibrated": registration.calibrated,
                "fallback": registration.fallback,
                "kernels": registration.kernels,
            })
        })
        .collect();
    writeln!(out, "{:#}", json!(rows))?;
    Ok(())
}
