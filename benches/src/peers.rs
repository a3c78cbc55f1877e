//! What `benches/peers` measured, taken into our results.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::results::{Callee, Results, Row, Unmeasured};

/// The file that `peers.py --out` writes.
#[derive(Debug, Deserialize)]
pub struct Peers {
    gpu: String,
    rows: Vec<Call>,
}

#[derive(Debug, Deserialize)]
struct Call {
    peer: String,
    format: String,
    what: String,
    #[serde(flatten)]
    dims: Dims,
    #[serde(flatten)]
    outcome: Outcome,
}

/// Those of a projection, or of a call of a decode loop.
#[derive(Debug, Deserialize)]
struct Dims {
    n: Option<usize>,
    k: Option<usize>,
    m: Option<usize>,
    rows: Option<usize>,
    ctx: Option<usize>,
    shape: Option<String>,
    binding: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Outcome {
    Time { us: f64, bytes: f64 },
    Failure { problem: String },
}

impl Peers {
    /// Reads a file.
    ///
    /// # Errors
    /// With the path: a file that cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let context = || path.display().to_string();
        let text = fs::read_to_string(path).with_context(context)?;
        serde_json::from_str(&text).with_context(context)
    }

    /// Reads what was measured on a GPU of this name.
    ///
    /// # Errors
    /// With the path: a file that cannot be read, or of another GPU.
    pub fn read(path: &Path, gpu: &str) -> Result<Self> {
        let peers = Self::open(path)?;
        if peers.gpu != gpu {
            bail!("{} was measured on {}, not on {gpu}", path.display(), peers.gpu);
        }
        Ok(peers)
    }

    /// The GPU that it was measured on.
    pub fn gpu(&self) -> &str {
        &self.gpu
    }

    /// Adds its rows to ours. Their floors are the bytes of their own formats over our read bandwidth.
    pub fn add_to(self, results: &mut Results) {
        for Call { peer, format, what, dims, outcome } in self.rows {
            let Dims { n, k, m, rows, ctx, shape, binding } = dims;
            match outcome {
                Outcome::Time { us, bytes } => {
                    let (callee, format) = (Callee::Peer(peer), Some(format));
                    let row = Row::new("", &what, us, bytes, results.read_gbs);
                    results.rows.push(Row { callee, format, n, k, m, rows, ctx, shape, binding, ..row });
                }
                Outcome::Failure { problem } => fail(&mut results.unmeasured, peer, format, problem),
            }
        }
    }
}

/// Counts a row among those that failed in the same way.
fn fail(unmeasured: &mut Vec<Unmeasured>, peer: String, format: String, problem: String) {
    let same =
        |other: &&mut Unmeasured| other.peer == peer && other.format == format && other.problem == problem;
    match unmeasured.iter_mut().find(same) {
        Some(other) => other.rows += 1,
        None => unmeasured.push(Unmeasured { peer, format, problem, rows: 1 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::samples;

    /// A file as `peers.py` writes it, with two failures of one kind.
    const FILE: &str = r#"{
        "gpu": "NVIDIA Test", "date": "2026-12-01", "versions": {"torch": "2.11.0"},
        "rows": [
            {"peer": "a 1", "format": "w8a16", "what": "project", "n": 4, "k": 8, "m": 1, "us": 10.0, "bytes": 5000000},
            {"peer": "b 2", "format": "bf16", "what": "project", "n": 4, "k": 8, "m": 1, "problem": "no"},
            {"peer": "b 2", "format": "bf16", "what": "project", "n": 4, "k": 8, "m": 2, "problem": "no"},
            {"peer": "b 2", "format": "bf16", "what": "project", "n": 4, "k": 8, "m": 4, "problem": "late"}
        ]
    }"#;

    fn added(file: &str) -> Result<Results> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("peers.json");
        fs::write(&path, file)?;
        let mut results = Results { rows: Vec::new(), unmeasured: Vec::new(), ..samples::results() };
        Peers::read(&path, &results.gpu)?.add_to(&mut results);
        Ok(results)
    }

    #[test]
    fn rows_get_floors_and_failures_are_counted() {
        let results = added(FILE).unwrap();
        let json = serde_json::to_string(&results.rows).unwrap();
        assert_eq!(
            json,
            concat!(
                r#"[{"peer":"a 1","format":"w8a16","what":"project","n":4,"k":8,"m":1,"#,
                r#""us":10.0,"floor_us":5.0,"ratio":0.5}]"#
            )
        );
        let unmeasured = results.unmeasured.iter().map(|one| (one.problem.as_str(), one.rows));
        assert_eq!(unmeasured.collect::<Vec<_>>(), [("no", 2), ("late", 1)]);
    }

    #[test]
    fn another_gpu_and_another_file_are_refused() {
        let error = added(&FILE.replace("Test", "Other")).unwrap_err().to_string();
        assert!(error.ends_with("peers.json was measured on NVIDIA Other, not on NVIDIA Test"), "{error}");
        let error = added("[]").unwrap_err();
        assert!(error.to_string().ends_with("peers.json"), "{error:#}");
    }
}
