//! From a host to a loop over it.

use decode_loop::{Arm, DecodeLoop, LoopOptions, Sequence};
use structure_core::Refusal;

use crate::ENTRY;
use crate::cpu::CpuLoop;
#[cfg(kernels_built)]
use crate::replay::CudaLoop;

/// Builds a loop. The door has checked that there is code for the device.
pub(crate) fn bind<'a>(
    host: Arm<'a>,
    options: &LoopOptions<'_>,
) -> Result<Box<dyn DecodeLoop + 'a>, Refusal> {
    // A step reads one token, whatever the host could do.
    let sequence = Sequence { rows: 1, ..options.sequence };
    let (vocab, window) = (host.shape().vocab as u64, sequence.window as u64);
    ENTRY.envelope.check_dims(&ENTRY.id.to_string(), &[("vocab", vocab), ("window", window)])?;
    match host {
        Arm::Cpu(host) => Ok(Box::new(CpuLoop::new(host, &sequence)?)),
        #[cfg(kernels_built)]
        Arm::Cuda(host) => Ok(Box::new(CudaLoop::new(host, &sequence)?)),
        #[cfg(not(kernels_built))]
        Arm::Cuda(_) => {
            Err(Refusal::KernelsNotBuilt { id: ENTRY.id, reason: ENTRY.kernels.why_not.to_string() })
        }
    }
}
