//! The gates of every `linear_proj` on each arm: close to the reference, row-invariant, repeatable, nothing unwritten.

use half::{bf16, f16};
use libtest_mimic::Trial;
use linear_proj::{BoundProj, DenseWeights, Options, Rows, RowsMut, ScaleMode, gates};
use number_formats::nvfp4::{Nvfp4Tensor, Nvfp4View};
use number_formats::relative_l2;

use crate::arm::{Arm, on_each_arm, on_gpu};
use crate::random::Random;

const W8A16: &str = "w8a16_static";
const NVFP4: &str = "nvfp4_dynamic";
const BALANCE: &str = "nvfp4_balance";
pub const VARIANTS: &[&str] = &[W8A16, NVFP4, BALANCE];

/// N and K: the smallest, odd ones, those at and beside tile edges, every projection shape of the tiny hosts, and one of
/// each way in which a kernel may cut K and group rows, which goes by N.
const SHAPES: &[(usize, usize)] = &[
    (1, 1),
    (3, 7),
    (6, 256),
    (15, 31),
    (16, 32),
    (17, 33),
    (64, 1000),
    (64, 1024),
    (100, 264),
    (256, 768),
    (256, 1536),
    (1280, 256),
    (2048, 256),
    (6400, 72),
    (12_800, 136),
    (20_000, 24),
    (33_800, 40),
    (51_000, 16),
    (33_800, 33),
    (65_600, 32),
];

/// Longer than the CPU arm is quick for: K that is cut less, and slices that end inside a step.
const LONG: &[(usize, usize)] = &[(1044, 8208), (200, 17_408)];

/// The shapes that a variant takes.
fn shapes(variant: &str) -> impl Iterator<Item = (usize, usize)> {
    let bounds = structures::get("linear_proj", variant).unwrap().envelope.dims;
    let k = bounds.iter().find(|dim| dim.name == "K").unwrap().bound;
    SHAPES.iter().copied().filter(move |&(_, of)| k.takes(of as u64))
}

pub fn trials() -> Vec<Trial> {
    [
        on_each_arm("close_to_the_reference", close_to_the_reference),
        on_each_arm("any_magnitude", any_magnitude),
        on_each_arm("row_invariant", row_invariant),
        on_each_arm("w8a16::exact_sums_are_exact", exact_sums_are_exact),
        on_each_arm("the_same_bits_every_time", the_same_bits_every_time),
        on_each_arm("a_bad_row_spoils_itself_alone", a_bad_row_spoils_itself_alone),
        on_each_arm("row_types_agree", row_types_agree),
        on_each_arm("nvfp4::exact_sums_are_exact", nvfp4_exact_sums_are_exact),
        on_each_arm("nvfp4::a_zero_block_beside_others", nvfp4_zero_blocks),
        on_each_arm("nvfp4::single_level_globals_are_one", nvfp4_single_level),
        on_each_arm("w8a16::weights_are_within_half_a_step", weights_are_within_half_a_step),
    ]
    .into_iter()
    .flatten()
    .chain([
        on_gpu("holds_the_cpu_arms_weights", holds_the_cpu_arms_weights),
        on_gpu("nvfp4::quantises_as_the_cpu_arm_does", |arm| quantises_as_the_cpu_arm_does(arm, NVFP4)),
        on_gpu("balance::quantises_as_the_cpu_arm_does", |arm| quantises_as_the_cpu_arm_does(arm, BALANCE)),
        on_gpu("more_elements_than_32_bits_count", more_elements_than_32_bits_count),
        on_gpu("long_rows", long_rows),
    ])
    .collect()
}

/// Projects host rows into an output that is poisoned first.
pub fn project(proj: &mut dyn BoundProj, x: &[f32], rows: usize) -> Vec<f32> {
    let (n, k) = (proj.n(), proj.k());
    let mut y = vec![f32::NAN; rows * n];
    let output = RowsMut::host(&mut y[..], rows, n).unwrap();
    proj.project(Rows::host(x, rows, k).unwrap(), output).unwrap();
    y
}

fn close_to_the_reference(arm: &Arm) {
    for (variant, (n, k)) in
        VARIANTS.iter().flat_map(|variant| shapes(variant).map(move |shape| (variant, shape)))
    {
        let mut random = Random::new((n * 65536 + k) as u64);
        let w = random.normals(n * k, 0.05);
        let bias = random.normals(n, 1.0);
        for bias in [None, Some(&bias[..])] {
            let mut proj = arm.bind_staged(variant, &w, n, bias);
            for m in 1..=16 {
                let x = random.normals(m * k, 1.0);
                gates::against_reference(proj.as_mut(), bias, &x, m, 0..n).unwrap();
            }
        }
    }
}

