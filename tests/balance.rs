//! `nvfp4_balance`: what the balance changes, what it leaves alone, and where its inverse may go.

use std::collections::BTreeMap;

use half::bf16;
use libtest_mimic::Trial;
use linear_proj::{
    Bind, BoundProj, Calibration, DenseWeights, Host, InverseBalance, Options, Rows, RowsMut, ScaleMode,
    reference,
};
use linear_proj_nvfp4_balance::balance;
use number_formats::nvfp4::{self, Nvfp4Tensor};
use qwen3_5::Model;
use structure_core::GuardMode;

use crate::arm::{Arm, on_each_arm, uneven_amax};
use crate::perplexity::{WINDOW, assets, tokens_from};
use crate::random::Random;

const N: usize = 96;
const K: usize = 272;

pub fn trials() -> Vec<Trial> {
    [
        on_each_arm("balance::of_ones_is_dynamic", of_ones_is_dynamic),
        on_each_arm("balance::rows_are_divided_in_fp32_then_quantised", rows_are_divided),
        on_each_arm("balance::weights_are_multiplied_then_quantised", weights_are_multiplied),
        on_each_arm("balance::outlier_channels_cost_less", outlier_channels_cost_less),
    ]
    .into_iter()
    .flatten()
    .chain([
        Trial::test("cpu::balance::calibration_is_what_the_seats_saw", || {
            calibration_is_what_the_seats_saw();
            Ok(())
        }),
        Trial::test("cpu::balance::a_fold_moves_the_inverse_into_the_norms", || {
            a_fold_moves_the_inverse();
            Ok(())
        }),
    ])
    .collect()
}

