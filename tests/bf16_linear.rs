//! The host's BF16 projection on the GPU: against FP64 with bounds from the length of a sum, by bits where bits are promised.

use device::{Buffer, Element, Graph, Stream};
use half::{bf16, f16};
use libtest_mimic::Trial;
use linear_proj::{DenseWeights, LinearProj, Rows, RowsMut, Seat, gates, reference};
use number_formats::nvfp4::Nvfp4View;
use qwen3_5::cuda::Bf16Linear;
use structure_core::Refusal;

use crate::arm::{Arm, on_gpu};
use crate::random::Random;

/// N and K: the smallest, odd ones, those at and beside tile edges, and one of each way in which K is cut and row groups are shared.
const SHAPES: &[(usize, usize)] = &[
    (1, 1),
    (3, 7),
    (15, 31),
    (16, 32),
    (17, 33),
    (48, 5120),
    (1040, 4192),
    (12_000, 64),
    (64, 1000),
    (257, 320),
    (1044, 2080),
    (5120, 96),
    (8208, 72),
    (12_800, 136),
    (20_000, 24),
    (40_000, 64),
    (65_600, 32),
];

/// N and K of the form for prompts, in which K is a multiple of 8; of the last it is not.
const PROMPT_SHAPES: &[(usize, usize)] =
    &[(7, 8), (48, 1024), (130, 208), (300, 1040), (1030, 72), (100, 33)];

pub fn trials() -> Vec<Trial> {
    vec![
        on_gpu("bf16_linear::close_to_the_reference", close_to_the_reference),
        on_gpu("bf16_linear::exact_sums_are_exact", exact_sums_are_exact),
        on_gpu("bf16_linear::f32_rows_keep_their_sums", f32_rows_keep_their_sums),
        on_gpu("bf16_linear::row_invariant", row_invariant),
        on_gpu("bf16_linear::many_rows", many_rows),
        on_gpu("bf16_linear::a_bad_row_spoils_itself_alone", a_bad_row_spoils_itself_alone),
        on_gpu("bf16_linear::replay_is_eager", replay_is_eager),
        on_gpu("bf16_linear::a_chain_is_its_calls", a_chain_is_its_calls),
        on_gpu("bf16_linear::other_formats_become_bf16", other_formats_become_bf16),
        on_gpu("bf16_linear::a_duplicate_is_its_own", a_duplicate_is_its_own),
        on_gpu("bf16_linear::more_weights_than_32_bits_count", more_weights_than_32_bits_count),
        on_gpu("bf16_linear::calls_that_do_not_fit_are_refused", calls_that_do_not_fit_are_refused),
    ]
}

/// Bytes of the poison that outputs hold before a call: a NaN in every type, with bits that no result has.
const POISON: u8 = 0xff;
/// Elements behind an output that no call may touch.
const TAIL: usize = 512;

/// Queues a call of device rows.
fn queue<T: Element>(
    linear: &mut dyn LinearProj,
    stream: &Stream,
    x: &Buffer<T>,
    y: &mut Buffer<T>,
    m: usize,
) -> Result<(), Refusal> {
    let (n, k) = (linear.n(), linear.k());
    let rows = Rows::device(x.view().first(m * k)?, stream, m, k)?;
    linear.project(rows, RowsMut::device(y.view_mut().first(m * n)?, m, n)?)
}

/// Types of rows, by their bits.
trait Row: Element {
    fn is_poison(self) -> bool;
}

impl Row for f32 {
    fn is_poison(self) -> bool {
        self.to_bits() == u32::MAX
    }
}

impl Row for f16 {
    fn is_poison(self) -> bool {
        self.to_bits() == u16::MAX
    }
}

impl Row for bf16 {
    fn is_poison(self) -> bool {
        self.to_bits() == u16::MAX
    }
}

