//! `cargo xtask COMMAND`: what one does with this repository. `cargo xtask --help` lists the commands; each is one file here.

mod artifacts;
mod bench;
mod bindgen;
mod bundle;
mod ci;
mod command;
mod demo;
mod paths;
mod test;
mod toolkit;
mod wheels;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Tasks of the structures repository
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Generate text with assets/tiny-dense, check it against the golden tokens, then do it with W8A16 bound
    Demo,
    /// Run all tests; kernels are compiled where nvcc is, or can be installed
    Test,
    /// Run the benchmarks: CPU arms here, kernels where there is a GPU
    Bench {
        /// One implementation, such as linear_proj/w8a16_static
        #[arg(value_name = "STRUCTURE/VARIANT")]
        filter: Option<String>,
        /// Time other libraries first, with the python3 that has PyTorch, and take them into the results
        #[arg(long)]
        peers: bool,
    },
    /// Find nvcc, or install it under target/; prints its path
    Toolkit,
    /// Build the tests, the benchmarks and `structures` for a GPU machine that has no Rust, under target/bundle
    Bundle {
        /// Copy assets/ too, so that the bundle needs no checkout
        #[arg(long)]
        with_assets: bool,
    },
    /// Generate each crate's src/ffi.rs from its launchers' header
    Bindgen {
        /// Change nothing; fail when a committed file is not what its header gives
        #[arg(long)]
        check: bool,
    },
    /// Everything that a change must pass
    Ci,
}

fn main() -> ExitCode {
    match run(&Args::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            command::exit_code(&error)
        }
    }
}

fn run(task: &Task) -> Result<()> {
    match task {
        Task::Demo => demo::run(),
        Task::Test => test::run(),
        Task::Bench { filter, peers } => bench::run(filter.as_deref(), *peers),
        Task::Toolkit => toolkit::run(),
        Task::Bundle { with_assets } => bundle::run(*with_assets),
        Task::Bindgen { check } => bindgen::run(*check),
        Task::Ci => ci::run(),
    }
}
