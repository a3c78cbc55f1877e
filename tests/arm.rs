//! The arms of this machine, and trials that run on each.

use std::sync::OnceLock;

use device::{CudaDevice, Device, Stream};
use libtest_mimic::Trial;
use linear_proj::{Bind, BoundProj, DenseWeights, Options, Staged};
use structure_core::Refusal;

/// Where a trial runs.
pub struct Arm {
    pub device: Device,
}

impl Arm {
    pub fn cpu() -> Self {
        Arm { device: Device::Cpu }
    }

    /// The first GPU. All trials share one handle, as opening it costs a second.
    pub fn gpu() -> Result<Self, Refusal> {
        static GPU: OnceLock<Result<CudaDevice, Refusal>> = OnceLock::new();
        GPU.get_or_init(|| CudaDevice::open(0)).clone().map(|gpu| Arm { device: Device::Cuda(gpu) })
    }

    /// A stream of the GPU.
    pub fn stream(&self) -> Stream {
        match &self.device {
            Device::Cpu => panic!("the CPU has no streams"),
            Device::Cuda(gpu) => gpu.new_stream().unwrap(),
        }
    }

    /// Binds `w` `[N, K]` to a variant, as it is; to one that needs a calibration with an [uneven one](uneven_amax).
    pub fn bind(
        &self,
        variant: &str,
        w: &[f32],
        n: usize,
        bias: Option<&[f32]>,
    ) -> Result<Box<dyn BoundProj>, Refusal> {
        let weights = DenseWeights::from_f32(n, w.len() / n.max(1), w)?;
        let amax = uneven_amax(weights.k());
        self.bind_with(variant, weights, bias, &Options { amax: Some(&amax), ..Options::default() })
    }

    /// Binds weights of any form with options, as they are.
    pub fn bind_with(
        &self,
        variant: &str,
        weights: DenseWeights<'_>,
        bias: Option<&[f32]>,
        options: &Options<'_>,
    ) -> Result<Box<dyn BoundProj>, Refusal> {
        let bind = Bind { seat: "seat", weights, bias, device: &self.device };
        structures::linear_proj(variant)?.bind_with(&bind, options)
    }

    /// Binds so that it takes host rows: through staging on a GPU.
    pub fn bind_staged(
        &self,
        variant: &str,
        w: &[f32],
        n: usize,
        bias: Option<&[f32]>,
    ) -> Box<dyn BoundProj> {
        self.staged(self.bind(variant, w, n, bias).unwrap())
    }

    /// What takes host rows: `proj` itself, or on a GPU its staging.
    pub fn staged(&self, proj: Box<dyn BoundProj>) -> Box<dyn BoundProj> {
        match &self.device {
            Device::Cpu => proj,
            Device::Cuda(_) => Box::new(Staged::new(proj, &self.stream()).unwrap()),
        }
    }
}

/// Magnitudes of input channels whose balance is clamped at both ends and takes many values between.
pub fn uneven_amax(k: usize) -> Vec<f32> {
    (0..k).map(|k| if k % 29 == 7 { 300.0 } else { (k * 37 % 101) as f32 / 10.0 }).collect()
}

/// The same trial on the CPU arm and on the GPU arm.
pub fn on_each_arm(name: &str, trial: fn(&Arm)) -> [Trial; 2] {
    let cpu = Trial::test(format!("cpu::{name}"), move || {
        trial(&Arm::cpu());
        Ok(())
    });
    [cpu, on_gpu(name, trial)]
}

/// A trial that needs a GPU: skipped without one, unless the environment asks for one.
pub fn on_gpu(name: &str, trial: fn(&Arm)) -> Trial {
    let required = std::env::var_os("STRUCTURES_REQUIRE_GPU").is_some_and(|value| value == "1");
    let test = Trial::test(format!("gpu::{name}"), move || {
        trial(&Arm::gpu().map_err(|refusal| refusal.to_string())?);
        Ok(())
    });
    match Arm::gpu() {
        Err(_) if !required => test.with_ignored_flag(true).with_kind("skipped: no CUDA device"),
        _ => test,
    }
}
