//! Every bench. With a GPU: time against the floor, tables, `results/<gpu>.json` and pictures. Without: the CPU arms.
//!
//! `cargo xtask bench linear_proj/w8a16_static` runs one. `STRUCTURES_RESULTS` names another folder for the results;
//! `STRUCTURES_PEERS` names the files of the programs in `benches/peers/` that go into them, with `:` between.

#[cfg(kernels_built)]
mod decode_loop;
mod linear_proj;

use anyhow::Result;
use criterion::Criterion;

fn main() -> Result<()> {
    #[cfg(kernels_built)]
    if let Ok(gpu) = device::CudaDevice::open(0) {
        return on_gpu(&gpu);
    }
    let mut criterion = Criterion::default().configure_from_args();
    linear_proj::on_cpu(&mut criterion)?;
    criterion.final_summary();
    eprintln!("skipped: decode loops and kernels, as there is no CUDA device");
    Ok(())
}

#[cfg(kernels_built)]
fn on_gpu(gpu: &device::CudaDevice) -> Result<()> {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let projections = linear_proj::on_gpu::ids()?;
    let all: Vec<&str> = projections.iter().map(String::as_str).chain(decode_loop::IDS).collect();
    let wanted: Vec<&str> = all.iter().copied().filter(|id| id.contains(&filter)).collect();
    anyhow::ensure!(!wanted.is_empty(), "no bench has {filter:?} in its name; there are {}", all.join(", "));
    // Read first, so that a wrong file costs no measuring.
    let peers = benches::report::peers(gpu)?;
    let read_gbs = benches::gpu::read_bandwidth(&gpu.new_stream()?)?;
    eprintln!("{}: streaming read {read_gbs:.0} GB/s", gpu.name());
    let mut rows = Vec::new();
    for id in wanted {
        eprintln!("{id}");
        rows.extend(match decode_loop::IDS.contains(&id) {
            true => decode_loop::run(id, gpu, read_gbs)?,
            false => linear_proj::on_gpu::run(id, gpu, read_gbs)?,
        });
    }
    benches::report::write(gpu, read_gbs, rows, peers)
}
