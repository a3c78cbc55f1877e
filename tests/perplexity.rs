//! Perplexity with every projection bound, beside the host's own, on both tiny hosts.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use libtest_mimic::Trial;
use linear_proj::{Host, ScaleMode};
use qwen3_5::Model;
use structure_core::{GuardMode, Ledger};
use structures::BindOptions;

use crate::arm::{Arm, on_each_arm};

pub const WINDOW: usize = 256;
/// The widest decode band, so that implementations serve every row.
const ROWS: usize = 16;

/// Where the tokens of the calibration start: after all that are predicted.
const CALIBRATION: usize = 32_768;

/// How far a variant may be from the host.
struct Expected {
    rule: &'static str,
    /// Relative change of the perplexity.
    change: f64,
    /// Relative L2 distance of any seat's weights.
    conversion: std::ops::Range<f64>,
}

/// Rounding to one of 255 steps of an amax of about four deviations: 4 / 127 / sqrt(12) of a deviation.
const W8A16: Expected = Expected { rule: "*=w8a16_static", change: 5e-3, conversion: 1e-4..2e-2 };

/// E2M1 has one mantissa bit, so weights and activations move by a tenth in the mean. With every projection bound that costs these
/// small hosts 10.4 % (dense) and 5.0 % (sparse) of perplexity on the CPU arm; twice that would be another defect.
const NVFP4: Expected = Expected { rule: "*=nvfp4_dynamic", change: 0.21, conversion: 5e-2..0.15 };

/// The same formats; the calibration is on tokens after those that are predicted.
const BALANCE: Expected = Expected { rule: "*=nvfp4_balance", change: 0.21, conversion: 5e-2..0.15 };

pub fn trials() -> Vec<Trial> {
    [
        on_each_arm("w8a16::perplexity_of_tiny_dense", |arm| perplexity(arm, "tiny-dense", &W8A16)),
        on_each_arm("w8a16::perplexity_of_tiny_moe", |arm| perplexity(arm, "tiny-moe", &W8A16)),
        on_each_arm("nvfp4::perplexity_of_tiny_dense", |arm| perplexity(arm, "tiny-dense", &NVFP4)),
        on_each_arm("nvfp4::perplexity_of_tiny_moe", |arm| perplexity(arm, "tiny-moe", &NVFP4)),
        on_each_arm("balance::perplexity_of_tiny_dense", |arm| perplexity(arm, "tiny-dense", &BALANCE)),
        on_each_arm("balance::perplexity_of_tiny_moe", |arm| perplexity(arm, "tiny-moe", &BALANCE)),
    ]
    .into_iter()
    .flatten()
    .chain([Trial::test("cpu::nvfp4::two_level_scales_are_nearer", || {
        two_level_scales_are_nearer("tiny-dense");
        two_level_scales_are_nearer("tiny-moe");
        Ok(())
    })])
    .collect()
}

/// Over the weights of a host, a global scale above the block scales leaves less of an error than block scales alone, by far where
/// weights are small, and at nearly every seat.
fn two_level_scales_are_nearer(model: &str) {
    let mut model = Model::load(assets().join(model)).unwrap();
    let mut errors = |scale_mode| -> Vec<f64> {
        let (device, mode) = (&device::Device::Cpu, GuardMode::Strict);
        let options =
            BindOptions { device, staged: true, mode, scale_mode, calibration: None, workspace: None };
        let plan = structures::bind(&mut model, &["*=nvfp4_dynamic".parse().unwrap()], options).unwrap();
        let receipt = |row: &structures::PlanRow| match &row.outcome {
            structures::Outcome::Bound { receipt, .. } => receipt.conversion_error,
            other => panic!("{}: {other:?}", row.path),
        };
        plan.rows().iter().map(receipt).collect()
    };
    let (two_level, single_level) = (errors(ScaleMode::TwoLevel), errors(ScaleMode::SingleLevel));
    let nearer = two_level.iter().zip(&single_level).filter(|(two, single)| two <= single).count();
    assert!(two_level.iter().sum::<f64>() < single_level.iter().sum::<f64>());
    assert!(nearer * 10 >= two_level.len() * 9, "nearer at {nearer} of {} seats", two_level.len());
}

