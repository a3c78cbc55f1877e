//! `cargo xtask bench`.

use anyhow::Result;

use crate::{command, toolkit};

pub fn run(filter: Option<&str>) -> Result<()> {
    let nvcc = toolkit::nvcc_if_possible()?;
    let mut bench = command::cargo(nvcc.as_deref());
    bench.args(["bench", "--package", "benches", "--bench", "*", "--"]).args(filter);
    command::run(&mut bench)
}
