//! Results: one JSON file a GPU, `results/<gpu>.json`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// What was measured on one GPU in one run.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Results {
    /// The device's name.
    pub gpu: String,
    /// The driver's version, as the kernel module names it.
    pub driver: String,
    /// The CUDA version that the driver supports.
    pub cuda: String,
    /// The day, `YYYY-MM-DD`.
    pub date: String,
    /// GB/s of the streaming read in the same run.
    pub read_gbs: f64,
    /// sha256 over every kernel source, header and launcher that was built.
    pub sources: String,
    /// What was measured.
    pub rows: Vec<Row>,
    /// What could not be.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unmeasured: Vec<Unmeasured>,
}

/// Who was called.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Callee {
    /// An implementation of ours, by its id.
    Id(String),
    /// Another library's, by its name and version.
    Peer(String),
}

/// One call.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Row {
    /// Who was called.
    #[serde(flatten)]
    pub callee: Callee,
    /// A peer's weights and activations: `bf16`, `w8a16`, `nvfp4_w4a16`. Ours are in the id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// What was called.
    pub what: String,
    /// Output features.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n: Option<usize>,
    /// Input features.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub k: Option<usize>,
    /// Rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub m: Option<usize>,
    /// Rows of a call of another kind than a projection: queries, tokens of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<usize>,
    /// Positions that the rows see before them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ctx: Option<usize>,
    /// The shape of what was called: heads, KV heads and head dim; heads and dims of a state; a host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shape: Option<String>,
    /// What a host's seats and keys were bound to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binding: Option<String>,
    /// Tokens a second, of a call that makes some.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tok_s: Option<f64>,
    /// Kernels of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launches: Option<usize>,
    /// Median microseconds of a call.
    pub us: f64,
    /// Microseconds that the bytes of a call take at the read bandwidth.
    pub floor_us: f64,
    /// `floor_us / us`.
    pub ratio: f64,
    /// Whether a kernel may begin before the one ahead of it has ended (programmatic dependent launch); not there when it may.
    #[serde(default = "yes", skip_serializing_if = "Clone::clone")]
    pub overlap: bool,
}

fn yes() -> bool {
    true
}

/// What weights are stored as. Calls are compared with those of the same weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// 16 bits.
    Bf16,
    /// 8 bits and a scale an output channel.
    Int8,
    /// 4 bits, and 8 a block of 16.
    Nvfp4,
}

impl Weights {
    /// Names of variants and formats begin with their weights: `w8a16_static`, `nvfp4_w4a16`.
    fn of(name: &str) -> Option<Self> {
        let known = [("bf16", Weights::Bf16), ("w8", Weights::Int8), ("nvfp4", Weights::Nvfp4)];
        known.into_iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, weights)| weights)
    }
}

impl Row {
    /// A row of ours, from a time, the bytes that the call must move, and the read bandwidth in GB/s.
    pub fn new(id: &str, what: &str, us: f64, bytes: f64, read_gbs: f64) -> Self {
        let floor_us = bytes / read_gbs / 1e3;
        Row {
            callee: Callee::Id(id.to_string()),
            format: None,
            what: what.to_string(),
            n: None,
            k: None,
            m: None,
            rows: None,
            ctx: None,
            shape: None,
            binding: None,
            tok_s: None,
            launches: None,
            us,
            floor_us,
            ratio: floor_us / us,
            overlap: true,
        }
    }

    /// The same with the dimensions of a projection.
    pub fn of_projection(self, n: usize, k: usize, m: usize) -> Self {
        Row { n: Some(n), k: Some(k), m: Some(m), ..self }
    }

    /// The same with the dimensions of a call of a decode loop.
    pub fn of_loop(self, shape: &str, rows: usize, ctx: Option<usize>) -> Self {
        Row { shape: Some(shape.to_string()), rows: Some(rows), ctx, ..self }
    }

    /// Whether it is a call of a decode loop or of a part of one, not of a projection.
    pub fn is_of_loop(&self) -> bool {
        self.shape.is_some()
    }

    /// The implementation, when it is one of ours.
    pub fn id(&self) -> Option<&str> {
        match &self.callee {
            Callee::Id(id) => Some(id),
            Callee::Peer(_) => None,
        }
    }

