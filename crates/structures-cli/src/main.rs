//! `structures`: look into the registry, see what would serve each seat of a model, generate text, measure steps, calibrate, measure
//! perplexity.
//!
//! Errors are one line on stderr, and exit code 2; a text that Ctrl-C ended is printed as far as it came, with exit code 130.

mod args;
mod calibrate;
mod decode;
mod eval;
mod explain;
mod generate;
mod host;
mod interrupt;
mod list;
mod synth;
mod text;
mod tokens;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use log::LevelFilter;

use crate::args::{Args, Command};

fn main() -> ExitCode {
    env_logger::Builder::new()
        .filter_level(LevelFilter::Warn)
        .format(|out, record| writeln!(out, "{}: {}", record.level().as_str().to_lowercase(), record.args()))
        .init();
    let args = Args::parse();
    let outcome = match &args.command {
        Command::List(list) => done(list::run(list)),
        Command::Explain(explain) => done(explain::run(explain)),
        Command::Generate(generate) => generate::run(generate),
        Command::Synth(synth) => done(synth::run(synth)),
        Command::Calibrate(calibrate) => done(calibrate::run(calibrate)),
        Command::Eval(eval) => done(eval::run(eval)),
    };
    match outcome {
        Ok(code) => code,
        // Whoever reads our output has seen enough, as `head` has.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing can be said where stderr is closed.
            let _ = writeln!(io::stderr(), "error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn done(outcome: anyhow::Result<()>) -> anyhow::Result<ExitCode> {
    outcome.map(|()| ExitCode::SUCCESS)
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
