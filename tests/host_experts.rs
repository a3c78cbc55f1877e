//! The host's sparse experts on the GPU: each kernel against FP64, bit for bit whatever the other rows are, every element written,
//! captured as eager, and a chain of layers that starts each kernel early.

use std::cell::RefCell;
use std::collections::BTreeSet;

use device::{Buffer, Element, Graph, Stream};
use half::bf16;
use libtest_mimic::Trial;
use qwen3_5::cuda::{ExpertsDown, ExpertsGateUp, ExpertsShape, Route, prepare};
use structure_core::Refusal;

use crate::arm::{Arm, on_gpu};
use crate::host_rows::{Bits, normals, outputs, same_bits};
use crate::random::Random;

pub fn trials() -> Vec<Trial> {
    vec![
        on_gpu("host_experts::route", route),
        on_gpu("host_experts::route_at_the_edges", route_at_the_edges),
        on_gpu("host_experts::gate_up", gate_up),
        on_gpu("host_experts::down", down),
        on_gpu("host_experts::layers_start_early", layers_start_early),
        on_gpu("host_experts::refusals", refusals),
    ]
}

/// What an FP32 operation rounds by, relative to its result.
const F32: f64 = 1.0 / (1u64 << 24) as f64;
/// What rounding to BF16 moves a number by, relative to it.
const BF16: f64 = 1.0 / 256.0;
const ROWS: usize = 16;
const PROMPT: usize = 300;

/// tiny-moe's, the 35B's with fewer experts, and widths that are not whole in the kernels' pieces of 256 and 512 elements.
const SHAPES: [ExpertsShape; 5] = [
    ExpertsShape { experts: 16, top_k: 4, hidden: 256, intermediate: 32 },
    ExpertsShape { experts: 10, top_k: 8, hidden: 2048, intermediate: 512 },
    ExpertsShape { experts: 3, top_k: 2, hidden: 8, intermediate: 8 },
    ExpertsShape { experts: 5, top_k: 3, hidden: 1000, intermediate: 1304 },
    ExpertsShape { experts: 20, top_k: 16, hidden: 264, intermediate: 520 },
];

fn stream(arm: &Arm) -> Stream {
    let stream = arm.stream();
    prepare(&stream).unwrap();
    stream
}

fn buffer<T: Element>(stream: &Stream, elements: &[T]) -> Buffer<T> {
    Buffer::from_host(stream, elements, &[elements.len()]).unwrap()
}

fn routed(stream: &Stream, logits: &[f32], experts: usize, top_k: usize) -> (Vec<i32>, Vec<f32>) {
    let (rows, logits) = (logits.len() / experts, buffer(stream, logits));
    let other_ids = RefCell::new(Buffer::<i32>::zeros(stream, &[rows * top_k]).unwrap());
    let other_weights = RefCell::new(Buffer::<f32>::zeros(stream, &[rows * top_k]).unwrap());
    let mut ids = outputs::<i32>(stream, &[rows * top_k], None, &|mut ids| {
        let (ids, mut weights) = (ids.remove(0), other_weights.borrow_mut());
        Route { logits: logits.view(), ids, weights: weights.view_mut(), rows, experts, top_k }.queue(stream)
    });
    let mut weights = outputs::<f32>(stream, &[rows * top_k], None, &|mut weights| {
        let (mut ids, weights) = (other_ids.borrow_mut(), weights.remove(0));
        Route { logits: logits.view(), ids: ids.view_mut(), weights, rows, experts, top_k }.queue(stream)
    });
    (ids.remove(0), weights.remove(0))
}

