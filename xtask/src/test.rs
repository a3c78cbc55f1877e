//! `cargo xtask test`.

use anyhow::Result;

use crate::{command, toolkit};

pub fn run() -> Result<()> {
    let nvcc = toolkit::nvcc_if_possible()?;
    command::run(command::cargo(nvcc.as_deref()).args(["test", "--workspace"]))
}
