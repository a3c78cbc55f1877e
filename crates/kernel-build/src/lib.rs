//! The build script of every crate that has CUDA kernels.
//!
//! ```no_run
//! // The body of `main` in build.rs.
//! kernel_build::compile("w8a16_static", &["cuda/w8a16_static.cu"]);
//! ```
//!
//! A crate with kernels builds on any machine. Where there is an nvcc, [`compile`] links the kernels in and sets the cfg
//! `kernels_built`; where there is none, the crate is complete but for them, and says why at run time. It never quietly
//! leaves out a kernel that nvcc refused: that fails the build.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `NVCC` | the compiler; before `CUDA_HOME`, `CUDA_PATH`, `PATH` and `/usr/local/cuda` |
//! | `STRUCTURES_CUDA_ARCHS` | architectures, such as `80,90a,100a,120a`; `90a` when unset |
//! | `STRUCTURES_REQUIRE_NVCC` | `1` makes a missing nvcc fail the build |
//! | `DOCS_RS` | when set, nothing is compiled |

mod arch;
mod digest;
mod nvcc;
mod plan;
mod workspace;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process;

pub use arch::{Arch, parse_archs};
pub use digest::{sources_digest, sources_dirs};
pub use nvcc::find_nvcc;

use plan::Plan;
use workspace::Workspace;

/// How the environment is read: a variable's name to its value.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Compiles `sources` (paths relative to the crate) into the static library `<name>_kernels` and writes `OUT_DIR/kernels.rs`,
/// which the crate includes:
///
/// ```text
/// include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
/// ```
///
/// It defines `pub static KERNELS: structure_core::Kernels`: the architectures built, or why there are none, and the SHA-256
/// of the crate's kernel sources with the headers that all crates share. Headers are looked for in the crate's `cuda/` and in
/// the workspace's.
///
/// On failure prints the reason and exits with status 1, which cargo shows as a failed build.
pub fn compile(name: &str, sources: &[&str]) {
    if let Err(reason) = build(name, sources) {
        eprintln!("{reason}");
        process::exit(1);
    }
}

/// Sets the cfg `kernels_built` where [`compile`] would, for a crate that has no kernels and calls those of others.
pub fn declare() {
    println!("cargo::rustc-check-cfg=cfg(kernels_built)");
    let env: Env<'_> = &|key| {
        println!("cargo::rerun-if-env-changed={key}");
        env::var_os(key)
    };
    if let Ok(Plan::Compile { .. }) = plan::plan(env) {
        println!("cargo::rustc-cfg=kernels_built");
    }
}

fn build(name: &str, sources: &[&str]) -> Result<(), String> {
    println!("cargo::rustc-check-cfg=cfg(kernels_built)");
    // Every variable that was looked at, and no other, makes cargo run this again when it changes.
    let env: Env<'_> = &|key| {
        println!("cargo::rerun-if-env-changed={key}");
        env::var_os(key)
    };
    let crate_dir = cargo_dir("CARGO_MANIFEST_DIR")?;
    let out_dir = cargo_dir("OUT_DIR")?;
    let workspace = Workspace::of(&crate_dir);
    let sources = existing(&crate_dir, sources)?;
    for path in sources.iter().chain(workspace.cuda_dirs()) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let digest = workspace.digest().map_err(|e| format!("cannot read the kernel sources: {e}"))?;

    let table = match plan::plan(env)? {
        Plan::Compile { nvcc, archs } => {
            println!("cargo::rerun-if-changed={}", nvcc.display());
            nvcc::compile(&nvcc, &archs, &workspace, name, &sources, &out_dir, env)?;
            println!("cargo::rustc-cfg=kernels_built");
            table(&archs, "", &digest)
        }
        Plan::Skip { why_not, warn } => {
            if warn {
                println!("cargo::warning=the CUDA kernels of {name} are left out: {why_not}");
            }
            table(&[], &why_not, &digest)
        }
    };
    let path = out_dir.join("kernels.rs");
    fs::write(&path, table).map_err(|e| format!("cannot write {}: {e}", path.display()))
}

/// A folder that cargo names to build scripts.
fn cargo_dir(key: &str) -> Result<PathBuf, String> {
    let dir = env::var_os(key).ok_or_else(|| format!("{key} is not set: this must run as a build script"))?;
    Ok(dir.into())
}

/// The sources as full paths, each of which exists.
fn existing(crate_dir: &Path, sources: &[&str]) -> Result<Vec<PathBuf>, String> {
    let full = |source: &&str| {
        let path = crate_dir.join(source);
        if path.is_file() { Ok(path) } else { Err(format!("{} is not a file", path.display())) }
    };
    sources.iter().map(full).collect()
}

/// The text of `kernels.rs`.
fn table(archs: &[Arch], why_not: &str, digest: &str) -> String {
    let built: Vec<String> = archs
        .iter()
        .map(|arch| format!("structure_core::Arch::new({}, {})", arch.cc, arch.specific))
        .collect();
    let built = built.join(", ");
    format!(
        "/// What this build compiled.\n\
         pub static KERNELS: structure_core::Kernels = structure_core::Kernels {{\n    \
             built: &[{built}],\n    \
             why_not: {why_not:?},\n    \
             source_digest: {digest:?},\n\
         }};\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_a_build() {
        let archs = parse_archs("90a,100a").unwrap();
        assert_eq!(
            table(&archs, "", "ab12"),
            "/// What this build compiled.\n\
             pub static KERNELS: structure_core::Kernels = structure_core::Kernels {\n    \
                 built: &[structure_core::Arch::new(90, true), structure_core::Arch::new(100, true)],\n    \
                 why_not: \"\",\n    \
                 source_digest: \"ab12\",\n\
             };\n"
        );
    }

    #[test]
    fn table_of_none_quotes_the_reason() {
        let text = table(&[], "CUDA_HOME is \"x\\y\"", "00");
        assert!(text.contains("built: &[],"), "{text}");
        assert!(text.contains(r#"why_not: "CUDA_HOME is \"x\\y\"","#), "{text}");
    }

    #[test]
    fn a_missing_source_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let reason = existing(dir.path(), &["cuda/nope.cu"]).unwrap_err();
        assert!(reason.contains("cuda/nope.cu is not a file"), "{reason}");
    }
}
