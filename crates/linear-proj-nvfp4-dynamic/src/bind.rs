//! From dense weights to a bound arm: quantise, place, smoke, receipt.

use device::Device;
use linear_proj::{Bind, BoundProj, Options};
use linear_proj_nvfp4::{Quantized, RowQuantiser};
use structure_core::Refusal;

use crate::{ENTRY, cpu};

/// Binds dense weights. The door has checked shapes, types, finiteness and that there is code for the device.
pub(crate) fn bind(bind: &Bind<'_>, options: &Options<'_>) -> Result<Box<dyn BoundProj>, Refusal> {
    let mode = options.scale_mode;
    let weights = Quantized::new(bind, mode, None)?;
    let rows = RowQuantiser { mode, inverse_balance: None };
    let packing = weights.packing(Quantized::format(&bind.weights, mode, None), &rows);
    let receipt = bind.receipt(&ENTRY, packing, env!("CARGO_PKG_VERSION"));
    match bind.device {
        Device::Cpu => cpu::arm(weights, rows, bind, receipt),
        #[cfg(kernels_built)]
        Device::Cuda(gpu) => crate::cuda::arm(gpu, &weights, rows, bind, receipt),
        #[cfg(not(kernels_built))]
        Device::Cuda(_) => {
            Err(Refusal::KernelsNotBuilt { id: ENTRY.id, reason: ENTRY.kernels.why_not.to_string() })
        }
    }
}
