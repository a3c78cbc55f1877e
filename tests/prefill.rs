//! Calls of many rows, of the variants that serve them: in the form for prompts where the device has it, else in passes.

use device::{Buffer, Graph, Workspace};
use half::bf16;
use libtest_mimic::Trial;
use linear_proj::{BoundProj, DenseWeights, Options, Rows, RowsMut, ScaleMode, Staged, gates};

use crate::arm::{Arm, on_each_arm, on_gpu, uneven_amax};
use crate::random::Random;

/// Not in the order in which they are linked: what the first prepares must be its own kernels, not those of the first that is
/// linked.
const VARIANTS: &[&str] = &["nvfp4_balance", "nvfp4_dynamic"];

pub fn trials() -> Vec<Trial> {
    on_each_arm("prefill::any_number_of_rows", any_number_of_rows)
        .into_iter()
        .chain([
            on_gpu("prefill::close_to_the_reference", close_to_the_reference),
            on_gpu("prefill::a_bad_row_spoils_itself_alone", a_bad_row_spoils_itself_alone),
            on_gpu("prefill::a_workspace_serves_its_stream", a_workspace_serves_its_stream),
            on_gpu("prefill::row_types_agree", row_types_agree),
        ])
        .collect()
}

/// Without a workspace.
fn any_number_of_rows(arm: &Arm) {
    let (n, k) = (40, 80);
    for variant in VARIANTS {
        let mut random = Random::new(3);
        let mut proj = arm.bind_staged(variant, &random.normals(n * k, 0.05), n, None);
        for m in [17, 32, 33, 64, 150] {
            gates::against_reference(proj.as_mut(), None, &random.normals(m * k, 1.0), m, 0..n).unwrap();
        }
    }
}

/// Bound with a workspace of so many rows, and staged on its stream, all rows at a time.
fn with_workspace(
    arm: &Arm,
    variant: &str,
    w: &[f32],
    n: usize,
    rows: usize,
    mode: ScaleMode,
) -> Staged<Box<dyn BoundProj>> {
    let stream = arm.stream();
    let workspace = Workspace::new(&stream, rows);
    let weights = DenseWeights::from_f32(n, w.len() / n, w).unwrap();
    let amax = uneven_amax(weights.k());
    let options =
        Options { amax: Some(&amax), workspace: Some(&workspace), scale_mode: mode, ..Options::default() };
    Staged::with_rows(arm.bind_with(variant, weights, None, &options).unwrap(), &stream, 2 * rows).unwrap()
}

/// Rows below and beyond what the workspace takes at a time, N and K that are not whole tiles, both scale modes; twice, with the
/// same bits.
fn close_to_the_reference(arm: &Arm) {
    const ROWS: usize = 320;
    let modes = [ScaleMode::TwoLevel, ScaleMode::SingleLevel];
    for (variant, mode) in VARIANTS.iter().flat_map(|variant| modes.map(|mode| (variant, mode))) {
        for (n, k) in [(7, 16), (130, 208), (300, 1040), (1030, 64)] {
            let mut random = Random::new((n * k) as u64);
            let w = random.normals(n * k, 0.05);
            let mut proj = with_workspace(arm, variant, &w, n, ROWS, mode);
            for m in [33, 64, 65, 257, ROWS, ROWS + 20, 2 * ROWS] {
                let x = random.normals(m * k, 1.0);
                gates::against_reference(&mut proj, None, &x, m, 0..n).unwrap();
                let first = project(&mut proj, &x, m);
                assert_eq!(first, project(&mut proj, &x, m), "{variant}, N = {n}, K = {k}, M = {m}");
            }
        }
    }
}

