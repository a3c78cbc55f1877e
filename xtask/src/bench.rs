//! `cargo xtask bench`.

use std::env;
use std::ffi::OsString;
use std::path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::{command, paths, toolkit};

/// Where results go to, and the peers' files that go into them.
const RESULTS: &str = "STRUCTURES_RESULTS";
const PEERS: &str = "STRUCTURES_PEERS";

pub fn run(filter: Option<&str>, peers: bool) -> Result<()> {
    let nvcc = toolkit::nvcc_if_possible()?;
    let mut bench = command::cargo(nvcc.as_deref());
    bench.args(["bench", "--package", "benches", "--bench", "all", "--"]).args(filter);
    bench.env(RESULTS, absolute(RESULTS)?.unwrap_or_else(|| paths::root().join("results").into()));
    if peers {
        let mut files = Vec::new();
        for program in ["peers", "decode"] {
            let file = paths::target().join(format!("{program}.json"));
            let mut python = Command::new("python3");
            python.arg(paths::root().join(format!("benches/peers/{program}.py"))).arg("--out").arg(&file);
            command::run(&mut python)?;
            files.push(file);
        }
        bench.env(PEERS, env::join_paths(files)?);
    } else if let Some(files) = absolute(PEERS)? {
        bench.env(PEERS, files);
    }
    command::run(&mut bench)
}

/// The paths in a variable as seen from here: cargo runs benches in their own package's folder.
fn absolute(variable: &str) -> Result<Option<OsString>> {
    let Some(value) = env::var_os(variable) else { return Ok(None) };
    let paths = env::split_paths(&value).map(path::absolute).collect::<Result<Vec<_>, _>>();
    Ok(Some(env::join_paths(paths.with_context(|| format!("{variable}={value:?}"))?)?))
}