fn route(arm: &Arm) {
    let (stream, mut random) = (stream(arm), Random::new(21));
    for (experts, top_k) in [(256, 8), (16, 4), (512, 16), (1, 1), (5, 5), (40, 3), (257, 8), (64, 16)] {
        // Sixty-fourths: many are equal, and those that are not have probabilities that FP32 tells apart.
        let logits: Vec<f32> =
            (0..PROMPT * experts).map(|_| (random.normal() * 128.0).round() / 64.0).collect();
        let (ids, weights) = routed(&stream, &logits[..ROWS * experts], experts, top_k);
        for (row, logits) in logits.chunks_exact(experts).take(ROWS).enumerate() {
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
            let exp = |expert: &usize| f64::from(logits[*expert] - logits[order[0]]).exp();
            let sum: f64 = order[..top_k].iter().map(exp).sum();
            for (slot, expert) in order[..top_k].iter().enumerate() {
                let (id, weight) = (ids[row * top_k + slot], f64::from(weights[row * top_k + slot]));
                assert_eq!(id, *expert as i32, "{experts} experts, row {row}, slot {slot}");
                // The exponentials by two units in the last place each, both sums by an addition a term, two divisions.
                let expected = exp(expert) / sum;
                let bound = (8 + top_k + 8) as f64 * F32 * expected;
                assert!((weight - expected).abs() <= bound, "{weight}, expected {expected}");
            }
        }
        let prompt = routed(&stream, &logits, experts, top_k);
        let chosen = ROWS * top_k;
        assert!(prompt.0[..chosen] == ids && same_bits(&prompt.1[..chosen], &weights), "in a prompt");
        for row in [0, 7, 15] {
            let own = row * experts..(row + 1) * experts;
            let alone = routed(&stream, &logits[own.clone()], experts, top_k);
            let mut among = logits[..ROWS * experts].to_vec();
            let others = among.iter_mut().enumerate().filter(|(index, _)| !own.contains(index));
            others.for_each(|(index, x)| *x = [f32::NAN, f32::INFINITY, 3e38][index % 3]);
            let among = routed(&stream, &among, experts, top_k);
            let chosen = row * top_k..(row + 1) * top_k;
            assert!(alone.0 == ids[chosen.clone()] && same_bits(&alone.1, &weights[chosen.clone()]), "alone");
            assert!(among.0[chosen.clone()] == ids[chosen.clone()], "among others");
            assert!(same_bits(&among.1[chosen.clone()], &weights[chosen]), "among others");
        }
    }
}

fn route_at_the_edges(arm: &Arm) {
    let stream = stream(arm);
    let (ids, weights) = routed(&stream, &[-300.0, 0.0, -200.0, -250.0], 4, 4);
    assert_eq!(
        (ids, weights),
        (vec![1, 0, 2, 3], vec![1.0, 0.0, 0.0, 0.0]),
        "probabilities of zero are equal"
    );
    let (ids, weights) = routed(&stream, &[3e38, -3e38, 3e38, 1.0], 4, 3);
    assert_eq!((ids, weights), (vec![0, 2, 1], vec![0.5, 0.5, 0.0]), "no overflow");
    for experts in [4, 40, 300] {
        let mut one_nan = vec![1.0; experts];
        one_nan[3] = f32::NAN;
        let mut one_infinite = vec![1.0; experts];
        one_infinite[2] = f32::INFINITY;
        for logits in [one_nan, one_infinite, vec![f32::NAN; experts], vec![f32::NEG_INFINITY; experts]] {
            let (ids, weights) = routed(&stream, &logits, experts, 3);
            assert_eq!(ids, [0, 1, 2]);
            assert!(weights.iter().all(|weight| weight.is_nan()), "{weights:?}");
        }
    }
}

/// A bank with NaN behind it, where an expert that is not there would lie.
fn bank(stream: &Stream, weights: &[bf16]) -> Buffer<bf16> {
    buffer(stream, &[weights, &vec![bf16::NAN; weights.len()]].concat())
}

/// Distinct experts for each row, in no order.
fn choose(random: &mut Random, shape: ExpertsShape, rows: usize) -> Vec<i32> {
    let mut ids = Vec::new();
    for _ in 0..rows {
        let mut left: Vec<i32> = (0..shape.experts as i32).collect();
        for _ in 0..shape.top_k {
            ids.push(left.swap_remove((random.uniform() * left.len() as f32) as usize));
        }
    }
    ids
}