/// Weights and activations far from one: a scale or an exponent that is handled wrongly shows here.
fn any_magnitude(arm: &Arm) {
    let (n, k) = (48, 512);
    let magnitudes = [(1e-30, 1e20), (1e20, 1e-30), (1e-9, 1e-9), (1e10, 1e10), (1e-38, 1.0)];
    for (variant, (weight, activation)) in VARIANTS.iter().flat_map(|v| magnitudes.map(|each| (v, each))) {
        let mut random = Random::new(5);
        let mut w = random.normals(n * k, weight);
        w[..k].fill(0.0);
        w[3 * k] = weight * 100.0;
        let mut proj = arm.bind_staged(variant, &w, n, None);
        let x = random.normals(16 * k, activation);
        gates::against_reference(proj.as_mut(), None, &x, 16, 0..n).unwrap();
        assert_eq!(project(proj.as_mut(), &x, 16)[0], 0.0, "a row of zeros projects to zero");
    }
}

fn long_rows(arm: &Arm) {
    for (variant, &(n, k)) in
        VARIANTS.iter().flat_map(|variant| LONG.iter().map(move |shape| (variant, shape)))
    {
        let mut random = Random::new((n + k) as u64);
        let w = random.normals(n * k, 0.05);
        let x = random.normals(16 * k, 1.0);
        let mut proj = arm.bind_staged(variant, &w, n, None);
        for m in [1, 2, 9, 16] {
            gates::against_reference(proj.as_mut(), None, &x[..m * k], m, n - 20..n).unwrap();
        }
        gates::row_invariance(proj.as_mut(), &x).unwrap();
    }
}

fn row_invariant(arm: &Arm) {
    for (variant, (n, k)) in
        VARIANTS.iter().flat_map(|variant| shapes(variant).map(move |shape| (variant, shape)))
    {
        let mut random = Random::new((n + k) as u64);
        let w = random.normals(n * k, 0.05);
        let bias = random.normals(n, 1.0);
        let x = random.normals(16 * k, 1.0);
        gates::row_invariance(arm.bind_staged(variant, &w, n, Some(&bias)).as_mut(), &x).unwrap();
    }
}

/// Integers whose sums stay below 2^24: every order of adding gives the same bits, so each arm must give the exact ones.
fn exact_sums_are_exact(arm: &Arm) {
    let (n, k, m) = (40, 640, 16);
    let mut random = Random::new(11);
    // The largest weight of each row is 127, so the scale is 1 and the codes are the weights.
    let mut w: Vec<f32> = (0..n * k).map(|_| random.integer(127)).collect();
    w.chunks_mut(k).for_each(|row| row[0] = 127.0);
    let x: Vec<f32> = (0..m * k).map(|_| random.integer(128)).collect();
    let y = project(arm.bind_staged(W8A16, &w, n, None).as_mut(), &x, m);
    for (row, x) in x.chunks(k).enumerate() {
        for (feature, w) in w.chunks(k).enumerate() {
            let exact: i64 = w.iter().zip(x).map(|(&w, &x)| w as i64 * x as i64).sum();
            assert!(exact.abs() < 1 << 24);
            assert_eq!(y[row * n + feature], bf16::from_f32(exact as f32).to_f32(), "y[{row}, {feature}]");
        }
    }
}

fn the_same_bits_every_time(arm: &Arm) {
    let (n, k) = (1280, 256);
    for variant in VARIANTS {
        let mut random = Random::new(3);
        let w = random.normals(n * k, 0.05);
        let mut proj = arm.bind_staged(variant, &w, n, None);
        let x = random.normals(16 * k, 1.0);
        let first = project(proj.as_mut(), &x, 16);
        for _ in 0..20 {
            assert_eq!(project(proj.as_mut(), &x, 16), first);
        }
    }
}

/// A NaN or an infinity makes its own row NaN or infinite, never a plausible number; the others are as without it.
fn a_bad_row_spoils_itself_alone(arm: &Arm) {
    VARIANTS.iter().for_each(|variant| a_bad_row(arm, variant));
}

