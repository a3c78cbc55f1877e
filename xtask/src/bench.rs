//! `cargo xtask bench`.

use std::env;
use std::process::Command;

use anyhow::Result;

use crate::{command, paths, toolkit};

pub fn run(filter: Option<&str>, peers: bool) -> Result<()> {
    let nvcc = toolkit::nvcc_if_possible()?;
    let mut bench = command::cargo(nvcc.as_deref());
    bench.args(["bench", "--package", "benches", "--bench", "*", "--"]).args(filter);
    // Cargo runs benches in their own package's folder.
    if env::var_os("STRUCTURES_RESULTS").is_none() {
        bench.env("STRUCTURES_RESULTS", paths::root().join("results"));
    }
    if peers {
        let file = paths::target().join("peers.json");
        let mut python = Command::new("python3");
        python.arg(paths::root().join("benches/peers/peers.py")).arg("--out").arg(&file);
        command::run(&mut python)?;
        bench.env("STRUCTURES_PEERS", file);
    }
    command::run(&mut bench)
}
