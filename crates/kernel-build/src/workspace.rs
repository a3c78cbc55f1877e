use std::io;
use std::path::{Path, PathBuf};

use crate::digest;

/// Where the kernels of one crate and their headers are.
pub(crate) struct Workspace {
    root: PathBuf,
    /// The crate's `cuda/`, then the workspace's: those that exist, in the order in which headers are looked for.
    cuda: Vec<PathBuf>,
}

impl Workspace {
    /// The workspace is one or two folders up: `benches`, `crates/*`.
    pub fn of(crate_dir: &Path) -> Self {
        let root = crate_dir
            .ancestors()
            .skip(1)
            .take(2)
            .find(|dir| dir.join("Cargo.toml").is_file())
            .unwrap_or(crate_dir);
        let mut cuda = vec![crate_dir.join("cuda"), root.join("cuda")];
        cuda.dedup();
        cuda.retain(|dir| dir.is_dir());
        Workspace { root: root.to_path_buf(), cuda }
    }

    pub fn cuda_dirs(&self) -> &[PathBuf] {
        &self.cuda
    }

    /// Over the crate's kernel sources and the shared headers.
    pub fn digest(&self) -> io::Result<String> {
        digest::digest(&self.root, &self.cuda)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn finds_the_shared_headers_from_both_depths() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for folder in ["cuda", "crates/a/cuda", "benches/cuda", "crates/bare"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        fs::write(root.join("Cargo.toml"), "[workspace]").unwrap();
        let dirs = |at: &str| Workspace::of(&root.join(at)).cuda;
        assert_eq!(dirs("crates/a"), [root.join("crates/a/cuda"), root.join("cuda")]);
        assert_eq!(dirs("benches"), [root.join("benches/cuda"), root.join("cuda")]);
        assert_eq!(dirs("crates/bare"), [root.join("cuda")]);
    }
}