/// Projects rows into a poisoned output with a tail: every element is written, and none of the tail.
fn project<T: Row>(linear: &mut dyn LinearProj, stream: &Stream, x: &[T]) -> Vec<T> {
    let (n, k) = (linear.n(), linear.k());
    let m = x.len() / k;
    let x = Buffer::from_host(stream, x, &[m, k]).unwrap();
    let mut y = Buffer::<T>::zeros(stream, &[m * n + TAIL]).unwrap();
    y.fill_bytes(stream, POISON).unwrap();
    queue(linear, stream, &x, &mut y, m).unwrap();
    let mut y = y.to_host(stream).unwrap();
    assert!(y.split_off(m * n).into_iter().all(Row::is_poison), "N = {n}, K = {k}, M = {m}: the tail");
    let unwritten = y.iter().position(|y| y.is_poison());
    assert_eq!(unwritten, None, "N = {n}, K = {k}, M = {m}: the first element that is not written");
    y
}

fn bf16s(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| bf16::from_f32(value)).collect()
}

fn f32s(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Weights that BF16 holds, and the form on the device.
fn linear(stream: &Stream, random: &mut Random, n: usize, k: usize) -> (Vec<bf16>, Bf16Linear) {
    let w = bf16s(&random.normals(n * k, 0.05));
    let linear = Bf16Linear::new(stream, "w", DenseWeights::from_bf16(n, k, &w).unwrap()).unwrap();
    (w, linear)
}

/// How far a sum in FP32 may be off: the bound of `gates::error_bound` before it rounds to BF16.
fn sum_bound(k: usize, magnitude: f64) -> f64 {
    (k + k.div_ceil(16) + 32) as f64 * 2f64.powi(-23) * magnitude + 2f64.powi(-149)
}

/// Compares results of rows `x`, which BF16 holds, with FP64: within the bound of the sum for F32 results, and of one rounding
/// more for BF16.
fn check_against_fp64(w: &[bf16], x: &[f32], n: usize, y: &[f32], rounded: bool) {
    let k = w.len() / n;
    let weights = DenseWeights::from_bf16(n, k, w).unwrap();
    let exact = reference::project(&weights, None, x).unwrap();
    let magnitude = reference::magnitude(&weights, None, x).unwrap();
    for (index, (&y, (exact, magnitude))) in y.iter().zip(exact.into_iter().zip(magnitude)).enumerate() {
        let bound = if rounded { gates::error_bound(k, magnitude, exact) } else { sum_bound(k, magnitude) };
        let error = (f64::from(y) - exact).abs();
        let (m, feature) = (index / n, index % n);
        assert!(error <= bound, "N = {n}, K = {k}: y[{m}, {feature}] is {y}, not {exact}, bound {bound:e}");
    }
}

fn close_to_the_reference(arm: &Arm) {
    let stream = arm.stream();
    for &(n, k) in SHAPES {
        let mut random = Random::new((n * 65536 + k) as u64);
        let (w, mut linear) = linear(&stream, &mut random, n, k);
        for m in [1, 7, 8, 9, 16] {
            let x = bf16s(&random.normals(m * k, 1.0));
            let wide = f32s(&x);
            check_against_fp64(&w, &wide, n, &project(&mut linear, &stream, &wide), false);
            check_against_fp64(&w, &wide, n, &f32s(&project(&mut linear, &stream, &x)), true);
        }
    }
}

/// Small integers, whose sums stay below 2^24: every order of adding gives the same bits.
fn exact_sums_are_exact(arm: &Arm) {
    let stream = arm.stream();
    for (n, k) in [(40, 640), (1100, 200), (5200, 96), (300, 33), (17_000, 72)] {
        let mut random = Random::new((n + k) as u64);
        let w: Vec<f32> = (0..n * k).map(|_| random.integer(127)).collect();
        let mut linear = Bf16Linear::new(&stream, "w", DenseWeights::from_f32(n, k, &w).unwrap()).unwrap();
        for m in [1, 16, 17, 150] {
            let x: Vec<f32> = (0..m * k).map(|_| random.integer(128)).collect();
            let exact = reference::project(&DenseWeights::from_f32(n, k, &w).unwrap(), None, &x).unwrap();
            let exact: Vec<f32> = exact.into_iter().map(|sum| sum as f32).collect();
            assert_eq!(project(&mut linear, &stream, &bf16s(&x)), bf16s(&exact), "N = {n}, K = {k}, M = {m}");
            assert_eq!(project(&mut linear, &stream, &x), exact, "N = {n}, K = {k}, M = {m}");
        }
    }
}

/// F32 rows are rounded to BF16 on their way in and not on their way out; F16 and BF16 results are the same sums, rounded once.
fn f32_rows_keep_their_sums(arm: &Arm) {
    let stream = arm.stream();
    for (n, k) in [(100, 272), (1040, 128), (16_400, 40)] {
        let mut random = Random::new(23);
        let (_, mut linear) = linear(&stream, &mut random, n, k);
        for m in [1, 5, 16, 20] {
            let x = random.normals(m * k, 1.0);
            let rounded = bf16s(&x);
            let sums = project(&mut linear, &stream, &x);
            assert!(sums.iter().any(|&sum| bf16::from_f32(sum).to_f32() != sum), "more digits than BF16 has");
            assert_eq!(bits(&sums), bits(&project(&mut linear, &stream, &f32s(&rounded))));
            let x_f16: Vec<f16> = rounded.iter().map(|x| f16::from_f32(x.to_f32())).collect();
            let exact_in_f16 = x_f16.iter().zip(&rounded).all(|(a, b)| a.to_f32() == b.to_f32());
            if exact_in_f16 {
                let expected: Vec<f16> = sums.iter().map(|&sum| f16::from_f32(sum)).collect();
                assert_eq!(project(&mut linear, &stream, &x_f16), expected);
            }
            if m <= 16 {
                assert_eq!(project(&mut linear, &stream, &rounded), bf16s(&sums), "N = {n}, M = {m}");
            }
        }
    }
}

/// Row m has the same bits whatever M is, and whatever the other rows hold.
fn row_invariant(arm: &Arm) {
    const ROWS: usize = 16;
    let stream = arm.stream();
    for &(n, k) in SHAPES {
        let mut random = Random::new((n + k) as u64);
        let (_, mut linear) = linear(&stream, &mut random, n, k);
        let x = random.normals(ROWS * k, 1.0);
        let mut call = |x: &[f32]| -> (Vec<u32>, Vec<u16>) {
            let narrow = project(&mut linear, &stream, &bf16s(x));
            (bits(&project(&mut linear, &stream, x)), narrow.iter().map(|y| y.to_bits()).collect())
        };
        let alone: Vec<_> = x.chunks(k).map(&mut call).collect();
        let mut same = |x: &[f32], rows: &[usize], beside: &str| {
            let (wide, narrow) = call(x);
            for &row in rows {
                let part = row * n..(row + 1) * n;
                assert_eq!(wide[part.clone()], alone[row].0, "N = {n}, K = {k}, row {row} {beside}");
                assert_eq!(narrow[part], alone[row].1, "N = {n}, K = {k}, row {row} {beside}");
            }
        };
        for m in 2..=ROWS {
            same(&x[..m * k], &(0..m).collect::<Vec<_>>(), &format!("among {m}"));
        }
        for neighbour in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, bf16::MAX.to_f32(), 0.0] {
            for row in [0, 7, 8, 15] {
                let mut hostile = vec![neighbour; ROWS * k];
                hostile[row * k..(row + 1) * k].copy_from_slice(&x[row * k..(row + 1) * k]);
                same(&hostile, &[row], &format!("beside rows of {neighbour}"));
            }
        }
    }
}