    /// The name and version, when it is another library's.
    pub fn peer(&self) -> Option<&str> {
        match &self.callee {
            Callee::Id(_) => None,
            Callee::Peer(peer) => Some(peer),
        }
    }

    /// What its weights are stored as.
    pub fn weights(&self) -> Option<Weights> {
        let variant = self.id().and_then(|id| id.rsplit('/').next());
        Weights::of(variant.or(self.format.as_deref())?)
    }

    /// 10^12 multiplications and additions a second.
    pub fn tflops(&self) -> Option<f64> {
        let (n, k, m) = (self.n?, self.k?, self.m?);
        Some(2.0 * n as f64 * k as f64 * m as f64 / self.us / 1e6)
    }

    /// The same call with the same dimensions, whoever is called.
    fn is_same_call(&self, other: &Row) -> bool {
        let dims = |row: &Row| (row.n, row.k, row.m, row.rows, row.ctx);
        self.what == other.what
            && dims(self) == dims(other)
            && (&self.shape, &self.binding) == (&other.shape, &other.binding)
    }
}

/// Rows that a peer could not give.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Unmeasured {
    /// The peer's name and version.
    pub peer: String,
    /// Its weights and activations.
    pub format: String,
    /// What it said.
    pub problem: String,
    /// How many rows.
    pub rows: usize,
}

impl Results {
    /// The file of this GPU under `folder`: `NVIDIA H200` is `h200.json`.
    pub fn path(&self, folder: &Path) -> PathBuf {
        let name = self.gpu.to_lowercase();
        let name = name.strip_prefix("nvidia ").unwrap_or(&name).replace([' ', '/'], "-");
        folder.join(format!("{name}.json"))
    }

    /// What is in its file already and was measured on the same day with the same sources, but for rows of the implementations that
    /// are in it now: one run may be of several benches.
    ///
    /// # Errors
    /// With the path, for a file that does not hold results.
    pub fn keep_others(&mut self, folder: &Path) -> Result<()> {
        let path = self.path(folder);
        let Ok(text) = fs::read_to_string(&path) else { return Ok(()) };
        let old: Results = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        if (&old.sources, &old.date) != (&self.sources, &self.date) {
            return Ok(());
        }
        let ids: Vec<String> = self.ids().into_iter().map(str::to_string).collect();
        let is_other = |row: &Row| row.id().is_none_or(|id| ids.iter().all(|other| other != id));
        let others = old.rows.into_iter().filter(is_other);
        self.rows = others.chain(std::mem::take(&mut self.rows)).collect();
        self.unmeasured.extend(old.unmeasured);
        Ok(())
    }

    /// Every `*.json` of a folder, in the order of their names.
    ///
    /// # Errors
    /// With the path, for a file that cannot be read or does not hold results.
    pub fn read_all(folder: &Path) -> Result<Vec<Results>> {
        let context = |path: &Path| path.display().to_string();
        let entries = fs::read_dir(folder).with_context(|| context(folder))?;
        let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
        paths.sort();
        let read = |path: &PathBuf| {
            let text = fs::read_to_string(path).with_context(|| context(path))?;
            serde_json::from_str(&text).with_context(|| context(path))
        };
        paths.iter().map(read).collect()
    }