pub fn assets() -> PathBuf {
    std::env::var_os("STRUCTURES_ASSETS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets"), PathBuf::from)
}

/// 32,768 tokens on the CPU arm. Staged rows make a GPU call for each projection of each 16 rows, so fewer there.
fn tokens(arm: &Arm) -> Vec<u32> {
    let windows = if matches!(arm.device, device::Device::Cpu) { 128 } else { 16 };
    tokens_from(0, windows * WINDOW + 1)
}

/// Tokens of the validation text from `first` on.
pub fn tokens_from(first: usize, len: usize) -> Vec<u32> {
    let bytes = fs::read(assets().join("valid_tokens.u16")).unwrap();
    let ids = bytes.as_chunks::<2>().0.iter().map(|&id| u32::from(u16::from_le_bytes(id)));
    ids.skip(first).take(len).collect()
}

/// The host's own perplexity, which the variants share: measured once for each model and text.
fn host_perplexity(name: &str, model: &mut Model, tokens: &[u32]) -> f64 {
    static MEASURED: Mutex<BTreeMap<(String, usize), f64>> = Mutex::new(BTreeMap::new());
    let measure = || model.perplexity(tokens, WINDOW, ROWS, &mut |_| ()).unwrap().ppl;
    *MEASURED.lock().unwrap().entry((name.to_string(), tokens.len())).or_insert_with(measure)
}

fn perplexity(arm: &Arm, name: &str, expected: &Expected) {
    let mut model = Model::load(assets().join(name)).unwrap();
    let tokens = tokens(arm);
    let host = host_perplexity(name, &mut model, &tokens);

    let calibration =
        model.calibrate(&tokens_from(CALIBRATION, 64 * WINDOW), WINDOW, 1.0, &mut |_| ()).unwrap();
    let rules = [expected.rule.parse().unwrap()];
    let options = BindOptions {
        device: &arm.device,
        staged: true,
        mode: GuardMode::Strict,
        scale_mode: ScaleMode::TwoLevel,
        calibration: Some(&calibration),
        workspace: None,
    };
    let plan = structures::bind(&mut model, &rules, options).unwrap();
    assert_eq!(plan.first_refusal(), None);
    let sum = plan.summary();
    assert_eq!((sum.bound, sum.kept), (model.seats().len(), 0));
    for row in plan.rows() {
        let structures::Outcome::Bound { receipt, .. } = &row.outcome else { panic!("{}", row.path) };
        assert!(
            expected.conversion.contains(&receipt.conversion_error),
            "{}: {}",
            row.path,
            receipt.conversion_error
        );
    }

    assert_eq!(structures::explain(&model).summary(), sum, "a host as it stands is as it was bound");

    let bound = model.perplexity(&tokens, WINDOW, ROWS, &mut |_| ()).unwrap();
    let change = bound.ppl / host - 1.0;
    assert!(change.abs() < expected.change, "{} bound, {host} at the host", bound.ppl);
    assert_ne!(bound.ppl, host, "the implementation was measured, not the host");

    let ledger = Ledger { seats: model.seats().into_iter().filter_map(|seat| seat.ledger_row()).collect() };
    let sum = ledger.summary();
    assert!(sum.is_clean());
    assert_eq!(sum.calls, sum.served + sum.dispatched_by_band + sum.fallbacks + sum.refused);
    // Each seat of the main model is called once for every 16 rows; the draft head's are not called.
    let passes = ((tokens.len() - 1) / ROWS) as u64;
    let main = ledger.seats.iter().filter(|(path, ..)| !path.starts_with("mtp."));
    for (path, _, seat) in main {
        assert_eq!((seat.calls, seat.served), (passes, passes), "{path}");
    }
}
