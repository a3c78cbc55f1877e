use std::collections::HashMap;

use device::{Device, Workspace};
use linear_proj::{
    Bind, BoundProj, Calibration, DenseWeights, Door, Host, Options, ScaleMode, SeatState, Staged,
};
use structure_core::{GuardMode, Refusal, StructureId};

use crate::{Outcome, Plan, Rule, Target};

/// How [`bind`] binds.
#[derive(Clone, Copy)]
pub struct BindOptions<'a> {
    /// Where implementations run.
    pub device: &'a Device,
    /// Whether a host's rows are in host memory although the implementations run on a GPU.
    pub staged: bool,
    /// What a seat does with a call that is not of the bound form.
    pub mode: GuardMode,
    /// The scales of NVFP4 variants.
    pub scale_mode: ScaleMode,
    /// What `calibrated` variants are bound with.
    pub calibration: Option<&'a Calibration>,
    /// Scratch memory for calls of many rows, of a host whose rows are on the workspace's stream; see
    /// [`Options::workspace`](linear_proj::Options::workspace).
    pub workspace: Option<&'a Workspace>,
}

/// Binds a host's seats by `rules`. A seat that an implementation refuses stays at the host, and the plan says why.
///
/// # Errors
/// [`Refusal::PatternMatchesNothing`] before anything is bound, for a rule that selects no seat.
pub fn bind(host: &mut dyn Host, rules: &[Rule], options: BindOptions<'_>) -> Result<Plan, Refusal> {
    let seats: Vec<(String, usize, usize)> =
        host.seats().into_iter().map(|seat| (seat.path().to_string(), seat.n(), seat.k())).collect();
    for rule in rules {
        if !seats.iter().any(|(path, ..)| rule.selects(path)) {
            return Err(Refusal::PatternMatchesNothing {
                pattern: rule.pattern().to_string(),
                seats: seats.len(),
                example: seats.first().map(|(path, ..)| path.clone()).unwrap_or_default(),
            });
        }
    }
    let mut plan = Plan::default();
    let mut packed = Packed::new();
    for (path, n, k) in seats {
        let outcome = match rules.iter().rev().find(|rule| rule.selects(&path)).map(Rule::target) {
            None => Outcome::Kept { reason: "no rule selects it".to_string() },
            Some(Target::Host) => Outcome::Kept { reason: "a rule keeps it at the host".to_string() },
            Some(Target::Variant(door)) => match bind_seat(host, &path, door, options, &mut packed) {
                Ok(outcome) => outcome,
                Err(refusal) => Outcome::Refused { id: door.registration().id, reason: refusal.to_string() },
            },
        };
        plan.push(path, [n, k], outcome);
    }
    Ok(plan)
}

/// What serves each seat of a host as it stands, however its seats were bound.
pub fn explain(host: &dyn Host) -> Plan {
    let mut plan = Plan::default();
    for seat in host.seats() {
        let outcome = match seat.state() {
            SeatState::Host => Outcome::Kept { reason: "no implementation is bound".to_string() },
            SeatState::Bound(receipt, ledger) => match &ledger.last_reason {
                Some(reason) if ledger.detached => {
                    Outcome::Kept { reason: format!("{} handed itself back: {reason}", receipt.id) }
                }
                _ => Outcome::Bound { digest: receipt.digest(), receipt: Box::new(receipt.clone()) },
            },
        };
        plan.push(seat.path(), [seat.n(), seat.k()], outcome);
    }
    plan
}

/// The seat that each memory was packed for first, by variant: seats that share their weights share the work.
type Packed = HashMap<(StructureId, (usize, usize, usize)), String>;

fn bind_seat(
    host: &mut dyn Host,
    path: &str,
    door: &Door,
    options: BindOptions<'_>,
    packed: &mut Packed,
) -> Result<Outcome, Refusal> {
    let missing = || Refusal::MissingTensor { path: "the host".to_string(), tensor: path.to_string() };
    let weights = host.weights(path).ok_or_else(missing)?;
    let registration = door.registration();
    let key = (registration.id, weights.identity());
    // A calibration is each seat's own.
    let first = packed.get(&key).filter(|_| !registration.calibrated && !options.staged);
    let twin = first.and_then(|first| host.seats().into_iter().find(|seat| seat.path() == first));
    let proj = match twin.map_or(Ok(None), |seat| seat.duplicate_bound(path))? {
        Some(proj) => proj,
        None => make(path, weights, door, options)?,
    };
    packed.entry(key).or_insert_with(|| path.to_string());
    let receipt = proj.receipt().clone();
    let seat = host.seat_mut(path).ok_or_else(missing)?;
    seat.bind(proj, options.mode)?;
    Ok(Outcome::Bound { digest: receipt.digest(), receipt: Box::new(receipt) })
}

fn make(
    path: &str,
    weights: DenseWeights<'_>,
    door: &Door,
    options: BindOptions<'_>,
) -> Result<Box<dyn BoundProj>, Refusal> {
    let bind = Bind { seat: path, weights, bias: None, device: options.device };
    let amax = options.calibration.and_then(|calibration| calibration.amax(path));
    let BindOptions { scale_mode, workspace, .. } = options;
    let proj = door
        .bind_with(&bind, &Options { scale_mode, amax, workspace, ..Options::default() })
        .map_err(|refusal| match refusal {
            Refusal::NotCalibrated { seat, id, .. } if options.calibration.is_some() => {
                Refusal::NotCalibrated {
                    seat,
                    id,
                    missing: "the calibration that was given has no such seat",
                }
            }
            other => other,
        })?;
    match options.device {
        Device::Cuda(gpu) if options.staged => Ok(Box::new(Staged::new(proj, &gpu.new_stream()?)?)),
        _ => Ok(proj),
    }
}
