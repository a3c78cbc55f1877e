//! The executables that cargo builds.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::command;

/// One line of cargo's `--message-format=json`, as far as it is read here.
#[derive(Deserialize)]
struct Message {
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// Builds, and returns the executables of a kind ("bin", "test", "bench"): their names and paths.
pub fn executables(cargo: &mut Command, kind: &str) -> Result<Vec<(String, PathBuf)>> {
    parse(&command::output(cargo.arg("--message-format=json-render-diagnostics"))?, kind)
}

fn parse(messages: &str, kind: &str) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let message: Message = serde_json::from_str(line).with_context(|| format!("cargo said {line:?}"))?;
        if let (Some(target), Some(path)) = (message.target, message.executable)
            && target.kind.iter().any(|k| k == kind)
        {
            found.push((target.name, path));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_of_one_kind() {
        let messages = r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"cc"},"executable":null}
{"reason":"build-script-executed","package_id":"x","out_dir":"/t/out"}
{"reason":"compiler-artifact","target":{"kind":["bench"],"name":"linear_proj"},"executable":"/t/linear_proj-1"}
{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"benches"},"executable":"/t/benches-2"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(parse(messages, "bench").unwrap(), [("linear_proj".into(), "/t/linear_proj-1".into())]);
        assert!(parse("warning: not JSON", "bin").is_err());
    }
}