/// One call's inputs. `x` is the hidden rows of gate and up, or the activations of down.
#[derive(Clone)]
struct Inputs {
    x: Vec<bf16>,
    ids: Vec<i32>,
    weights: Vec<f32>,
    shared: Vec<bf16>,
    shared_gate: Vec<f32>,
}

impl Inputs {
    fn rows(&self, first: usize, rows: usize) -> Self {
        fn rows_of<T: Copy>(all: &[T], first: usize, rows: usize, of: usize) -> Vec<T> {
            let width = all.len() / of;
            all[first * width..(first + rows) * width].to_vec()
        }
        let of = self.shared_gate.len();
        Inputs {
            x: rows_of(&self.x, first, rows, of),
            ids: rows_of(&self.ids, first, rows, of),
            weights: rows_of(&self.weights, first, rows, of),
            shared: rows_of(&self.shared, first, rows, of),
            shared_gate: rows_of(&self.shared_gate, first, rows, of),
        }
    }

    /// Row `row` alone is as it was; the others are hostile.
    fn among_hostile(&self, row: usize) -> Self {
        fn spoil<T: Copy>(all: &mut [T], row: usize, of: usize, hostile: impl Fn(usize) -> T) {
            let width = all.len() / of;
            let others = all.iter_mut().enumerate().filter(|(index, _)| index / width != row);
            others.for_each(|(index, x)| *x = hostile(index));
        }
        let (mut spoilt, of) = (self.clone(), self.shared_gate.len());
        let float = |index: usize| [f32::NAN, f32::INFINITY, 3e38, f32::NEG_INFINITY][index % 4];
        spoil(&mut spoilt.x, row, of, |index| bf16::from_f32(float(index)));
        spoil(&mut spoilt.ids, row, of, |index| [0, -1, i32::MAX, i32::MIN, 1][index % 5]);
        spoil(&mut spoilt.weights, row, of, float);
        spoil(&mut spoilt.shared, row, of, |index| bf16::from_f32(float(index)));
        spoil(&mut spoilt.shared_gate, row, of, float);
        spoilt
    }
}

fn inputs(random: &mut Random, shape: ExpertsShape, rows: usize, width: usize) -> Inputs {
    Inputs {
        x: normals(random, rows * width, 1.0),
        ids: choose(random, shape, rows),
        weights: (0..rows * shape.top_k).map(|_| random.uniform()).collect(),
        shared: normals(random, rows * shape.hidden, 1.0),
        shared_gate: random.normals(rows, 2.0),
    }
}

/// A row's bits: alone, in calls of other sizes, among hostile rows.
fn check_rows(run: &dyn Fn(&Inputs) -> Vec<bf16>, all: &Inputs, expected: &[bf16]) {
    let width = expected.len() / ROWS;
    for rows in [1, 2, 7, 9] {
        assert!(same_bits(&run(&all.rows(0, rows)), &expected[..rows * width]), "{rows} rows");
    }
    assert!(same_bits(&run(all)[..ROWS * width], expected), "a prompt");
    for row in [0, 5, 15] {
        let own = row * width..(row + 1) * width;
        assert!(same_bits(&run(&all.rows(row, 1)), &expected[own.clone()]), "row {row} alone");
        let among = run(&all.rows(0, ROWS).among_hostile(row));
        assert!(same_bits(&among[own.clone()], &expected[own]), "row {row} among hostile ones");
    }
}

/// How many rows a prompt has: fewer where the experts are large.
fn prompt_rows(shape: ExpertsShape) -> usize {
    if shape.hidden * shape.intermediate > 1 << 18 { 40 } else { PROMPT }
}

/// A dot product in FP64, and the sum of its terms' magnitudes.
fn dot(w: &[bf16], x: &[bf16]) -> (f64, f64) {
    let terms = w.iter().zip(x).map(|(w, x)| w.to_f64() * x.to_f64());
    terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
}