fn a_bad_row(arm: &Arm, variant: &str) {
    let (n, k, m) = (96, 272, 16);
    let mut random = Random::new(17);
    let w = random.normals(n * k, 0.05);
    let mut proj = arm.bind_staged(variant, &w, n, None);
    let good = random.normals(m * k, 1.0);
    let expected = project(proj.as_mut(), &good, m);
    for (row, bad) in [(0, f32::NAN), (7, f32::INFINITY), (8, f32::NAN), (15, f32::NEG_INFINITY)] {
        let mut x = good.clone();
        x[row * k + k / 2] = bad;
        for (m, (y, expected)) in project(proj.as_mut(), &x, m).chunks(n).zip(expected.chunks(n)).enumerate()
        {
            if m != row {
                assert_eq!(y, expected, "row {m} beside a {bad} in row {row}");
            } else {
                // A weight of zero times an infinity is NaN, any other an infinity.
                assert!(y.iter().all(|y| !y.is_finite()), "row {row} with a {bad}");
            }
        }
    }
}

/// BF16 values give the same bits whichever type carries them, and results come out in the type rows came in.
fn row_types_agree(arm: &Arm) {
    VARIANTS.iter().for_each(|variant| row_types(arm, variant));
}

fn row_types(arm: &Arm, variant: &str) {
    use device::{Buffer, Device};
    let (n, k, m) = (100, 272, 5);
    let mut random = Random::new(23);
    let w = random.normals(n * k, 0.05);
    // Of BF16's 8 bits and F16's exponents, so exact in all three types.
    let x: Vec<f32> = (0..m * k).map(|_| random.integer(127) / 64.0).collect();
    let x_bf16: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let x_f16: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
    let mut proj = arm.bind(variant, &w, n, None).unwrap();
    let (mut y, mut y_bf16, mut y_f16) =
        (vec![f32::NAN; m * n], vec![bf16::NAN; m * n], vec![f16::NAN; m * n]);
    match &arm.device {
        Device::Cpu => {
            proj.project(Rows::host(&x[..], m, k).unwrap(), RowsMut::host(&mut y[..], m, n).unwrap())
                .unwrap();
            let output = RowsMut::host(&mut y_bf16[..], m, n).unwrap();
            proj.project(Rows::host(&x_bf16[..], m, k).unwrap(), output).unwrap();
            let output = RowsMut::host(&mut y_f16[..], m, n).unwrap();
            proj.project(Rows::host(&x_f16[..], m, k).unwrap(), output).unwrap();
        }
        Device::Cuda(_) => {
            let stream = arm.stream();
            macro_rules! on_device {
                ($x:expr, $y:expr) => {
                    let rows = Buffer::from_host(&stream, &$x, &[m, k]).unwrap();
                    let mut out = Buffer::from_host(&stream, &$y, &[m, n]).unwrap();
                    let input = Rows::device(rows.view(), &stream, m, k).unwrap();
                    proj.project(input, RowsMut::device(out.view_mut(), m, n).unwrap()).unwrap();
                    out.copy_to_host(&stream, &mut $y).unwrap();
                };
            }
            on_device!(x, y);
            on_device!(x_bf16, y_bf16);
            on_device!(x_f16, y_f16);
        }
    }
    for ((y, y_bf16), y_f16) in y.iter().zip(y_bf16).zip(y_f16) {
        assert_eq!(*y, y_bf16.to_f32());
        assert_eq!(f16::from_f32(*y), y_f16);
    }
}

/// A code is the nearest one: no weight moves by more than half a step, and the receipt's error is that of the tensor.
fn weights_are_within_half_a_step(arm: &Arm) {
    let (n, k) = (50, 333);
    let mut random = Random::new(29);
    let w = random.normals(n * k, 0.3);
    let proj = arm.bind_staged(W8A16, &w, n, None);
    let dequantized = proj.dequantized(0..n).unwrap();
    let (mut error, mut norm) = (0f64, 0f64);
    for (row, back) in w.chunks(k).zip(dequantized.chunks(k)) {
        let step = row.iter().fold(0f32, |amax, w| amax.max(w.abs())) / 127.0;
        for (&w, &back) in row.iter().zip(back) {
            assert!((w - back).abs() <= step * 0.500001, "{w} became {back}, a step is {step}");
            error += (f64::from(w) - f64::from(back)).powi(2);
            norm += f64::from(w).powi(2);
        }
    }
    let relative = (error / norm).sqrt();
    assert!((proj.receipt().conversion_error - relative).abs() < 1e-9 * relative);
}

fn holds_the_cpu_arms_weights(arm: &Arm) {
    for (variant, (n, k)) in
        VARIANTS.iter().flat_map(|variant| shapes(variant).map(move |shape| (variant, shape)))
    {
        let w = Random::new(31).normals(n * k, 0.05);
        let cpu = Arm::cpu().bind(variant, &w, n, None).unwrap();
        let gpu = arm.bind(variant, &w, n, None).unwrap();
        assert_eq!(cpu.dequantized(0..n).unwrap(), gpu.dequantized(0..n).unwrap());
        let some = n / 3..n - n / 4;
        assert_eq!(cpu.dequantized(some.clone()).unwrap(), gpu.dequantized(some).unwrap());
    }
}

