//! The model that a command asks for, with its bindings.

use anyhow::{Result, bail};
use device::{CudaDevice, Device};
use linear_proj::{Calibration, Host, ScaleMode};
#[cfg(kernels_built)]
use qwen3_5::CudaModel;
use qwen3_5::Model;
use structure_core::{GuardMode, Ledger, Registration};
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
    load_with(args, &[])
}

/// As [`load`], for a command that runs these on the device too.
pub fn load_with(args: &args::Model, runs: &[&'static Registration]) -> Result<(Model, Binding)> {
    let binding = Binding::new(&args.bind, args.device, runs)?;
    let model = Model::load(&args.model)?;
    if let Some(calibration) = &binding.calibration {
        calibration.check_model(&model.config().dims())?;
    }
    Ok((model, binding))
}

impl Binding {
    /// Reads rules, checks that what they name and what else `runs` on a GPU has kernels, then opens the device.
    pub fn new(args: &args::Bind, device: DeviceArg, runs: &[&'static Registration]) -> Result<Self> {
        let rules = args.bind.iter().map(|rule| rule.parse()).collect::<Result<Vec<Rule>, _>>()?;
        let device = match device {
            DeviceArg::Cpu => Device::Cpu,
            DeviceArg::Cuda => {
                let bound = rules.iter().filter_map(|rule| match rule.target() {
                    Target::Variant(door) => Some(door.registration()),
                    Target::Host => None,
                });
                for registration in bound.chain(runs.iter().copied()) {
                    registration.kernels.check_built(registration.id)?;
                }
                Device::Cuda(CudaDevice::open(0)?)
            }
        };
        Ok(Binding {
            rules,
            device,
            mode: if args.strict { GuardMode::Strict } else { GuardMode::Fallback },
            scale_mode: match args.nvfp4_scales {
                ScalesArg::TwoLevel => ScaleMode::TwoLevel,
                ScalesArg::SingleLevel => ScaleMode::SingleLevel,
            },
            calibration: args.calibration.as_ref().map(Calibration::load).transpose()?,
        })
    }

    /// Where implementations run.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether there is nothing to bind.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Binds by the rules into a model in host memory; seats that were refused are in the plan.
    pub fn plan(&self, model: &mut Model) -> Result<Plan> {
        let mut plan = structures::bind(model, &self.rules, self.options())?;
        for bank in model.banks() {
            let reason = "no implementation of moe_experts is linked".to_string();
            plan.push(bank.path, bank.dims, Outcome::Kept { reason });
        }
        Ok(plan)
    }

    /// As [`plan`](Self::plan), for commands that run the model: a refusal ends them.
    pub fn bind(&self, model: &mut Model) -> Result<Plan> {
        all_bound(self.plan(model)?)
    }

    /// The model in the memory of the device, bound as [`bind`](Self::bind) does.
    #[cfg(kernels_built)]
    pub fn upload(&self, model: &Model) -> Result<CudaModel> {
        let Device::Cuda(gpu) = &self.device else { bail!("the model is on the CPU") };
        let mut model = CudaModel::new(model, gpu)?;
        let workspace = model.workspace().clone();
        let options = BindOptions { staged: false, workspace: Some(&workspace), ..self.options() };
        all_bound(structures::bind(&mut model, &self.rules, options)?)?;
        Ok(model)
    }

    fn options(&self) -> BindOptions<'_> {
        BindOptions {
            device: &self.device,
            staged: true,
            mode: self.mode,
            scale_mode: self.scale_mode,
            calibration: self.calibration.as_ref(),
            workspace: None,
        }
    }
}

fn all_bound(plan: Plan) -> Result<Plan> {
    match plan.first_refusal() {
        Some(reason) => bail!("{reason}"),
        None => Ok(plan),
    }
}

/// The counts of all bound seats.
pub fn ledger(host: &dyn Host) -> Ledger {
    Ledger { seats: host.seats().into_iter().filter_map(|seat| seat.ledger_row()).collect() }
}