/// More rows than the decode band has: close to FP64, twice with the same bits.
fn many_rows(arm: &Arm) {
    let stream = arm.stream();
    for &(n, k) in PROMPT_SHAPES {
        let mut random = Random::new((n * k) as u64);
        let (w, mut linear) = linear(&stream, &mut random, n, k);
        for m in [17, 33, 64, 65, 100, 257, 2048] {
            let x = bf16s(&random.normals(m * k, 1.0));
            let y = project(&mut linear, &stream, &x);
            check_against_fp64(&w, &f32s(&x), n, &f32s(&y), true);
            assert_eq!(y, project(&mut linear, &stream, &x), "N = {n}, K = {k}, M = {m}");
        }
    }
    // Wide enough for several turns of every block, and K long enough for several rounds of its stages.
    let (m, n, k) = (1100, 4000, 800);
    let mut random = Random::new(3);
    let (w, mut linear) = linear(&stream, &mut random, n, k);
    let x = bf16s(&random.normals(m * k, 1.0));
    check_against_fp64(&w, &f32s(&x), n, &f32s(&project(&mut linear, &stream, &x)), true);
}

/// A NaN or an infinity makes its own row NaN or infinite, and changes no other.
fn a_bad_row_spoils_itself_alone(arm: &Arm) {
    let stream = arm.stream();
    let (n, k) = (100, 208);
    let mut random = Random::new(17);
    let (_, mut linear) = linear(&stream, &mut random, n, k);
    for m in [16, 100, 300] {
        let mut x = bf16s(&random.normals(m * k, 1.0));
        let clean = project(&mut linear, &stream, &x);
        let (first, second) = (m / 3, m - 1);
        (x[first * k + 3], x[second * k + 5]) = (bf16::NAN, bf16::INFINITY);
        let spoilt = project(&mut linear, &stream, &x);
        for (row, (y, clean)) in spoilt.chunks(n).zip(clean.chunks(n)).enumerate() {
            if row == first || row == second {
                assert!(y.iter().all(|y| !y.is_finite()), "M = {m}, row {row}");
            } else {
                assert_eq!(y, clean, "M = {m}, row {row}");
            }
        }
    }
}