/// Numbers of the E2M1 grid, with a 6 in every block and one 2688 in every tensor and row: every scale is a power of two that
/// changes nothing, so the sums are those of the numbers themselves, exact in every order.
fn nvfp4_exact_sums_are_exact(arm: &Arm) {
    const GRID: [f32; 15] =
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let (n, k, m) = (40, 320, 16);
    let mut random = Random::new(43);
    let mut draw = |rows: usize| {
        let mut grid: Vec<f32> = (0..rows * k).map(|_| GRID[(random.integer(7) + 7.0) as usize]).collect();
        grid.chunks_mut(16).for_each(|block| block[5] = 6.0);
        grid
    };
    let (mut w, mut x) = (draw(n), draw(m));
    // In a block of its own: beside a 2688 nothing else is on the grid.
    w[..16].fill(0.0);
    w[0] = 2688.0;
    x.chunks_mut(k).for_each(|row| {
        row[16..32].fill(0.0);
        row[16] = 2688.0;
    });
    let y = project(arm.bind_staged(NVFP4, &w, n, None).as_mut(), &x, m);
    for (row, x) in x.chunks(k).enumerate() {
        for (feature, w) in w.chunks(k).enumerate() {
            let exact: f64 = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
            assert!((exact * 4.0).fract() == 0.0 && exact.abs() < 4e6);
            assert_eq!(y[row * n + feature], bf16::from_f32(exact as f32).to_f32(), "y[{row}, {feature}]");
        }
    }
}

/// Blocks of zeros, and blocks too small for a scale, beside large ones, in weights and rows: zero, never NaN.
fn nvfp4_zero_blocks(arm: &Arm) {
    let (n, k) = (32, 128);
    let mut random = Random::new(47);
    let mut w = random.normals(n * k, 1.0);
    w.chunks_mut(16).step_by(2).for_each(|block| block.fill(0.0));
    w.chunks_mut(16).step_by(5).for_each(|block| block.iter_mut().for_each(|w| *w *= 1e-12));
    w[..k].fill(0.0);
    let mut proj = arm.bind_staged(NVFP4, &w, n, None);
    let mut x = random.normals(16 * k, 1.0);
    x[..k].fill(0.0);
    x[k..2 * k].chunks_mut(16).step_by(3).for_each(|block| block.fill(0.0));
    x[2 * k..3 * k].chunks_mut(16).step_by(3).for_each(|block| block.iter_mut().for_each(|x| *x *= 1e-12));
    gates::against_reference(proj.as_mut(), None, &x, 16, 0..n).unwrap();
    let y = project(proj.as_mut(), &x, 16);
    assert!(y[..n].iter().all(|&y| y == 0.0), "a row of zeros");
    assert!(y.chunks(n).all(|row| row[0] == 0.0), "a feature of zeros");
}

/// With block scales alone a row's global is 1: what is small is lost, what is large saturates, and the receipt says so.
fn nvfp4_single_level(arm: &Arm) {
    let (n, k) = (48, 512);
    let mut random = Random::new(59);
    let w = random.normals(n * k, 0.05);
    let weights = DenseWeights::from_f32(n, k, &w).unwrap();
    let options = Options { scale_mode: ScaleMode::SingleLevel, ..Options::default() };
    let mut proj = arm.staged(arm.bind_with(NVFP4, weights, None, &options).unwrap());
    let formats = proj.receipt().formats;
    assert_eq!(formats.weights, "NVFP4 single-level");
    assert!(formats.activations.starts_with("NVFP4 single-level per row"), "{}", formats.activations);

    let expected = Nvfp4Tensor::quantize_weight(&w, n, k, ScaleMode::SingleLevel).unwrap();
    let mut values = vec![0f32; n * k];
    expected.dequantize(&mut values).unwrap();
    assert_eq!(proj.dequantized(0..n).unwrap(), values);

    let x = random.normals(16 * k, 1.0);
    gates::against_reference(proj.as_mut(), None, &x, 16, 0..n).unwrap();
    gates::row_invariance(proj.as_mut(), &x).unwrap();
    // Weights as small as those of large models have subnormal scales, or none.
    let small = random.normals(n * k, 0.002);
    let error = |scale_mode| {
        let weights = DenseWeights::from_f32(n, k, &small).unwrap();
        let options = Options { scale_mode, ..Options::default() };
        arm.bind_with(NVFP4, weights, None, &options).unwrap().receipt().conversion_error
    };
    let (two_level, single_level) = (error(ScaleMode::TwoLevel), error(ScaleMode::SingleLevel));
    assert!(
        two_level < 0.12 && single_level > 2.0 * two_level,
        "{two_level} two-level, {single_level} single-level"
    );

    // Every block's largest magnitude is at most 6 * 2^-10, so its scale rounds to zero.
    let small = vec![0.0058; k];
    assert!(project(proj.as_mut(), &small, 1).iter().all(|&y| y == 0.0), "small rows are lost");
    // Saturated at 2688 each, so no larger than that row.
    let (large, limit) = (vec![1e6; k], vec![2688.0; k]);
    assert_eq!(project(proj.as_mut(), &large, 1), project(proj.as_mut(), &limit, 1), "large rows saturate");
}