fn gate_up(arm: &Arm) {
    let (stream, mut random) = (stream(arm), Random::new(23));
    for shape in SHAPES {
        let ExpertsShape { experts, top_k, hidden, intermediate } = shape;
        let weights = normals(&mut random, experts * 2 * intermediate * hidden, 1.0 / (hidden as f32).sqrt());
        let bank = bank(&stream, &weights);
        let mut all = inputs(&mut random, shape, prompt_rows(shape), hidden);
        // Slots that name no expert of the bank.
        for (slot, id) in [(0, -1), (top_k + 1, experts as i32), (2 * top_k, i32::MAX), (3 * top_k, i32::MIN)]
        {
            all.ids[slot] = id;
        }
        let run = |inputs: &Inputs| {
            let (rows, x, ids) =
                (inputs.shared_gate.len(), buffer(&stream, &inputs.x), buffer(&stream, &inputs.ids));
            let mut act = outputs(&stream, &[rows * top_k * intermediate], None, &|mut act| {
                let bank = bank.view().first(weights.len())?;
                let (x, ids, act) = (x.view(), ids.view(), act.remove(0));
                ExpertsGateUp { x, ids, bank, act, rows, shape }.queue(&stream)
            });
            act.remove(0)
        };
        let got = run(&all.rows(0, ROWS));
        check_rows(&run, &all, &got);

        // A lane adds an element of every 256 eight times over, then the lanes are added.
        let depth = (8 * hidden.div_ceil(256) + 5) as f64 * F32;
        for (slot, got) in got.chunks_exact(intermediate).take(6 * top_k).enumerate() {
            let x = &all.x[slot / top_k * hidden..][..hidden];
            let Some(expert) = usize::try_from(all.ids[slot]).ok().filter(|id| *id < experts) else {
                assert!(got.iter().all(|act| *act == bf16::ZERO), "no such expert");
                continue;
            };
            for (feature, got) in got.iter().enumerate() {
                let row =
                    |of: usize| &weights[((expert * 2 + of) * intermediate + feature) * hidden..][..hidden];
                let ((gate, gate_magnitude), (up, up_magnitude)) = (dot(row(0), x), dot(row(1), x));
                let silu = gate / (1.0 + (-gate).exp());
                // SiLU's slope is at most 1.1; it and the product round a few times more, then once to BF16.
                let expected = silu * up;
                let bound = (BF16 + (10.0 + 2.4 * gate.abs()) * F32) * expected.abs()
                    + depth * (1.1 * gate_magnitude * up.abs() + up_magnitude * silu.abs());
                assert!(
                    (got.to_f64() - expected).abs() <= 1.01 * bound,
                    "{got}, expected {expected} within {bound}"
                );
            }
        }
    }
}

