//! `structures synth`: how long a decode step of a large host takes, beside the bytes that it must move.

#[cfg(kernels_built)]
mod step;

use anyhow::Result;
use qwen3_5::Preset;

use crate::args::{DeviceArg, Synth};
use crate::decode::Decode;
use crate::host::Binding;

/// Measures a step.
pub fn run(args: &Synth) -> Result<()> {
    let preset: Preset = args.shape.parse()?;
    let decode = Decode::new(&args.kv)?;
    let binding = Binding::new(&args.bind, DeviceArg::Cuda, &decode.registrations())?;
    measure(args, preset, &decode, &binding)
}

#[cfg(kernels_built)]
use step::measure;

#[cfg(not(kernels_built))]
fn measure(_: &Synth, _: Preset, _: &Decode, _: &Binding) -> Result<()> {
    anyhow::bail!("{}", qwen3_5::KERNELS.why_not)
}
