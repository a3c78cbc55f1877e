use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, MmapOptions};
use structure_core::Refusal;

/// A file mapped into memory, read-only: pages are read when touched and can be dropped again by the system.
///
/// A file that another process truncates while it is mapped makes the next touch of the lost part fatal; checkpoints are
/// replaced by renaming, not by rewriting in place.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps a whole file.
    ///
    /// # Errors
    /// [`Refusal::File`] when it cannot be opened or mapped, or is not a regular file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Refusal> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|error| Refusal::file(path, error))?;
        let metadata = file.metadata().map_err(|error| Refusal::file(path, error))?;
        if !metadata.is_file() {
            return Err(Refusal::file(path, "not a regular file"));
        }
        // SAFETY: the map is private and read-only; see the type's note on files that shrink while mapped.
        let map = unsafe { MmapOptions::new().map(&file) }.map_err(|error| Refusal::file(path, error))?;
        Ok(MappedFile { path: path.to_path_buf(), map })
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_the_file_and_a_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard");
        std::fs::write(&path, b"weights").unwrap();
        assert_eq!(&*MappedFile::open(&path).unwrap(), b"weights");
        std::fs::write(&path, b"").unwrap();
        assert_eq!(&*MappedFile::open(&path).unwrap(), b"");
        let refusal = MappedFile::open(folder.path()).unwrap_err().to_string();
        assert!(refusal.ends_with(": not a regular file"), "{refusal}");
        let refusal = MappedFile::open(folder.path().join("none")).unwrap_err().to_string();
        assert!(refusal.contains("none: No such file"), "{refusal}");
    }
}
