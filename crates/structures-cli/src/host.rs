//! The model that a command asks for, with its bindings.

use anyhow::{Result, bail};
use device::{CudaDevice, Device};
use linear_proj::{Calibration, Host, ScaleMode};
use qwen3_5::Model;
use structure_core::{GuardMode, Ledger};
use structures::{BindOptions, Outcome, Plan, Rule, Target};

use crate::args::{self, DeviceArg, ScalesArg};

/// What a command binds, and how.
pub struct Binding {
    rules: Vec<Rule>,
    device: Device,
    mode: GuardMode,
    scale_mode: ScaleMode,
    calibration: Option<Calibration>,
}

/// Opens the device and loads the model. Rules and calibration are read first, so that a mistake in one costs nothing, and a variant that
/// has no kernels says so before anything is said of the device.
pub fn load(args: &args::Model) -> Result<(Model, Binding)> {
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
    let mode = if args.strict { GuardMode::Strict } else { GuardMode::Fallback };
    let scale_mode = match args.nvfp4_scales {
        ScalesArg::TwoLevel => ScaleMode::TwoLevel,
        ScalesArg::SingleLevel => ScaleMode::SingleLevel,
    };
    let calibration = args.calibration.as_ref().map(Calibration::load).transpose()?;
    let model = Model::load(&args.model)?;
    if let Some(calibration) = &calibration {
        calibration.check_model(&model.config().dims())?;
    }
    Ok((model, Binding { rules, device, mode, scale_mode, calibration }))
}

impl Binding {
    /// Whether there is nothing to bind.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Binds by the rules; seats that were refused are in the plan.
    pub fn plan(&self, model: &mut Model) -> Result<Plan> {
        let options = BindOptions {
            device: &self.device,
            staged: true,
            mode: self.mode,
            scale_mode: self.scale_mode,
            calibration: self.calibration.as_ref(),
            workspace: None,
        };
        let mut plan = structures::bind(model, &self.rules, options)?;
        for bank in model.banks() {
            let reason = "no implementation of moe_experts is linked".to_string();
            plan.push(bank.path, bank.dims, Outcome::Kept { reason });
        }
        Ok(plan)
    }

    /// As [`plan`](Self::plan), for commands that run the model: a refusal ends them.
    pub fn bind(&self, model: &mut Model) -> Result<Plan> {
        let plan = self.plan(model)?;
        match plan.first_refusal() {
            Some(reason) => bail!("{reason}"),
            None => Ok(plan),
        }
    }
}

/// The counts of all bound seats.
pub fn ledger(model: &Model) -> Ledger {
    Ledger { seats: model.seats().into_iter().filter_map(|seat| seat.ledger_row()).collect() }
}
