//! Benches of `linear_proj`: on a GPU every implementation over the shapes of the 27B host, without one the CPU arms.

use anyhow::Result;
use criterion::{BenchmarkId, Criterion, Throughput};
use device::Device;
use half::bf16;
use linear_proj::{Bind, DenseWeights, Options, Rows, RowsMut};

/// The CPU arms, for their trend alone.
pub fn on_cpu(criterion: &mut Criterion) -> Result<()> {
    for registration in structures::list()? {
        if registration.id.structure == linear_proj::STRUCTURE {
            cpu_arm(criterion, registration.id.variant)?;
        }
    }
    Ok(())
}

/// One projection of a small host, at one row and at a full band.
fn cpu_arm(criterion: &mut Criterion, variant: &str) -> Result<()> {
    let (n, k) = (1024, 5120);
    let weights = benches::random::uniform_bf16(n * k, 1);
    let bind = Bind {
        seat: "bench",
        weights: DenseWeights::from_bf16(n, k, &weights)?,
        bias: None,
        device: &Device::Cpu,
    };
    let amax = benches::random::magnitudes(k, 3);
    let options = Options { amax: Some(&amax), ..Options::default() };
    let mut proj = structures::linear_proj(variant)?.bind_with(&bind, &options)?;
    let mut group = criterion.benchmark_group(format!("linear_proj/{variant}"));
    group.sample_size(20);
    for m in [1, 16] {
        let x = benches::random::uniform_bf16(m * k, 2);
        let mut y = vec![bf16::ZERO; m * n];
        group.throughput(Throughput::Elements((m * n * k) as u64));
        group.bench_function(BenchmarkId::new("cpu", format!("{n}x{k}/M{m}")), |bencher| {
            bencher.iter(|| {
                let output = RowsMut::host(&mut y[..], m, n)?;
                proj.project(Rows::host(&x[..], m, k)?, output)
            });
        });
    }
    group.finish();
    Ok(())
}

#[cfg(kernels_built)]
pub mod on_gpu {
    use anyhow::Result;
    use benches::results::Row;
    use benches::{gpu, protocol};
    use device::{Buffer, CudaDevice, Device, Stream, Workspace};
    use half::bf16;
    use linear_proj::{Bind, BoundProj, DenseWeights, Options, Rows, RowsMut};
    use structure_core::Registration;

    /// What `linear_proj` has of its own to measure.
    pub fn ids() -> Result<Vec<String>> {
        let ours =
            structures::list()?.into_iter().filter(|entry| entry.id.structure == linear_proj::STRUCTURE);
        Ok(ours.map(|entry| entry.id.to_string()).collect())
    }

    /// Measures one implementation.
    pub fn run(id: &str, gpu: &CudaDevice, read_gbs: f64) -> Result<Vec<Row>> {
        let stream = gpu.new_stream()?;
        let mut rows = Vec::new();
        for registration in structures::list()?.into_iter().filter(|entry| entry.id.to_string() == id) {
            for (n, k) in protocol::SHAPES {
                rows.extend(measure(registration, &stream, n, k, read_gbs)?);
            }
        }
        Ok(rows)
    }

    fn measure(
        registration: &Registration,
        stream: &Stream,
        n: usize,
        k: usize,
        read_gbs: f64,
    ) -> Result<Vec<Row>> {
        let id = registration.id.to_string();
        let weights = benches::random::uniform_bf16(n * k, 1);
        let device = Device::Cuda(stream.device().clone());
        let bind = Bind {
            seat: "bench",
            weights: DenseWeights::from_bf16(n, k, &weights)?,
            bias: None,
            device: &device,
        };
        let door = structures::linear_proj(registration.id.variant)?;
        let amax = benches::random::magnitudes(k, 3);
        // As much as the longest call of this shape takes; the others take less.
        let workspace = Workspace::new(stream, protocol::rows(n, k).max().unwrap_or(1));
        let options = Options { amax: Some(&amax), workspace: Some(&workspace), ..Options::default() };
        let mut bound: Vec<Box<dyn BoundProj>> = vec![door.bind_with(&bind, &options)?];
        let weight_bytes = bound[0].receipt().weight_bytes as usize;
        while bound.len() < protocol::copies(weight_bytes) {
            bound.push(door.bind_with(&bind, &options)?);
        }
        let (copies, band) = (bound.len(), bound[0].form().band);
        let mut rows = Vec::new();
        // What an implementation leaves to its host is not its own to measure.
        for m in protocol::rows(n, k).filter(|&m| band.takes(m)) {
            let x = Buffer::from_host(stream, &benches::random::uniform_bf16(m * k, 2), &[m, k])?;
            let mut y = Buffer::<bf16>::zeros(stream, &[m, n])?;
            let bytes = (weight_bytes + m * (n + k) * size_of::<bf16>()) as f64;
            for overlap in [true, false] {
                if !overlap && !protocol::WITHOUT_OVERLAP.contains(&m) {
                    continue;
                }
                stream.set_overlap(overlap);
                let us = gpu::time(stream, copies, protocol::calls(copies, m), |copy| {
                    let output = RowsMut::device(y.view_mut(), m, n)?;
                    bound[copy].project(Rows::device(x.view(), stream, m, k)?, output)
                })?;
                stream.set_overlap(true);
                let row = Row::new(&id, "project", us, bytes, read_gbs).of_projection(n, k, m);
                let how = if overlap { "" } else { ", without overlap" };
                eprintln!("{id} {n} x {k}, M = {m}{how}: {us:.2} us, {:.3} of the floor", row.ratio);
                rows.push(Row { overlap, ..row });
            }
        }
        Ok(rows)
    }
}
