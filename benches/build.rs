//! Compiles the streaming read, where there is a compiler, and notes what the kernel sources of the workspace were.

use std::path::Path;
use std::{env, io, process};

fn main() {
    kernel_build::compile("stream_read", &["cuda/stream_read.cu"]);
    if let Err(error) = note_sources() {
        eprintln!("cannot read the workspace's kernel sources: {error}");
        process::exit(1);
    }
}

/// Results carry the digest of all kernel sources, so a change in any crate's makes this run again.
fn note_sources() -> io::Result<()> {
    // Asked for when this runs: the same program may have been compiled in another checkout.
    let package = env::var_os("CARGO_MANIFEST_DIR").ok_or(io::ErrorKind::NotFound)?;
    let root = Path::new(&package).parent().ok_or(io::ErrorKind::NotFound)?;
    for folder in kernel_build::sources_dirs(root)? {
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    println!("cargo::rustc-env=STRUCTURES_SOURCES_DIGEST={}", kernel_build::sources_digest(root)?);
    Ok(())
}
