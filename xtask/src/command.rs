//! Running other programs: each is shown before it runs, and a failure says which one and how it ended.

use std::env;
use std::error::Error;
use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context, Result};

use crate::paths;

/// A command that ran and failed.
#[derive(Debug)]
pub struct Failed {
    command: String,
    status: ExitStatus,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` failed: {}", self.command, self.status)
    }
}

impl Error for Failed {}

/// The exit code of the command that failed, when that was the error.
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    let failed = error.chain().find_map(|cause| cause.downcast_ref::<Failed>());
    let code = failed.and_then(|failed| failed.status.code()).and_then(|code| u8::try_from(code).ok());
    code.map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Cargo in the repository, with that nvcc if there is one.
pub fn cargo(nvcc: Option<&Path>) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(paths::root());
    if let Some(nvcc) = nvcc {
        command.env("NVCC", nvcc);
    }
    command
}

/// Runs it; its output goes where ours goes.
pub fn run(command: &mut Command) -> Result<()> {
    let text = show(command);
    let status = command.status().with_context(|| format!("cannot run `{text}`"))?;
    check(text, status)
}

/// Runs it and returns its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let text = show(command);
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot run `{text}`"))?;
    check(text, output.status)?;
    String::from_utf8(output.stdout).context("its output is not UTF-8")
}

fn check(command: String, status: ExitStatus) -> Result<()> {
    if status.success() { Ok(()) } else { Err(Failed { command, status }.into()) }
}

/// Prints the command as one would type it, on standard error.
fn show(command: &Command) -> String {
    let envs = command.get_envs().filter_map(|(key, value)| Some(format!("{}={}", word(key), word(value?))));
    let program = word(Path::new(command.get_program()).file_name().unwrap_or(command.get_program()));
    let words: Vec<String> = envs.chain([program]).chain(command.get_args().map(word)).collect();
    let text = words.join(" ");
    eprintln!("$ {text}");
    text
}

/// One word of a shell command.
fn word(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_shown_as_typed() {
        let mut command = Command::new("/usr/bin/env");
        command.env("A", "x y").args(["--bind", "*=host", "it's", ""]);
        assert_eq!(show(&command), r"A='x y' env --bind '*=host' 'it'\''s' ''");
    }

    #[test]
    fn a_failure_says_what_failed_and_passes_its_code_on() {
        let error = run(Command::new("sh").args(["-c", "exit 7"])).unwrap_err();
        assert_eq!(error.to_string(), "`sh -c 'exit 7'` failed: exit status: 7");
        let error = error.context("a step");
        assert_eq!(format!("{:?}", exit_code(&error)), format!("{:?}", ExitCode::from(7)));
        assert!(
            run(&mut Command::new("/nonexistent/tool"))
                .unwrap_err()
                .to_string()
                .contains("cannot run `tool`")
        );
    }

    #[test]
    fn output_is_standard_output_alone() {
        assert_eq!(output(Command::new("sh").args(["-c", "echo out; echo err >&2"])).unwrap(), "out\n");
    }
}