fn a_bad_row_spoils_itself_alone(arm: &Arm) {
    let (n, k, m) = (100, 208, 100);
    for variant in VARIANTS {
        let mut random = Random::new(17);
        let w = random.normals(n * k, 0.05);
        let mut proj = with_workspace(arm, variant, &w, n, 128, ScaleMode::TwoLevel);
        let mut x = random.normals(m * k, 1.0);
        let clean = project(&mut proj, &x, m);
        (x[k + 3], x[70 * k + 5]) = (f32::NAN, f32::INFINITY);
        x[50 * k..51 * k].fill(0.0);
        for (row, (got, clean)) in project(&mut proj, &x, m).chunks(n).zip(clean.chunks(n)).enumerate() {
            match row {
                1 | 70 => assert!(got.iter().all(|y| f32::from_bits(*y).is_nan()), "{variant}, row {row}"),
                50 => assert!(got.iter().all(|&y| f32::from_bits(y) == 0.0), "{variant}, row {row}"),
                _ => assert_eq!(got, clean, "{variant}, row {row}"),
            }
        }
    }
}

/// Rows of BF16 in device memory give the BF16 of the same rows in F32; as many of them as the bench takes, and in a graph.
fn row_types_agree(arm: &Arm) {
    const ROWS: usize = 2048;
    let (n, k) = (300, 1040);
    for variant in VARIANTS {
        let mut random = Random::new(23);
        let w = random.normals(n * k, 0.05);
        let stream = arm.stream();
        let workspace = Workspace::new(&stream, ROWS);
        let amax = uneven_amax(k);
        let options = Options { amax: Some(&amax), workspace: Some(&workspace), ..Options::default() };
        let weights = DenseWeights::from_f32(n, k, &w).unwrap();
        let mut proj = arm.bind_with(variant, weights, None, &options).unwrap();
        for m in [40, ROWS] {
            let x: Vec<bf16> = random.normals(m * k, 1.0).into_iter().map(bf16::from_f32).collect();
            let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
            let x = Buffer::from_host(&stream, &x, &[m, k]).unwrap();
            let wide = Buffer::from_host(&stream, &wide, &[m, k]).unwrap();
            let mut y = Buffer::<bf16>::zeros(&stream, &[m, n]).unwrap();
            let mut wide_y = Buffer::<f32>::zeros(&stream, &[m, n]).unwrap();
            let rows = Rows::device(wide.view(), &stream, m, k).unwrap();
            proj.project(rows, RowsMut::device(wide_y.view_mut(), m, n).unwrap()).unwrap();
            let expected: Vec<bf16> =
                wide_y.to_host(&stream).unwrap().into_iter().map(bf16::from_f32).collect();
            let mut call = |y: &mut Buffer<bf16>| {
                let rows = Rows::device(x.view(), &stream, m, k)?;
                proj.project(rows, RowsMut::device(y.view_mut(), m, n)?)
            };
            call(&mut y).unwrap();
            assert_eq!(y.to_host(&stream).unwrap(), expected, "{variant}, M = {m}");
            let mut graph = Graph::capture(&stream, |_| call(&mut y)).unwrap();
            y.fill_bytes(&stream, 0x7f).unwrap();
            graph.launch().unwrap();
            assert_eq!(y.to_host(&stream).unwrap(), expected, "{variant}, M = {m}, in a graph");
        }
    }
}

/// A call on another stream than the workspace's does without it.
fn a_workspace_serves_its_stream(arm: &Arm) {
    let (stream, other) = (arm.stream(), arm.stream());
    let workspace = Workspace::new(&stream, 64);
    assert!(workspace.lend(&stream, |_| ()).is_none(), "nothing was reserved");
    workspace.reserve(1 << 20).unwrap();
    assert_eq!(workspace.lend(&stream, |scratch| scratch.len()), Some(1 << 20));
    workspace.reserve(1 << 10).unwrap();
    assert_eq!(workspace.lend(&stream, |scratch| scratch.len()), Some(1 << 20));
    assert!(workspace.lend(&other, |_| ()).is_none());
}

fn project(proj: &mut dyn BoundProj, x: &[f32], rows: usize) -> Vec<u32> {
    crate::gates::project(proj, x, rows).iter().map(|y| y.to_bits()).collect()
}
