use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// What a kernel is made of.
const EXTENSIONS: [&str; 3] = ["cu", "cuh", "h"];

/// SHA-256, in hex, over every `*.cu`, `*.cuh` and `*.h` under `cuda`, `crates/*/cuda` and `benches/cuda`: the `sources` of
/// `results/*.json`. A folder that does not exist adds nothing.
///
/// Files are taken in the byte order of their paths. Each adds its path relative to the workspace with forward slashes, a
/// NUL, its length as 8 little-endian bytes, and its contents.
///
/// # Errors
///
/// When a folder or a file cannot be read, or its path is not UTF-8.
pub fn sources_digest(workspace_root: &Path) -> io::Result<String> {
    digest(workspace_root, &sources_dirs(workspace_root)?)
}

/// The folders that [`sources_digest`] reads and that exist, sorted: what a build script that records the digest must watch.
///
/// # Errors
///
/// When `crates` cannot be read.
pub fn sources_dirs(workspace_root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut dirs = vec![workspace_root.join("cuda"), workspace_root.join("benches/cuda")];
    for entry in entries(&workspace_root.join("crates"))? {
        dirs.push(entry.join("cuda"));
    }
    dirs.retain(|dir| dir.is_dir());
    dirs.sort();
    Ok(dirs)
}

/// The same over the given folders under `root`.
pub(crate) fn digest(root: &Path, dirs: &[PathBuf]) -> io::Result<String> {
    let mut files = BTreeMap::new();
    for dir in dirs {
        collect(root, dir, &mut files)?;
    }
    let mut hash = Sha256::new();
    for (name, path) in files {
        let contents = fs::read(path)?;
        hash.update(name.as_bytes());
        hash.update([0]);
        hash.update((contents.len() as u64).to_le_bytes());
        hash.update(contents);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Adds the kernel files under `dir`, by their names relative to `root`.
fn collect(root: &Path, dir: &Path, files: &mut BTreeMap<String, PathBuf>) -> io::Result<()> {
    for path in entries(dir)? {
        if path.is_dir() {
            collect(root, &path, files)?;
        } else if path.extension().is_some_and(|e| EXTENSIONS.iter().any(|kernel| e == *kernel)) {
            files.insert(relative(root, &path)?, path);
        }
    }
    Ok(())
}

/// What is in a folder; nothing when it does not exist.
fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(dir) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        Err(e) => Err(io::Error::new(e.kind(), format!("{}: {e}", dir.display()))),
    }
}

fn relative(root: &Path, path: &Path) -> io::Result<String> {
    let parts = path.strip_prefix(root).map_err(io::Error::other)?.components();
    let parts: Option<Vec<&str>> = parts.map(|part| part.as_os_str().to_str()).collect();
    let parts = parts.ok_or_else(|| io::Error::other(format!("{} is not UTF-8", path.display())))?;
    Ok(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, contents) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, contents).unwrap();
        }
        dir
    }

    /// The expected digests come from Python's hashlib over the bytes written out by hand.
    #[test]
    fn known_bytes() {
        let none = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(sources_digest(tree(&[]).path()).unwrap(), none);
        let files = [
            ("crates/b/cuda/k.cu", "kernel\n"),
            ("cuda/sub/x.cuh", ""),
            ("benches/cuda/f.h", "int f;"),
            ("crates/b/cuda/notes.md", "not a kernel"),
            ("crates/b/src/lib.rs", "not a kernel"),
            ("crates/README.md", "not a crate"),
        ];
        assert_eq!(
            sources_digest(tree(&files).path()).unwrap(),
            "47f36dcefca10d033e35f385175d28748c6e1316fc021966a30dc25d86399d89"
        );
    }

    #[test]
    fn depends_on_names_and_on_where_a_file_ends() {
        let of = |files: &[(&str, &str)]| sources_digest(tree(files).path()).unwrap();
        let digests = [
            of(&[("cuda/a.h", "xy"), ("cuda/b.h", "")]),
            of(&[("cuda/a.h", "x"), ("cuda/b.h", "y")]),
            of(&[("cuda/a.h", ""), ("cuda/b.h", "xy")]),
            of(&[("cuda/a.h", "xy"), ("cuda/c.h", "")]),
        ];
        for (i, one) in digests.iter().enumerate() {
            assert!(digests[..i].iter().all(|other| other != one), "{i}");
        }
    }
}