fn replay_is_eager(arm: &Arm) {
    let stream = arm.stream();
    for (n, k) in [(17, 33), (48, 512), (1280, 256), (8208, 64), (20_000, 40), (6, 72)] {
        let mut random = Random::new(41);
        let (_, mut linear) = linear(&stream, &mut random, n, k);
        for m in [1, 8, 9, 16, 17, 100] {
            let x = bf16s(&random.normals(m * k, 1.0));
            let expected = project(&mut linear, &stream, &x);
            let mut x_buffer = Buffer::from_host(&stream, &x, &[m, k]).unwrap();
            let mut y = Buffer::<bf16>::zeros(&stream, &[m * n]).unwrap();
            let mut graph =
                Graph::capture(&stream, |stream| queue(&mut linear, stream, &x_buffer, &mut y, m)).unwrap();
            for _ in 0..3 {
                y.fill_bytes(&stream, POISON).unwrap();
                graph.launch().unwrap();
                assert_eq!(y.to_host(&stream).unwrap(), expected, "N = {n}, K = {k}, M = {m}");
            }
            // A replay reads what is there now, not what was there at capture.
            let other = bf16s(&random.normals(m * k, 1.0));
            x_buffer.copy_from_host(&stream, &other).unwrap();
            graph.launch().unwrap();
            let replayed = y.to_host(&stream).unwrap();
            assert_eq!(replayed, project(&mut linear, &stream, &other), "N = {n}, K = {k}, M = {m}");
        }
    }
}