fn down(arm: &Arm) {
    let (stream, mut random) = (stream(arm), Random::new(25));
    for shape in SHAPES {
        let ExpertsShape { experts, top_k, hidden, intermediate } = shape;
        let weights =
            normals(&mut random, experts * hidden * intermediate, 1.0 / (intermediate as f32).sqrt());
        let bank = bank(&stream, &weights);
        let mut all = inputs(&mut random, shape, prompt_rows(shape), top_k * intermediate);
        // Slots that name no expert add nothing, whatever their weights and activations.
        for (slot, id) in [(0, -1), (top_k + 1, experts as i32), (2 * top_k, i32::MAX), (3 * top_k, i32::MIN)]
        {
            (all.ids[slot], all.weights[slot]) = (id, f32::NAN);
            all.x[slot * intermediate..(slot + 1) * intermediate].fill(bf16::NAN);
        }
        let run = |inputs: &Inputs| {
            let rows = inputs.shared_gate.len();
            let (act, ids, expert_weights) =
                (buffer(&stream, &inputs.x), buffer(&stream, &inputs.ids), buffer(&stream, &inputs.weights));
            let (shared, shared_gate) =
                (buffer(&stream, &inputs.shared), buffer(&stream, &inputs.shared_gate));
            let mut out = outputs(&stream, &[rows * hidden], None, &|mut out| {
                let down = ExpertsDown {
                    act: act.view(),
                    ids: ids.view(),
                    weights: expert_weights.view(),
                    bank: bank.view().first(weights.len())?,
                    shared: shared.view(),
                    shared_gate: shared_gate.view(),
                    out: out.remove(0),
                    rows,
                    shape,
                };
                down.queue(&stream)
            });
            out.remove(0)
        };
        let got = run(&all.rows(0, ROWS));
        check_rows(&run, &all, &got);

        // The order of a sum is that of the experts, not that of the slots.
        let mut turned = all.rows(0, ROWS);
        for row in 0..ROWS {
            turned.ids[row * top_k..(row + 1) * top_k].reverse();
            turned.weights[row * top_k..(row + 1) * top_k].reverse();
            let acts: Vec<_> = turned.x[row * top_k * intermediate..(row + 1) * top_k * intermediate]
                .chunks_exact(intermediate)
                .rev()
                .flatten()
                .copied()
                .collect();
            turned.x[row * top_k * intermediate..(row + 1) * top_k * intermediate].copy_from_slice(&acts);
        }
        assert!(same_bits(&run(&turned), &got), "slots in another order");

        // A lane adds 16 products of each piece of 512 elements of a slot, then all pieces, then the lanes; the weight rounds once.
        let depth = (16 + top_k * intermediate.div_ceil(512) + 5 + 1) as f64 * F32;
        for (row, got) in got.chunks_exact(hidden).take(6).enumerate() {
            let shared_gate = f64::from(all.shared_gate[row]);
            let gate = 1.0 / (1.0 + (-shared_gate).exp());
            for (feature, got) in got.iter().enumerate() {
                let (mut expected, mut magnitude) = (0.0, 0.0);
                for slot in row * top_k..(row + 1) * top_k {
                    let Some(expert) = usize::try_from(all.ids[slot]).ok().filter(|id| *id < experts) else {
                        continue;
                    };
                    let w = &weights[(expert * hidden + feature) * intermediate..][..intermediate];
                    let (sum, terms) = dot(w, &all.x[slot * intermediate..(slot + 1) * intermediate]);
                    expected += f64::from(all.weights[slot]) * sum;
                    magnitude += f64::from(all.weights[slot]) * terms;
                }
                let shared = gate * all.shared[row * hidden + feature].to_f64();
                let expected = expected + shared;
                let sigmoid = (10.0 + 2.4 * shared_gate.abs()) * F32;
                let bound = (BF16 + F32) * expected.abs() + depth * magnitude + sigmoid * shared.abs();
                assert!(
                    (got.to_f64() - expected).abs() <= 1.01 * bound,
                    "{got}, expected {expected} within {bound}"
                );
            }
        }
    }
}

