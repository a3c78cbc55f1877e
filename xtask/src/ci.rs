//! `cargo xtask ci`: every step in order, named and timed; the first that fails ends it.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::{bindgen, command, paths, toolkit, wheels};

/// Every architecture that the kernels are written for and nvcc compiles natively.
const ARCHS: &str = "90a,100a,120a";

const RUFF: &str = "ruff==0.17.6";

pub fn run() -> Result<()> {
    let started = Instant::now();
    let nvcc = step("toolkit", toolkit::nvcc)?;
    let cargo = |args: &[&str]| {
        let mut cargo = command::cargo(Some(&nvcc));
        cargo.args(args).env("STRUCTURES_CUDA_ARCHS", ARCHS).env("STRUCTURES_REQUIRE_NVCC", "1");
        cargo
    };
    // What a machine without nvcc builds, as docs.rs does.
    let bare = |args: &[&str]| {
        let mut cargo = cargo(args);
        cargo.env("DOCS_RS", "1");
        cargo
    };
    const CLIPPY: &[&str] = &["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"];

    run_step("format", &mut cargo(&["fmt", "--all", "--check"]))?;
    step("python", python)?;
    step("generated ffi", || bindgen::run(true))?;
    run_step("lints without kernels", &mut bare(CLIPPY))?;
    let mut doc = bare(&["doc", "--workspace", "--no-deps"]);
    run_step("documentation", doc.env("RUSTDOCFLAGS", "--deny warnings"))?;
    // `check` runs the build scripts, which is where kernels are compiled.
    let mut kernels = cargo(&["check"]);
    for krate in paths::kernel_crates()? {
        kernels.args(["--package", &paths::name(&krate)]);
    }
    run_step("kernels", &mut kernels)?;
    run_step("lints", &mut cargo(CLIPPY))?;
    run_step("tests", &mut cargo(&["xtask", "test"]))?;
    eprintln!("\nall steps passed in {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// The peers' programs: format and lints. Their tests run with those of `benches`.
fn python() -> Result<()> {
    let dir = wheels::install("ruff", &[RUFF], |dir| wheels::has(dir, "bin/ruff"))?;
    for args in [["format", "--check"].as_slice(), &["check"]] {
        let mut ruff = Command::new(dir.join("bin/ruff"));
        command::run(ruff.args(args).arg("--no-cache").arg(paths::root().join("benches/peers")))?;
    }
    Ok(())
}

fn run_step(name: &str, command: &mut Command) -> Result<()> {
    step(name, || command::run(command))
}

fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("\n== {name}");
    let started = Instant::now();
    let done = work().with_context(|| format!("step {name:?}"))?;
    eprintln!("== {name}: {:.1} s", started.elapsed().as_secs_f64());
    Ok(done)
}