/// With the identity for weights a result is one element of the quantised row, so its bits show what the quantiser made of it:
/// random rows, ties between codes, subnormal scales, blocks of zeros, of tiny and of huge numbers.
fn quantises_as_the_cpu_arm_does(arm: &Arm, variant: &str) {
    let k = 256;
    let identity: Vec<f32> = (0..k * k).map(|i| if i / k == i % k { 1.0 } else { 0.0 }).collect();
    let mut cpu = Arm::cpu().bind_staged(variant, &identity, k, None);
    let mut gpu = arm.bind_staged(variant, &identity, k, None);
    let mut random = Random::new(53);
    // A balance may multiply the largest of these by 4, and weights by 4 again.
    for deviation in [1.0, 1e-38, 1e-20, 1e-3, 1e20, 3e36] {
        for round in 0..20 {
            let mut x = random.normals(16 * k, deviation);
            // Every eighth of a row's largest sixth: codes and the midpoints between them.
            for (i, x) in x[..k].iter_mut().enumerate() {
                *x = deviation * (((i * 7 + round) % 97) as f32 / 16.0);
            }
            x[k..2 * k].chunks_mut(16).enumerate().for_each(|(block, x)| {
                let smaller = 2f32.powi(-(block as i32));
                x.iter_mut().for_each(|x| *x *= smaller * smaller);
            });
            x[2 * k..3 * k].chunks_mut(16).step_by(2).for_each(|block| block.fill(0.0));
            let (cpu, gpu) = (project(cpu.as_mut(), &x, 16), project(gpu.as_mut(), &x, 16));
            let differs = cpu.iter().zip(&gpu).position(|(cpu, gpu)| cpu.to_bits() != gpu.to_bits());
            assert_eq!(differs, None, "deviation {deviation}: the first element that differs");
            assert!(cpu.iter().all(|y| y.is_finite()), "deviation {deviation}");
        }
    }
}

/// N times K is 2^32: every offset that is counted in 32 bits goes wrong. The weights are NVFP4 in which a pattern of a prime
/// length repeats, so that every row differs from its neighbours and from those 2^31 elements away.
fn more_elements_than_32_bits_count(arm: &Arm) {
    const NEEDED: u64 = 12 << 30;
    let (n, k) = (262_144, 16_384);
    let free = arm.stream().device().memory().unwrap().free;
    if free < NEEDED {
        eprintln!(
            "more_elements_than_32_bits_count is skipped: {free} bytes of device memory are free, it needs {NEEDED}"
        );
        return;
    }
    let repeated = |period: usize, len: usize, byte: fn(usize) -> u8| {
        let pattern: Vec<u8> = (0..period).map(byte).collect();
        let mut bytes = pattern.repeat(len.div_ceil(period));
        bytes.truncate(len);
        bytes
    };
    let codes = repeated(65_521, n * k / 2, |i| (i * 167 % 251) as u8);
    let scales = repeated(65_519, n * k / 16, |i| (40 + i * 31 % 37) as u8);
    let view = Nvfp4View::new(&codes, &scales, n, k, 2f32.powi(-6)).unwrap();
    let x = Random::new(71).normals(k, 1.0);
    for variant in [NVFP4, W8A16] {
        let weights = DenseWeights::from_nvfp4(view);
        let mut proj = arm.staged(arm.bind_with(variant, weights, None, &Options::default()).unwrap());
        for first in [0, n / 2 - 32, n / 2 + 12_345, n - 64] {
            gates::against_reference(proj.as_mut(), None, &x, 1, first..first + 64).unwrap();
            let mut row = vec![0f32; k];
            view.decode_row(first, &mut row);
            let held = proj.dequantized(first..first + 1).unwrap();
            let error = relative_l2(row, held);
            assert!(if variant == NVFP4 { error == 0.0 } else { error < 2e-2 }, "row {first}: {error}");
        }
    }
}
