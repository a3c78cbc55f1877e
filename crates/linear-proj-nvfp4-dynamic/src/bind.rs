//! From dense weights to a bound arm: quantise, place, smoke, receipt.

use device::Device;
#[cfg(kernels_built)]
use linear_proj::Staged;
use linear_proj::{Bind, BoundProj, gates};
use structure_core::{Receipt, Refusal, Smoke};

use crate::cpu::CpuArm;
#[cfg(kernels_built)]
use crate::cuda::CudaArm;
use crate::pack::Quantized;
use crate::{ENTRY, ENVELOPE, ID, KERNELS};

/// Binds dense weights. The door has checked shapes, types, finiteness and that there is code for the device.
pub(crate) fn bind(bind: &Bind<'_>) -> Result<Box<dyn BoundProj>, Refusal> {
    let weights = Quantized::new(&bind.weights);
    let receipt = receipt(bind, &weights);
    match bind.device {
        Device::Cpu => {
            let mut arm = CpuArm { weights, bias: bind.bias.map(<[f32]>::to_vec), receipt };
            arm.receipt.smoke = gates::smoke(&mut arm, bind.bias)?;
            Ok(Box::new(arm))
        }
        #[cfg(kernels_built)]
        Device::Cuda(gpu) => {
            let stream = gpu.new_stream()?;
            let arm = CudaArm::new(&stream, &weights, bind.bias, receipt)?;
            let mut staged = Staged::new(arm, &stream)?;
            let smoke = gates::smoke(&mut staged, bind.bias)?;
            let mut arm = staged.into_inner();
            arm.receipt.smoke = smoke;
            Ok(Box::new(arm))
        }
        #[cfg(not(kernels_built))]
        Device::Cuda(_) => Err(Refusal::KernelsNotBuilt { id: ID, reason: KERNELS.why_not.to_string() }),
    }
}

fn receipt(bind: &Bind<'_>, weights: &Quantized) -> Receipt {
    let floats = 1 + if bind.bias.is_some() { weights.n } else { 0 };
    Receipt {
        id: ID,
        seat: bind.seat.to_string(),
        device: bind.device.to_string(),
        dims: [weights.n, weights.k],
        bias: bind.bias.is_some(),
        source_dtype: bind.weights.dtype(),
        formats: ENTRY.formats,
        weight_bytes: (weights.codes.len() + weights.scales.len() + floats * size_of::<f32>()) as u64,
        conversion_error: weights.conversion_error,
        band: ENVELOPE.band,
        smoke: Smoke { rows: 0, worst: 0.0 },
        kernel_source: KERNELS.source_digest.to_string(),
        version: env!("CARGO_PKG_VERSION").to_string(),
    }
}
