//! `cargo xtask bundle`: the tests, the benchmarks and `structures`, for a GPU machine that has no Rust.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::artifacts::executables;
use crate::{command, paths, toolkit};

/// The executables together: with a checkout, which has 29 MB, less than 64 MiB to carry to another machine.
const MAX_BYTES: u64 = 34_000_000;

const RUN: &str = include_str!("run.sh");

pub fn run(with_assets: bool) -> Result<()> {
    let files = build(&toolkit::nvcc()?)?;
    let bundle = paths::target().join("bundle");
    if bundle.exists() {
        fs::remove_dir_all(&bundle).with_context(|| format!("cannot remove {}", bundle.display()))?;
    }
    fs::create_dir_all(&bundle).with_context(|| format!("cannot create {}", bundle.display()))?;

    let mut total = 0;
    for (name, path) in files {
        let bytes = copy(&path, &bundle.join(&name))?;
        println!("{:>8.2} MB  {name}", megabytes(bytes));
        total += bytes;
    }
    println!("{:>8.2} MB  of at most {:.0} MB", megabytes(total), megabytes(MAX_BYTES));
    let script = bundle.join("run.sh");
    fs::write(&script, RUN).with_context(|| format!("cannot write {}", script.display()))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let bytes = copy_peers(&paths::root().join("benches/peers"), &bundle.join("peers"))?;
    println!("{:>8.2} MB  peers", megabytes(bytes));
    if with_assets {
        let bytes = copy_folder(&paths::root().join("assets"), &bundle.join("assets"))?;
        println!("{:>8.2} MB  assets", megabytes(bytes));
    }
    if total > MAX_BYTES {
        bail!("the executables take {total} bytes, more than {MAX_BYTES}");
    }
    println!("run {}/run.sh test|bench|peers|structures ARGS...", paths::shown(&bundle));
    Ok(())
}

/// Builds for release with kernels; names in the bundle and paths.
fn build(nvcc: &Path) -> Result<Vec<(String, PathBuf)>> {
    let build = |args: &[&str], kind: &str| {
        let mut cargo = command::cargo(Some(nvcc));
        cargo.args(args).env("STRUCTURES_REQUIRE_NVCC", "1");
        let found = executables(&mut cargo, kind)?;
        if found.is_empty() {
            bail!("`cargo {}` built nothing to run", args.join(" "));
        }
        Ok(found)
    };
    let test = ["test", "--release", "--package", "conformance", "--test", "conformance", "--no-run"];
    let mut files = build(&test, "test")?;
    files.extend(build(&["build", "--release", "--package", "structures-cli"], "bin")?);
    let benches = build(&["bench", "--package", "benches", "--bench", "all", "--no-run"], "bench")?;
    files.extend(benches.into_iter().map(|(_, path)| ("bench".to_string(), path)));
    Ok(files)
}

/// Copies a file; its size.
fn copy(from: &Path, to: &Path) -> Result<u64> {
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

/// Copies the peers' programs; their size.
fn copy_peers(from: &Path, to: &Path) -> Result<u64> {
    fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    let mut bytes = 0;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "py") {
            bytes += copy(&path, &to.join(paths::name(&path)))?;
        }
    }
    Ok(bytes)
}

/// Copies a folder; the size of its files.
fn copy_folder(from: &Path, to: &Path) -> Result<u64> {
    fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    let mut bytes = 0;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        let to = to.join(paths::name(&path));
        bytes += if path.is_dir() { copy_folder(&path, &to)? } else { copy(&path, &to)? };
    }
    Ok(bytes)
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const PROGRAM: &str = r#"#!/bin/sh
echo "${0##*/} $*"
pwd
echo "$STRUCTURES_ASSETS"
[ -z "$STRUCTURES_PEERS" ] || cat "${STRUCTURES_PEERS%%:*}" "${STRUCTURES_PEERS##*:}"
"#;

    /// Writes its arguments to the file that the last of them names.
    const PEERS: &str = "import sys\nopen(sys.argv[-1], 'w').write(' '.join(sys.argv[1:-1]) + '\\n')\n";

    /// A bundle whose programs print their name, arguments and surroundings.
    fn bundle(at: &Path) -> PathBuf {
        let script = at.join("run.sh");
        fs::create_dir_all(at).unwrap();
        fs::write(&script, RUN).unwrap();
        for name in ["conformance", "structures", "bench"] {
            let path = at.join(name);
            fs::write(&path, PROGRAM).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::create_dir(at.join("peers")).unwrap();
        for program in ["peers", "decode"] {
            fs::write(at.join(format!("peers/{program}.py")), PEERS).unwrap();
        }
        script
    }

    fn sh(script: &Path, args: &[&str]) -> (Option<i32>, Vec<String>) {
        let output = Command::new("sh").arg(script).args(args).output().unwrap();
        let lines = String::from_utf8(output.stdout).unwrap().lines().map(String::from).collect();
        (output.status.code(), lines)
    }

    #[test]
    fn the_peers_are_their_programs_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir_all(from.join("__pycache__")).unwrap();
        for file in ["peers.py", "ruff.toml", "__pycache__/peers.pyc"] {
            fs::write(from.join(file), "1234").unwrap();
        }
        assert_eq!(copy_peers(&from, &to).unwrap(), 4);
        assert_eq!(fs::read_dir(to).unwrap().count(), 1);
    }

    #[test]
    fn run_script_in_a_checkout_and_alone() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let script = bundle(&root.join("target/bundle"));
        assert_eq!(sh(&script, &["test"]).0, Some(2), "no assets anywhere");

        fs::create_dir(root.join("assets")).unwrap();
        let (root, assets) = (root.display().to_string(), root.join("assets").display().to_string());
        let (code, lines) = sh(&script, &["structures", "list", "--json"]);
        assert_eq!(
            (code, lines),
            (Some(0), vec!["structures list --json".into(), root.clone(), assets.clone()])
        );
        let (_, lines) = sh(&script, &["bench", "w8a16"]);
        assert_eq!(lines, ["bench --bench w8a16", &root, &assets]);
        for args in [["bench", "w8a16", "--peers"], ["bench", "--peers", "w8a16"]] {
            assert_eq!(sh(&script, &args).1, ["bench --bench w8a16", &root, &assets, "--out", "--out"]);
        }
        assert_eq!(sh(&script, &["nope"]).0, Some(2));
        assert_eq!(sh(&script, &[]).0, Some(2));

        let alone = script.parent().unwrap();
        assert_eq!(copy_folder(Path::new(&assets), &alone.join("assets")).unwrap(), 0);
        let (_, lines) = sh(&script, &["test", "gates"]);
        assert_eq!(lines[..2], ["conformance gates".to_string(), alone.display().to_string()]);
    }
}