/// Each call reads what the one before wrote: kernels that start early must wait for it. The same bits as one call at a time without
/// overlap.
fn a_chain_is_its_calls(arm: &Arm) {
    const LINKS: usize = 24;
    let stream = arm.stream();
    for (width, m) in [256, 1280, 8224].into_iter().flat_map(|width| [1, 8, 16, 40].map(|m| (width, m))) {
        let mut random = Random::new(width as u64);
        let deviation = 1.0 / (width as f32).sqrt();
        let mut links: Vec<_> = (0..2)
            .map(|_| {
                let w = random.normals(width * width, deviation);
                let weights = DenseWeights::from_f32(width, width, &w).unwrap();
                Bf16Linear::new(&stream, "w", weights).unwrap()
            })
            .collect();
        let mut rows: Vec<_> =
            (0..=LINKS).map(|_| Buffer::<bf16>::zeros(&stream, &[m, width]).unwrap()).collect();
        rows[0].copy_from_host(&stream, &bf16s(&random.normals(m * width, 1.0))).unwrap();
        let mut link = |rows: &mut [Buffer<bf16>], index: usize| {
            let (from, to) = rows[index..index + 2].split_at_mut(1);
            queue(&mut links[index % 2], &stream, &from[0], &mut to[0], m)
        };
        stream.set_overlap(false);
        for index in 0..LINKS {
            link(&mut rows, index).unwrap();
            stream.synchronize().unwrap();
        }
        let alone: Vec<_> = rows.iter().map(|rows| rows.to_host(&stream).unwrap()).collect();
        stream.set_overlap(true);
        let mut graph =
            Graph::capture(&stream, |_| (0..LINKS).try_for_each(|index| link(&mut rows, index))).unwrap();
        for replay in 0..5 {
            rows[1..].iter_mut().for_each(|rows| rows.fill_bytes(&stream, POISON).unwrap());
            graph.launch().unwrap();
            for (index, (rows, alone)) in rows.iter().zip(&alone).enumerate() {
                let got = rows.to_host(&stream).unwrap();
                assert_eq!(&got, alone, "width {width}, M = {m}, link {index}, replay {replay}");
            }
        }
    }
}

/// Weights of F32, F16 and NVFP4 are rounded to BF16 once: the same bits as of weights that were BF16 before.
fn other_formats_become_bf16(arm: &Arm) {
    let stream = arm.stream();
    let (n, k, m) = (70, 96, 5);
    let mut random = Random::new(29);
    let x = random.normals(m * k, 1.0);
    let wide = random.normals(n * k, 0.05);
    let half: Vec<u8> = wide.iter().flat_map(|&w| f16::from_f32(w).to_le_bytes()).collect();
    let codes: Vec<u8> = (0..n * k / 2).map(|i| (i * 167 % 251) as u8).collect();
    let scales: Vec<u8> = (0..n * k / 16).map(|i| (40 + i * 31 % 37) as u8).collect();
    let view = Nvfp4View::new(&codes, &scales, n, k, 0.013).unwrap();
    for weights in [
        DenseWeights::from_f32(n, k, &wide).unwrap(),
        DenseWeights::new(n, k, structure_core::DType::F16, &half).unwrap(),
        DenseWeights::from_nvfp4(view),
    ] {
        let rounded = bf16s(&weights.to_f32());
        let expected = DenseWeights::from_bf16(n, k, &rounded).unwrap();
        let mut expected = Bf16Linear::new(&stream, "w", expected).unwrap();
        let mut got = Bf16Linear::new(&stream, "w", weights).unwrap();
        assert_eq!(bits(&project(&mut got, &stream, &x)), bits(&project(&mut expected, &stream, &x)));
    }
}

fn a_duplicate_is_its_own(arm: &Arm) {
    let stream = arm.stream();
    let (n, k) = (1000, 136);
    let mut random = Random::new(31);
    let (_, mut linear) = linear(&stream, &mut random, n, k);
    let x = random.normals(3 * k, 1.0);
    let expected = project(&mut linear, &stream, &x);
    let copy = linear.duplicate(&stream).unwrap();
    assert_eq!(copy.bytes(), linear.bytes());
    assert_eq!(copy.bytes(), 63 * 5 * 1024);
    drop(linear);
    let x = Buffer::from_host(&stream, &x, &[3, k]).unwrap();
    let mut y = Buffer::<f32>::zeros(&stream, &[3, n]).unwrap();
    let mut seat = Seat::new("w", Box::new(copy));
    let rows = Rows::device(x.view(), &stream, 3, k).unwrap();
    seat.project(rows, RowsMut::device(y.view_mut(), 3, n).unwrap()).unwrap();
    assert_eq!(y.to_host(&stream).unwrap(), expected, "a seat holds it as its host form");
}