fn project(proj: &mut dyn BoundProj, x: &[f32]) -> Vec<f32> {
    let (n, m) = (proj.n(), x.len() / proj.k());
    let mut y = vec![f32::NAN; m * n];
    let output = RowsMut::host(&mut y[..], m, n).unwrap();
    proj.project(Rows::host(x, m, proj.k()).unwrap(), output).unwrap();
    y
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Where no channel is larger than another the two variants are one, for weights of every form.
fn of_ones_is_dynamic(arm: &Arm) {
    let mut random = Random::new(73);
    let (w, x) = (random.normals(N * K, 0.05), random.normals(16 * K, 1.0));
    let bias = random.normals(N, 1.0);
    let packed = Nvfp4Tensor::quantize_weight(&w, N, K, ScaleMode::TwoLevel).unwrap();
    for weights in [DenseWeights::from_f32(N, K, &w).unwrap(), DenseWeights::from_nvfp4(packed.view())] {
        for scale_mode in [ScaleMode::TwoLevel, ScaleMode::SingleLevel] {
            let options = Options { scale_mode, amax: Some(&[2.5; K]), ..Options::default() };
            let [mut dynamic, mut balanced] = ["nvfp4_dynamic", "nvfp4_balance"]
                .map(|variant| arm.staged(arm.bind_with(variant, weights, Some(&bias), &options).unwrap()));
            let (dynamic_w, balanced_w) =
                (dynamic.dequantized(0..N).unwrap(), balanced.dequantized(0..N).unwrap());
            assert_eq!(bits(&balanced_w), bits(&dynamic_w));
            assert_eq!(bits(&project(balanced.as_mut(), &x)), bits(&project(dynamic.as_mut(), &x)));
            assert_eq!(balanced.receipt().formats.weights, dynamic.receipt().formats.weights);
        }
    }
}

/// The operand is number_formats' quantiser over `bf16(x) * (1 / s)`.
fn rows_are_divided(arm: &Arm) {
    let mut random = Random::new(79);
    let (w, x) = (random.normals(N * K, 0.05), random.normals(K, 1.0));
    let amax = uneven_amax(K);
    for scale_mode in [ScaleMode::TwoLevel, ScaleMode::SingleLevel] {
        let options = Options { scale_mode, amax: Some(&amax), ..Options::default() };
        let weights = DenseWeights::from_f32(N, K, &w).unwrap();
        let proj = arm.bind_with("nvfp4_balance", weights, None, &options).unwrap();
        let divided: Vec<f32> =
            x.iter().zip(balance(&amax)).map(|(&x, s)| bf16::from_f32(x).to_f32() * (1.0 / s)).collect();
        let (mut codes, mut scales) = (vec![0; K / 2], vec![0; K / 16]);
        let global = nvfp4::quantize_row(&divided, scale_mode, &mut codes, &mut scales);
        let mut expected = vec![0f32; K];
        nvfp4::dequantize_row(&codes, &scales, global, &mut expected);
        assert_eq!(bits(&proj.operand(&x)), bits(&expected));
        // Told that rows come divided, it leaves them alone.
        let options = Options { inverse_balance: InverseBalance::InProducer, ..options };
        let proj = arm.bind_with("nvfp4_balance", weights, None, &options).unwrap();
        let global = nvfp4::quantize_row(
            &x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect::<Vec<_>>(),
            scale_mode,
            &mut codes,
            &mut scales,
        );
        nvfp4::dequantize_row(&codes, &scales, global, &mut expected);
        assert_eq!(bits(&proj.operand(&x)), bits(&expected));
    }
}

fn weights_are_multiplied(arm: &Arm) {
    let w = Random::new(83).normals(N * K, 0.05);
    let amax = uneven_amax(K);
    let s = balance(&amax);
    assert!(s.contains(&0.25) && s.contains(&4.0), "both ends of the clamp are met");
    let products: Vec<f32> = w.iter().zip(s.iter().cycle()).map(|(w, s)| w * s).collect();
    let expected = Nvfp4Tensor::quantize_weight(&products, N, K, ScaleMode::TwoLevel).unwrap();
    let mut values = vec![0f32; N * K];
    expected.dequantize(&mut values).unwrap();
    let proj = arm.bind("nvfp4_balance", &w, N, None).unwrap();
    assert_eq!(bits(&proj.dequantized(0..N).unwrap()), bits(&values));
    assert_eq!(proj.receipt().formats.activations, "NVFP4 two-level per row, balanced");
}

/// Some channels forty times larger than the others, as transformers have them: by the exact products of the weights and rows
/// that were given, the balance takes more than a fifth off the error.
fn outlier_channels_cost_less(arm: &Arm) {
    let mut random = Random::new(89);
    let w = random.normals(N * K, 0.05);
    let mut rows = |m: usize| {
        let mut x = random.normals(m * K, 1.0);
        x.iter_mut().skip(11).step_by(K / 4).for_each(|x| *x *= 40.0);
        x
    };
    let (sample, x) = (rows(64), rows(16));
    let amax: Vec<f32> =
        (0..K).map(|k| sample.iter().skip(k).step_by(K).fold(0f32, |amax, x| amax.max(x.abs()))).collect();
    let weights = DenseWeights::from_f32(N, K, &w).unwrap();
    let exact = reference::project(&weights, None, &x).unwrap();
    let options = Options { amax: Some(&amax), ..Options::default() };
    let [dynamic, balanced] = ["nvfp4_dynamic", "nvfp4_balance"].map(|variant| {
        let mut proj = arm.staged(arm.bind_with(variant, weights, None, &options).unwrap());
        let y = project(proj.as_mut(), &x);
        let error: f64 = y.iter().zip(&exact).map(|(&y, exact)| (f64::from(y) - exact).powi(2)).sum();
        (error / exact.iter().map(|exact| exact * exact).sum::<f64>()).sqrt()
    });
    assert!(balanced < 0.8 * dynamic, "relative L2 {balanced} balanced, {dynamic} without");
}

/// On one window the calibration is the largest magnitude of what each norm, mixer or feed-forward handed its seats; seats with the
/// same input have the same; and a file gives it back whole.
fn calibration_is_what_the_seats_saw() {
    let mut model = Model::load(assets().join("tiny-dense")).unwrap();
    let tokens = tokens_from(40_000, 64);
    let calibration = model.calibrate(&tokens, 32, 1.0, &mut |_| ()).unwrap();
    assert_eq!((calibration.samples, calibration.window, calibration.seats()), (2, 32, model.seats().len()));

    // The head's input is what `forward` returns, and what `draft` does.
    let mut expected = vec![0f32; 256];
    for sample in tokens.chunks(32) {
        let mut state = model.new_state(32).unwrap();
        let hidden = model.forward(&mut state, sample).unwrap();
        let mut state = model.new_draft_state(32).unwrap();
        let drafted = model.draft(&mut state, &hidden.slice(0..31), &sample[1..]).unwrap();
        for row in hidden.elements().chunks(256).chain(drafted.elements().chunks(256)) {
            expected.iter_mut().zip(row).for_each(|(amax, x)| *amax = amax.max(x.abs()));
        }
    }
    assert_eq!(bits(calibration.amax("lm_head").unwrap()), bits(&expected));
    for feed in model.norm_feeds() {
        let first = calibration.amax(&feed.seats[0]).unwrap();
        for seat in &feed.seats {
            assert_eq!(bits(calibration.amax(seat).unwrap()), bits(first), "{seat}");
        }
    }
    // The median of two samples lies between them.
    let middle = model.calibrate(&tokens, 32, 0.5, &mut |_| ()).unwrap();
    let (low, high) = (middle.amax("lm_head").unwrap(), calibration.amax("lm_head").unwrap());
    assert!(low.iter().zip(high).all(|(low, high)| low <= high) && low != high);

    let file = std::env::temp_dir().join(format!("calibration-{}.json", std::process::id()));
    calibration.save(&file).unwrap();
    let loaded = Calibration::load(&file);
    std::fs::remove_file(&file).unwrap();
    assert_eq!(loaded.unwrap(), calibration);
}

/// With a balance of powers of two every division is exact, so that with 1 / s in the norms, and the quantiser told so, the model
/// gives the bits it gave with 1 / s in the quantiser; so do the host's own forms of divided rows; and so does the host when the
/// fold is taken back.
fn a_fold_moves_the_inverse() {
    let mut model = Model::load(assets().join("tiny-dense")).unwrap();
    let tokens = tokens_from(0, 2 * WINDOW + 1);
    let ppl = |model: &mut Model| model.perplexity(&tokens, WINDOW, 16, &mut |_| ()).unwrap().ppl.to_bits();
    let host = ppl(&mut model);

    let feeds = model.norm_feeds();
    let seats_of: BTreeMap<_, _> = feeds.iter().map(|feed| (feed.norm.as_str(), feed.seats.len())).collect();
    assert_eq!(seats_of["model.layers.0.input_layernorm"], 4);
    assert_eq!(seats_of["model.layers.2.input_layernorm"], 3);
    assert_eq!(seats_of["model.layers.2.post_attention_layernorm"], 2);
    assert_eq!(seats_of.len(), 8, "three layers and the draft head's");
    let sparse = Model::load(assets().join("tiny-moe")).unwrap().norm_feeds();
    assert!(sparse.iter().all(|feed| feed.norm.ends_with("input_layernorm")), "routers read the others");

    // Of every 16 channels one is 4 times the mean, four are a quarter of it, the others are the mean.
    let amax: Vec<f32> =
        (0..256).map(|k| [4.0, 0.25, 0.25, 0.25, 0.25].get(k * 5 % 16).copied().unwrap_or(1.0)).collect();
    let s = balance(&amax);
    assert!(s.iter().all(|s| [0.5, 1.0, 2.0].contains(s)) && s.contains(&2.0));

    let door = structures::linear_proj("nvfp4_balance").unwrap();
    let seats: Vec<&String> = feeds.iter().flat_map(|feed| &feed.seats).collect();
    let bind = |model: &mut Model, inverse_balance| {
        for path in &seats {
            let options = Options { amax: Some(&amax), inverse_balance, ..Options::default() };
            let weights = model.weights(path).unwrap();
            let bind = Bind { seat: path, weights, bias: None, device: &device::Device::Cpu };
            let proj = door.bind_with(&bind, &options).unwrap();
            model.seat_mut(path).unwrap().bind(proj, GuardMode::Strict).unwrap();
        }
    };
    bind(&mut model, InverseBalance::InQuantiser);
    let in_quantiser = ppl(&mut model);
    assert_ne!(in_quantiser, host);
    bind(&mut model, InverseBalance::InProducer);
    assert_ne!(ppl(&mut model), in_quantiser, "nobody divides");
    feeds.iter().for_each(|feed| model.fold_balance(&feed.norm, &s).unwrap());
    assert_eq!(ppl(&mut model), in_quantiser, "the norms divide");

    seats.iter().for_each(|path| assert!(model.seat_mut(path).unwrap().detach().is_some()));
    assert_eq!(ppl(&mut model), host, "the host's forms multiply it back");
    feeds.iter().for_each(|feed| model.unfold_balance(&feed.norm).unwrap());
    assert_eq!(ppl(&mut model), host);

    let refusal =
        |norm: &str, s: &[f32], model: &mut Model| model.fold_balance(norm, s).unwrap_err().to_string();
    assert_eq!(refusal("model.norm", &[1.0; 256], &mut model), "the model: tensor `model.norm` is missing");
    let norm = "model.layers.0.input_layernorm";
    assert_eq!(refusal(norm, &[1.0; 255], &mut model), "balance of a norm: shape [255], expected [256]");
    let mut s = [1.0; 256];
    s[9] = 0.0;
    let line = refusal(norm, &s, &mut model);
    assert_eq!(line, format!("{norm}: balance of channel 9 is 0; it must be finite and above zero"));
}
