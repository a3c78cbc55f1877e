//! The model that a command asks for, with its bindings.

use anyhow::{Result, bail};
use device::{CudaDevice, Device};
use linear_proj::Host;
use qwen3_5::Model;
use structure_core::{GuardMode, Ledger};
use structures::{BindOptions, Outcome, Plan, Rule, Target};

use crate::args::{self, DeviceArg};

/// Opens the device and loads the model. Rules are read first, so that a mistake in one costs nothing, and a variant that
/// has no kernels says so before anything is said of the device.
pub fn load(args: &args::Model) -> Result<(Model, Vec<Rule>, Device)> {
    let rules = args.bind.iter().map(|rule| rule.parse()).collect::<Result<Vec<Rule>, _>>()?;
    let device = match args.device {
        DeviceArg::Cpu => Device::Cpu,
        DeviceArg::Cuda => {
            for rule in &rules {
                if let Target::Variant(door) = rule.target() {
                    let registration = door.registration();
                    registration.kernels.check_built(registration.id)?;
                }
            }
            Device::Cuda(CudaDevice::open(0)?)
        }
    };
    Ok((Model::load(&args.model)?, rules, device))
}

/// Binds by the rules; seats that were refused are in the plan.
pub fn plan(model: &mut Model, rules: &[Rule], device: &Device, strict: bool) -> Result<Plan> {
    let mode = if strict { GuardMode::Strict } else { GuardMode::Fallback };
    let mut plan = structures::bind(model, rules, BindOptions { device, staged: true, mode })?;
    for bank in model.banks() {
        let reason = "no implementation of moe_experts is linked".to_string();
        plan.push(bank.path, bank.dims, Outcome::Kept { reason });
    }
    Ok(plan)
}

/// As [`plan`], for commands that run the model: a refusal ends them.
pub fn bind(model: &mut Model, rules: &[Rule], device: &Device, strict: bool) -> Result<Plan> {
    let plan = plan(model, rules, device, strict)?;
    match plan.first_refusal() {
        Some(reason) => bail!("{reason}"),
        None => Ok(plan),
    }
}

/// The counts of all bound seats.
pub fn ledger(model: &Model) -> Ledger {
    Ledger { seats: model.seats().into_iter().filter_map(|seat| seat.ledger_row()).collect() }
}
