//! Results: one JSON file a GPU, `results/<gpu>.json`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use comfy_table::{ContentArrangement, Table, presets};
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
}

/// One call of one implementation.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Row {
    /// The implementation.
    pub id: String,
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
    /// Median microseconds of a call.
    pub us: f64,
    /// Microseconds that the bytes of a call take at the read bandwidth.
    pub floor_us: f64,
    /// `floor_us / us`.
    pub ratio: f64,
}

impl Row {
    /// A row from a time, the bytes that the call must move, and the read bandwidth in GB/s.
    pub fn new(id: &str, what: &str, us: f64, bytes: f64, read_gbs: f64) -> Self {
        let floor_us = bytes / read_gbs / 1e3;
        Row {
            id: id.to_string(),
            what: what.to_string(),
            us,
            floor_us,
            ratio: floor_us / us,
            ..Row::default()
        }
    }
}

impl Results {
    /// The file of this GPU under `folder`: `NVIDIA H200` is `h200.json`.
    pub fn path(&self, folder: &Path) -> PathBuf {
        let name = self.gpu.to_lowercase();
        let name = name.strip_prefix("nvidia ").unwrap_or(&name).replace([' ', '/'], "-");
        folder.join(format!("{name}.json"))
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

    /// The implementations that it has rows of, sorted.
    pub fn ids(&self) -> Vec<String> {
        let mut ids: Vec<String> = self.rows.iter().map(|row| row.id.clone()).collect();
        ids.sort();
        ids.dedup();
        ids
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

    /// The rows as a table.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(["IMPLEMENTATION", "N", "K", "M", "US", "FLOOR US", "FLOOR/TIME", "GB/S"]);
        let dim = |dim: Option<usize>| dim.map(|dim| dim.to_string()).unwrap_or_default();
        for row in &self.rows {
            table.add_row([
                row.id.clone(),
                dim(row.n),
                dim(row.k),
                dim(row.m),
                format!("{:.2}", row.us),
                format!("{:.2}", row.floor_us),
                format!("{:.3}", row.ratio),
                format!("{:.0}", row.ratio * self.read_gbs),
            ]);
        }
        format!("{}, streaming read {:.0} GB/s\n{table}", self.gpu, self.read_gbs)
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
            let rows = measured.iter().flat_map(|results| &results.rows).filter(|row| row.id == id).count();
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
                let drawn = crate::plot::draw(&results, &id, fresh.path()).unwrap();
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
    fn a_gpu_names_its_file() {
        let results = |gpu: &str| Results {
            gpu: gpu.to_string(),
            driver: String::new(),
            cuda: String::new(),
            date: String::new(),
            read_gbs: 1.0,
            sources: String::new(),
            rows: Vec::new(),
        };
        assert_eq!(results("NVIDIA H200").path(Path::new("r")), Path::new("r/h200.json"));
        assert_eq!(
            results("NVIDIA GeForce RTX 5090").path(Path::new("r")),
            Path::new("r/geforce-rtx-5090.json")
        );
    }
}
