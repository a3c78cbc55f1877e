//! From dense weights to a bound arm: quantise, place, smoke, receipt.

use device::Device;
#[cfg(kernels_built)]
use linear_proj::CudaArm;
use linear_proj::{Bind, BoundProj, CpuArm, Options, Packing};
use structure_core::Refusal;

use crate::ENTRY;
#[cfg(kernels_built)]
use crate::cuda::Packed;
use crate::pack::Quantized;

/// Binds dense weights. The door has checked shapes, types, finiteness and that there is code for the device.
pub(crate) fn bind(bind: &Bind<'_>, _: &Options<'_>) -> Result<Box<dyn BoundProj>, Refusal> {
    let weights = Quantized::new(&bind.weights);
    let packing = Packing {
        formats: ENTRY.formats,
        bytes: size_of_val(&weights.codes[..]) + size_of_val(&weights.scales[..]),
        conversion_error: weights.conversion_error,
    };
    let receipt = bind.receipt(&ENTRY, packing, env!("CARGO_PKG_VERSION"));
    match bind.device {
        Device::Cpu => Ok(Box::new(CpuArm::bind(weights, bind, &ENTRY, receipt)?)),
        #[cfg(kernels_built)]
        Device::Cuda(gpu) => {
            let stream = gpu.new_stream()?;
            let packed = Packed::new(&stream, bind.seat, &weights, bind.bias)?;
            Ok(Box::new(CudaArm::bind(packed, &stream, bind, &ENTRY, receipt)?))
        }
        #[cfg(not(kernels_built))]
        Device::Cuda(_) => {
            Err(Refusal::KernelsNotBuilt { id: ENTRY.id, reason: ENTRY.kernels.why_not.to_string() })
        }
    }
}
