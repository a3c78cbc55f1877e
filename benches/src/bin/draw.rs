//! Draws the pictures of every `results/*.json` again, and writes the README's tables: `cargo run -p benches --bin draw`.
//!
//! Files that it is given are peers', measured after ours in the same run: their rows are added to the results of their GPU first.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use benches::peers::Peers;
use benches::results::Results;
use benches::{plot, readme};

fn main() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = root.join("results");
    let mut all = Results::read_all(&folder)?;
    for path in std::env::args_os().skip(1) {
        let path = Path::new(&path);
        let peers = Peers::open(path)?;
        let of_gpu = all.iter_mut().find(|results| results.gpu == peers.gpu());
        let results =
            of_gpu.with_context(|| format!("{}: results/ has no {}", path.display(), peers.gpu()))?;
        peers.add_to(results);
        results.write(&folder)?;
    }
    for results in &all {
        for id in results.ids() {
            println!("{}", plot::draw(results, id, &folder)?.display());
        }
    }
    let path = root.join("README.md");
    let context = || path.display().to_string();
    let pending = fs::read_to_string(folder.join("PENDING.md")).unwrap_or_default();
    let text = fs::read_to_string(&path).with_context(context)?;
    fs::write(&path, readme::rewrite(&text, &all, &pending)?).with_context(context)?;
    println!("{}", path.display());
    Ok(())
}
