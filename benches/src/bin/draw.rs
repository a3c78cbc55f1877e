//! Draws the pictures of every `results/*.json` again: `cargo run -p benches --bin draw`.

use std::path::Path;

use anyhow::Result;
use benches::plot;
use benches::results::Results;

fn main() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../results");
    for results in Results::read_all(&folder)? {
        for id in results.ids() {
            println!("{}", plot::draw(&results, id, &folder)?.display());
        }
    }
    Ok(())
}