/// Layers that share their scratch, each kernel started before the one before it is over: the bits of one call at a time.
fn layers_start_early(arm: &Arm) {
    const LAYERS: usize = 24;
    let (stream, mut random) = (stream(arm), Random::new(27));
    for (shape, rows) in SHAPES.into_iter().flat_map(|shape| [1, 7, 16].map(|rows| (shape, rows))) {
        let ExpertsShape { experts, top_k, hidden, intermediate } = shape;
        let gates = buffer(
            &stream,
            &normals(&mut random, experts * 2 * intermediate * hidden, 0.3 / (hidden as f32).sqrt()),
        );
        let downs = buffer(
            &stream,
            &normals(&mut random, experts * hidden * intermediate, 0.3 / (intermediate as f32).sqrt()),
        );
        let logits: Vec<_> =
            (0..LAYERS).map(|_| buffer(&stream, &random.normals(rows * experts, 1.0))).collect();
        let shared_gate = buffer(&stream, &random.normals(rows, 1.0));
        let (first, shared) =
            (normals(&mut random, rows * hidden, 1.0), normals(&mut random, rows * hidden, 1.0));
        let shared = buffer(&stream, &shared);
        let mut ids = Buffer::<i32>::zeros(&stream, &[rows * top_k]).unwrap();
        let mut weights = Buffer::<f32>::zeros(&stream, &[rows * top_k]).unwrap();
        let mut act = Buffer::<bf16>::zeros(&stream, &[rows * top_k * intermediate]).unwrap();
        let mut x: Vec<_> =
            (0..=LAYERS).map(|_| Buffer::<bf16>::zeros(&stream, &[rows * hidden]).unwrap()).collect();
        x[0].copy_from_host(&stream, &first).unwrap();
        let mut layer = |x: &mut [Buffer<bf16>], index: usize, each: &dyn Fn()| -> Result<(), Refusal> {
            let (from, to) = x[index..index + 2].split_at_mut(1);
            let (logits, x, out) = (logits[index].view(), from[0].view(), to[0].view_mut());
            Route { logits, ids: ids.view_mut(), weights: weights.view_mut(), rows, experts, top_k }
                .queue(&stream)?;
            each();
            ExpertsGateUp { x, ids: ids.view(), bank: gates.view(), act: act.view_mut(), rows, shape }
                .queue(&stream)?;
            each();
            let down = ExpertsDown {
                act: act.view(),
                ids: ids.view(),
                weights: weights.view(),
                bank: downs.view(),
                shared: shared.view(),
                shared_gate: shared_gate.view(),
                out,
                rows,
                shape,
            };
            down.queue(&stream)?;
            each();
            Ok(())
        };
        stream.set_overlap(false);
        (0..LAYERS).for_each(|index| layer(&mut x, index, &|| stream.synchronize().unwrap()).unwrap());
        let alone: Vec<_> = x.iter().map(|x| x.to_host(&stream).unwrap()).collect();
        let distinct: BTreeSet<u32> = alone[LAYERS].iter().map(|x| x.bits()).collect();
        assert!(
            distinct.len() > 4 && alone[LAYERS].iter().all(|x| x.is_finite()),
            "the rows still say something"
        );
        stream.set_overlap(true);
        let mut graph =
            Graph::capture(&stream, |_| (0..LAYERS).try_for_each(|index| layer(&mut x, index, &|| ())))
                .unwrap();
        for replay in 0..5 {
            x[1..].iter_mut().for_each(|x| x.fill_bytes(&stream, 0x7f).unwrap());
            graph.launch().unwrap();
            for (index, (x, alone)) in x.iter().zip(&alone).enumerate() {
                let got = x.to_host(&stream).unwrap();
                assert!(same_bits(&got, alone), "{shape:?}, {rows} rows, layer {index}, replay {replay}");
            }
        }
    }
}

fn refusals(arm: &Arm) {
    let stream = stream(arm);
    let logits = buffer(&stream, &[0.0f32; 600]);
    let mut ids = Buffer::<i32>::zeros(&stream, &[32]).unwrap();
    let mut weights = Buffer::<f32>::zeros(&stream, &[32]).unwrap();
    let mut route = |rows, experts, top_k| {
        let (ids, weights) = (ids.view_mut(), weights.view_mut());
        Route { logits: logits.view(), ids, weights, rows, experts, top_k }.queue(&stream)
    };
    assert!(route(2, 300, 16).is_ok() && route(0, 300, 16).is_ok());
    assert!(matches!(route(3, 300, 4), Err(Refusal::ShapeMismatch { .. })));
    assert!(matches!(route(1, 513, 4), Err(Refusal::DimOutside { dim: "experts", .. })));
    for (experts, top_k) in [(300, 17), (300, 0), (4, 5)] {
        assert!(matches!(route(1, experts, top_k), Err(Refusal::DimOutside { dim: "top_k", .. })));
    }
    let x = buffer(&stream, &[bf16::ONE; 64]);
    let mut act = Buffer::<bf16>::zeros(&stream, &[64]).unwrap();
    let mut gate_up = |hidden| {
        let shape = ExpertsShape { experts: 1, top_k: 1, hidden, intermediate: 8 };
        let (x, ids, act) = (x.view(), x.view(), act.view_mut());
        ExpertsGateUp { x, ids, bank: x, act, rows: 1, shape }.queue(&stream)
    };
    assert!(matches!(gate_up(12), Err(Refusal::DimOutside { dim: "hidden", .. })));
    assert!(matches!(gate_up(8), Err(Refusal::DTypeOutside { .. })));
}
