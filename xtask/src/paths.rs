//! Where things are.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The repository.
pub fn root() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask)
}

/// Cargo's build folder.
pub fn target() -> PathBuf {
    root().join(env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// The crates with kernels: their folders, sorted. A crate's name is its folder's.
pub fn kernel_crates() -> Result<Vec<PathBuf>> {
    let mut crates = vec![root().join("benches")];
    let dir = root().join("crates");
    for entry in fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))? {
        crates.push(entry?.path());
    }
    crates.retain(|path| path.join("cuda").is_dir() && path.join("build.rs").is_file());
    crates.sort();
    Ok(crates)
}

/// The last part of a path, for people.
pub fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// A path as seen from the repository, for people.
pub fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