/// N times K is 2^31 and more: every offset that is counted in 32 bits goes wrong. A pattern of a prime length repeats, so that every
/// row differs from its neighbours and from those 2^31 elements away.
fn more_weights_than_32_bits_count(arm: &Arm) {
    const NEEDED: u64 = 6 << 30;
    let (n, k) = (131_088usize, 16_400usize);
    let stream = arm.stream();
    let free = stream.device().memory().unwrap().free;
    if free < NEEDED {
        eprintln!(
            "more_weights_than_32_bits_count is skipped: {free} bytes of device memory are free, it needs {NEEDED}"
        );
        return;
    }
    let mut random = Random::new(71);
    let mut w = bf16s(&random.normals(65_521, 0.05)).repeat((n * k).div_ceil(65_521));
    w.truncate(n * k);
    let mut linear = Bf16Linear::new(&stream, "w", DenseWeights::from_bf16(n, k, &w).unwrap()).unwrap();
    for m in [1, 16, 20] {
        let x = bf16s(&random.normals(m * k, 1.0));
        let y = f32s(&project(&mut linear, &stream, &x));
        for first in [0, n / 2 - 32, n - 64] {
            let features = first..first + 64;
            let part: Vec<f32> = y.chunks(n).flat_map(|row| row[features.clone()].to_vec()).collect();
            check_against_fp64(&w[first * k..(first + 64) * k], &f32s(&x), 64, &part, true);
        }
    }
}

fn calls_that_do_not_fit_are_refused(arm: &Arm) {
    let stream = arm.stream();
    let (n, k) = (20, 40);
    let mut random = Random::new(1);
    let (_, mut linear) = linear(&stream, &mut random, n, k);
    let (x, mut y) = (vec![0f32; k], vec![0f32; n]);
    let refused = linear.project(Rows::host(&x[..], 1, k).unwrap(), RowsMut::host(&mut y[..], 1, n).unwrap());
    assert!(matches!(refused, Err(Refusal::WrongDevice { .. })), "{refused:?}");

    let x = Buffer::<bf16>::zeros(&stream, &[1, k]).unwrap();
    let mut y = Buffer::<f32>::zeros(&stream, &[1, n]).unwrap();
    let rows = Rows::device(x.view(), &stream, 1, k).unwrap();
    let refused = linear.project(rows, RowsMut::device(y.view_mut(), 1, n).unwrap());
    assert!(matches!(refused, Err(Refusal::DTypeOutside { .. })), "{refused:?}");

    let rows = Rows::device(x.view().first(k - 1).unwrap(), &stream, 1, k - 1).unwrap();
    let refused = linear.project(rows, RowsMut::device(y.view_mut(), 1, n).unwrap());
    assert!(matches!(refused, Err(Refusal::ShapeMismatch { .. })), "{refused:?}");

    let nothing = Bf16Linear::new(&stream, "w", DenseWeights::from_bf16(0, 5, &[]).unwrap());
    assert_eq!(nothing.unwrap_err().to_string(), "w: N is 0; it must be at least 1");

    // No rows are no work.
    let none = Buffer::<f32>::zeros(&stream, &[0]).unwrap();
    let mut empty = Buffer::<f32>::zeros(&stream, &[0]).unwrap();
    let rows = Rows::device(none.view(), &stream, 0, k).unwrap();
    linear.project(rows, RowsMut::device(empty.view_mut(), 0, n).unwrap()).unwrap();
}
