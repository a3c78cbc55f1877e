//! The end of a bench on a GPU: a table on screen, the results' file, a picture for each implementation.

use std::env;
use std::path::PathBuf;

use anyhow::{Context, Result};
use device::CudaDevice;
use time::OffsetDateTime;

use crate::peers::Peers;
use crate::results::{Results, Row};
use crate::{plot, table};

/// The peers' files that `STRUCTURES_PEERS` names, with `:` between.
///
/// # Errors
/// With the path: a file that cannot be read, or of another GPU.
pub fn peers(gpu: &CudaDevice) -> Result<Vec<Peers>> {
    let files = env::var_os("STRUCTURES_PEERS");
    files.iter().flat_map(env::split_paths).map(|path| Peers::read(&path, gpu.name())).collect()
}

/// Prints, writes and draws what was measured, to `STRUCTURES_RESULTS` or `results/`. What another bench wrote there on the same day
/// with the same kernels stays.
///
/// # Errors
/// With the path, when the folder cannot be written to.
pub fn write(gpu: &CudaDevice, read_gbs: f64, rows: Vec<Row>, peers: Vec<Peers>) -> Result<()> {
    let mut results = Results {
        gpu: gpu.name().to_string(),
        driver: driver_version(),
        cuda: gpu.driver_cuda_version()?,
        date: OffsetDateTime::now_utc().date().to_string(),
        read_gbs,
        sources: env!("STRUCTURES_SOURCES_DIGEST").to_string(),
        rows,
        unmeasured: Vec::new(),
    };
    peers.into_iter().for_each(|peers| peers.add_to(&mut results));
    println!("{}", table::tables(&results));
    let folder = env::var_os("STRUCTURES_RESULTS").map_or_else(|| PathBuf::from("results"), PathBuf::from);
    results.keep_others(&folder)?;
    println!("written to {}", results.write(&folder).context("results")?.display());
    for id in results.ids() {
        println!("drawn to {}", plot::draw(&results, id, &folder)?.display());
    }
    Ok(())
}

/// The number in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release Build ...`.
fn driver_version() -> String {
    let version = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    version.split_whitespace().find(is_version).unwrap_or("unknown").to_string()
}
