//! The CPU arm: balanced weights in canonical order and the quantiser of rows, which divides by the balance; both as the NVFP4
//! implementations share them.

use linear_proj::{Bind, BoundProj, CpuArm};
use linear_proj_nvfp4::{CpuForm, Quantized, RowQuantiser};
use structure_core::{Receipt, Refusal};

use crate::ENTRY;

/// Binds on the CPU and runs the smoke.
pub(crate) fn arm(
    weights: Quantized,
    rows: RowQuantiser,
    bind: &Bind<'_>,
    receipt: Receipt,
) -> Result<Box<dyn BoundProj>, Refusal> {
    Ok(Box::new(CpuArm::bind(CpuForm { weights, rows }, bind, &ENTRY, receipt)?))
}