    /// Our implementations that it has rows of, sorted.
    pub fn ids(&self) -> Vec<&str> {
        let mut ids: Vec<&str> = self.rows.iter().filter_map(Row::id).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// The rows of one of our implementations as it is meant to run.
    pub fn rows_of<'a>(&'a self, id: &'a str) -> impl Iterator<Item = &'a Row> {
        self.rows.iter().filter(move |row| row.id() == Some(id) && row.overlap)
    }

    /// The same call of the same implementation, without overlap.
    pub fn without_overlap(&self, ours: &Row) -> Option<&Row> {
        self.rows.iter().find(|row| row.callee == ours.callee && row.is_same_call(ours) && !row.overlap)
    }

    /// The fastest peer at the same call, whatever it stores.
    pub fn best_peer_of_any(&self, ours: &Row) -> Option<&Row> {
        let peers = self.rows.iter().filter(|row| row.peer().is_some() && row.is_same_call(ours));
        peers.min_by(|a, b| a.us.total_cmp(&b.us))
    }

    /// The fastest peer at the same call with such weights.
    pub fn best_peer(&self, ours: &Row, weights: Weights) -> Option<&Row> {
        let peers = self.rows.iter().filter(|row| row.peer().is_some() && row.weights() == Some(weights));
        peers.filter(|row| row.is_same_call(ours)).min_by(|a, b| a.us.total_cmp(&b.us))
    }

    /// Writes the file whole: to one beside it first, which then takes its name.
    ///
    /// # Errors
    /// With the path, when the folder cannot be written to.
    pub fn write(&self, folder: &Path) -> Result<PathBuf> {
        let path = self.path(folder);
        let context = || path.display().to_string();
        fs::create_dir_all(folder).with_context(context)?;
        let beside = path.with_extension("json.part");
        fs::write(&beside, serde_json::to_string_pretty(self)? + "\n").with_context(context)?;
        fs::rename(&beside, &path).with_context(context)?;
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../results")
    }

    /// A kernel change comes with a fresh run, or `PENDING.md` names what could not be run and why.
    #[test]
    fn results_are_of_these_sources() {
        let pending = fs::read_to_string(folder().join("PENDING.md")).unwrap_or_default();
        let sources = env!("STRUCTURES_SOURCES_DIGEST");
        let measured: Vec<Results> = Results::read_all(&folder())
            .unwrap()
            .into_iter()
            .filter(|results| results.sources == sources)
            .collect();
        for registration in structures::list().unwrap() {
            let id = registration.id.to_string();
            let rows =
                measured.iter().flat_map(|results| &results.rows).filter(|row| row.id() == Some(&id)).count();
            assert!(
                rows > 0 || pending.contains(&id),
                "{id} has no row in results/ measured with these kernel sources ({sources}), and results/PENDING.md \
                 does not name it: run `cargo xtask bundle` and its bench on a GPU"
            );
        }
    }

    /// No call reads its bytes faster than the streaming read of the same run: a ratio above one is a wrong measurement.
    #[test]
    fn nothing_is_faster_than_its_floor() {
        for results in Results::read_all(&folder()).unwrap() {
            for row in &results.rows {
                assert!((0.0..=1.0).contains(&row.ratio), "{}: {row:?}", results.gpu);
                assert!((row.floor_us / row.us - row.ratio).abs() < 1e-9, "{}: {row:?}", results.gpu);
            }
        }
    }

    #[test]
    fn pictures_are_of_these_results() {
        let fresh = tempfile::tempdir().unwrap();
        for results in Results::read_all(&folder()).unwrap() {
            for id in results.ids() {
                let drawn = crate::plot::draw(&results, id, fresh.path()).unwrap();
                let committed = folder().join(drawn.file_name().unwrap());
                assert!(
                    fs::read(&drawn).unwrap() == fs::read(&committed).unwrap_or_default(),
                    "{} is not drawn from the results beside it: `cargo run -p benches --bin draw`",
                    committed.display()
                );
            }
        }
    }

    #[test]
    fn ours_have_an_id_and_peers_a_name() {
        let ours = Row::new("linear_proj/w8a16_static", "project", 25.0, 89.6e6, 4650.0);
        let text = serde_json::to_string(&ours.clone().of_projection(17408, 5120, 1)).unwrap();
        assert!(
            text.starts_with(
                r#"{"id":"linear_proj/w8a16_static","what":"project","n":17408,"k":5120,"m":1,"us":25.0,"#
            ),
            "{text}"
        );
        let peer = r#"{"peer":"humming 0.1.20","format":"w8a16","what":"project","us":2.0,"floor_us":1.0,"ratio":0.5}"#;
        let row: Row = serde_json::from_str(peer).unwrap();
        assert_eq!((row.id(), row.peer(), row.overlap), (None, Some("humming 0.1.20"), true));
        assert_eq!(serde_json::to_string(&row).unwrap(), peer);
        let text = serde_json::to_string(&Row { overlap: false, ..ours }).unwrap();
        assert!(text.ends_with(r#""overlap":false}"#), "{text}");
        assert!(!serde_json::from_str::<Row>(&text).unwrap().overlap);
    }

    #[test]
    fn results_are_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let results = samples::results();
        results.write(folder.path()).unwrap();
        let read = Results::read_all(folder.path()).unwrap();
        assert_eq!(read[0].rows, results.rows);
        assert_eq!(read[0].unmeasured, results.unmeasured);
    }

    #[test]
    fn peers_are_compared_by_their_weights() {
        let results = samples::results();
        assert_eq!(results.ids(), ["linear_proj/nvfp4_dynamic", "linear_proj/w8a16_static"]);
        let ours = |id, m| results.rows_of(id).find(|row| row.m == Some(m)).unwrap();
        let best = |ours, weights| results.best_peer(ours, weights).and_then(Row::peer);

        let one = ours("linear_proj/w8a16_static", 1);
        assert_eq!(one.weights(), Some(Weights::Int8));
        assert_eq!(best(one, Weights::Int8), Some("humming 0.1.20"), "the fastest");
        assert_eq!(best(one, Weights::Nvfp4), None);
        assert_eq!(results.without_overlap(one).map(|row| row.us), Some(25.0));
        assert_eq!(results.without_overlap(ours("linear_proj/w8a16_static", 16)), None);

        let prompt = ours("linear_proj/nvfp4_dynamic", 2048);
        assert_eq!(best(prompt, Weights::Bf16), Some("cublas 13.1"));
        assert_eq!(best(prompt, Weights::Nvfp4), Some("humming 0.1.20"));
        assert_eq!(prompt.tflops(), Some(800.0));
    }

    #[test]
    fn a_gpu_names_its_file() {
        let results = |gpu: &str| Results { gpu: gpu.to_string(), ..samples::results() };
        assert_eq!(results("NVIDIA H200").path(Path::new("r")), Path::new("r/h200.json"));
        assert_eq!(
            results("NVIDIA GeForce RTX 5090").path(Path::new("r")),
            Path::new("r/geforce-rtx-5090.json")
        );
    }
}

/// Small results for tests: two implementations, three peers.
#[cfg(test)]
pub(crate) mod samples {
    use super::*;

    /// The read bandwidth is 1000 GB/s, so that a floor in microseconds is the megabytes moved.
    const READ_GBS: f64 = 1000.0;
    const N: usize = 6250;
    const K: usize = 2000;

    fn ours(id: &str, m: usize, us: f64) -> Row {
        Row::new(id, "project", us, 12.5e6, READ_GBS).of_projection(N, K, m)
    }

    fn peer(name: &str, format: &str, m: usize, us: f64) -> Row {
        Row { callee: Callee::Peer(name.to_string()), format: Some(format.to_string()), ..ours("", m, us) }
    }

    pub(crate) fn results() -> Results {
        Results {
            gpu: "NVIDIA Test".to_string(),
            driver: "580.1".to_string(),
            cuda: "13.0".to_string(),
            date: "2026-12-01".to_string(),
            read_gbs: READ_GBS,
            sources: "0".to_string(),
            rows: vec![
                ours("linear_proj/w8a16_static", 1, 20.0),
                Row { overlap: false, ..ours("linear_proj/w8a16_static", 1, 25.0) },
                ours("linear_proj/w8a16_static", 16, 31.25),
                ours("linear_proj/nvfp4_dynamic", 1, 50.0),
                ours("linear_proj/nvfp4_dynamic", 2048, 64.0),
                peer("cublas 13.1", "bf16", 1, 40.0),
                peer("cublas 13.1", "bf16", 2048, 80.0),
                peer("gemlite 0.6", "w8a16", 1, 32.0),
                peer("humming 0.1.20", "w8a16", 1, 30.0),
                peer("humming 0.1.20", "nvfp4_w4a16", 2048, 128.0),
            ],
            unmeasured: vec![Unmeasured {
                peer: "gemlite 0.6".to_string(),
                format: "nvfp4_w4a16".to_string(),
                problem: "NotImplementedError: no".to_string(),
                rows: 35,
            }],
        }
    }
}
