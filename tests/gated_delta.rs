//! The mixer of gated-delta layers on a GPU: against FP64 from the convolution to the gated norm, and its bits however rows are cut
//! into calls.

use device::{Buffer, Graph, Stream};
use half::bf16;
use libtest_mimic::Trial;
use qwen3_5::cuda::{DeltaLayer, DeltaParameters, DeltaRows, DeltaShape, DeltaState};

use crate::arm::{Arm, on_gpu};
use crate::random::Random;

pub fn trials() -> Vec<Trial> {
    vec![
        on_gpu("gated_delta::close_to_the_reference", close_to_the_reference),
        on_gpu("gated_delta::thousands_of_rows_stay_close", thousands_of_rows_stay_close),
        on_gpu("gated_delta::bits_do_not_depend_on_the_cuts", bits_do_not_depend_on_the_cuts),
        on_gpu("gated_delta::kept_states_are_those_of_steps", kept_states_are_those_of_steps),
        on_gpu("gated_delta::rows_do_not_reach_back", rows_do_not_reach_back),
        on_gpu("gated_delta::replays_are_steps", replays_are_steps),
        on_gpu("gated_delta::what_does_not_fit_is_refused", what_does_not_fit_is_refused),
    ]
}

const fn shape(key_heads: usize, heads: usize, key_dim: usize, value_dim: usize, taps: usize) -> DeltaShape {
    DeltaShape { key_heads, heads, key_dim, value_dim, taps }
}

/// The hosts' own, then heads that fill no tile, a head each and eight to one, few and many taps.
const SHAPES: [DeltaShape; 9] = [
    shape(2, 6, 128, 128, 4),
    shape(16, 32, 128, 128, 4),
    shape(2, 4, 64, 96, 3),
    shape(1, 1, 256, 256, 2),
    shape(2, 2, 112, 80, 8),
    shape(1, 8, 64, 64, 4),
    shape(3, 6, 64, 64, 4),
    shape(2, 8, 128, 128, 3),
    shape(1, 4, 16, 16, 4),
];

/// Rows of a layer: what lies on the host, and a layer that has its parameters.
struct Case {
    shape: DeltaShape,
    filters: Vec<f32>,
    rate: Vec<f32>,
    dt_bias: Vec<f32>,
    scale: Vec<f32>,
    mixed: Vec<bf16>,
    z: Vec<bf16>,
    b: Vec<bf16>,
    a: Vec<bf16>,
    rows: usize,
}

const EPS: f32 = 1e-6;

/// What a layer left: its rows, and slot 0 of its state.
#[derive(PartialEq)]
struct Left {
    out: Vec<bf16>,
    conv: Vec<bf16>,
    delta: Vec<f32>,
}

/// Rows of a case in device memory, with a layer and a state.
struct OnDevice {
    stream: Stream,
    layer: DeltaLayer,
    state: DeltaState,
    mixed: Buffer<bf16>,
    z: Buffer<bf16>,
    b: Buffer<bf16>,
    a: Buffer<bf16>,
    out: Buffer<bf16>,
}

/// Elements after the result that no call may touch.
const TAIL: usize = 4096;
const POISON: u8 = 0x7f;

impl Case {
    /// Memory that lasts from a few rows to thousands, depending on the head; its `a` may be moved by a constant.
    fn new(shape: DeltaShape, rows: usize, a: f32) -> Self {
        let mut random = Random::new((rows + shape.channels()) as u64);
        let bf16s = |xs: Vec<f32>| xs.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        Case {
            shape,
            filters: random.normals(shape.channels() * shape.taps, 0.5),
            rate: random.normals(shape.heads, 1.0).into_iter().map(|x| -x.exp()).collect(),
            dt_bias: random.normals(shape.heads, 2.0).into_iter().map(|x| x + a).collect(),
            scale: random.normals(shape.value_dim, 0.1).into_iter().map(|x| x + 1.0).collect(),
            mixed: bf16s(random.normals(rows * shape.channels(), 1.0)),
            z: bf16s(random.normals(rows * shape.values(), 1.0)),
            b: bf16s(random.normals(rows * shape.heads, 1.0)),
            a: bf16s(random.normals(rows * shape.heads, 1.0)),
            rows,
        }
    }

    fn upload(&self, arm: &Arm, slots: usize) -> OnDevice {
        let stream = arm.stream();
        qwen3_5::cuda::prepare(&stream).unwrap();
        let parameters = DeltaParameters {
            filters: &self.filters,
            rate: &self.rate,
            dt_bias: &self.dt_bias,
            scale: &self.scale,
            eps: EPS,
        };
        let upload = |rows: &[bf16]| Buffer::from_host(&stream, rows, &[rows.len()]).unwrap();
        let mut out = Buffer::zeros(&stream, &[self.z.len() + TAIL]).unwrap();
        out.fill_bytes(&stream, POISON).unwrap();
        OnDevice {
            layer: DeltaLayer::new(&stream, &self.shape, &parameters).unwrap(),
            state: DeltaState::new(&stream, &self.shape, slots).unwrap(),
            mixed: upload(&self.mixed),
            z: upload(&self.z),
            b: upload(&self.b),
            a: upload(&self.a),
            out,
            stream,
        }
    }

    /// All rows through a fresh state, in calls of as many as `cuts` says in turn.
    fn run(&self, arm: &Arm, cuts: &[usize]) -> Left {
        let mut device = self.upload(arm, 1);
        let (mut first, mut cuts) = (0, cuts.iter().cycle());
        while first < self.rows {
            let rows = (self.rows - first).min(*cuts.next().unwrap());
            device.queue(first, rows, None, false);
            first += rows;
        }
        device.left()
    }
}

impl OnDevice {
    fn queue(&mut self, first: usize, rows: usize, from: Option<&Buffer<i32>>, keep: bool) {
        let shape = self.layer.shape();
        // Heads' gates of a row may be less than 16 bytes, which views keep to.
        let (b, a) = (self.gates(&self.b, first, rows), self.gates(&self.a, first, rows));
        let range = |width: usize| first * width..(first + rows) * width;
        let call = DeltaRows {
            mixed: self.mixed.view().range(range(shape.channels())).unwrap(),
            z: self.z.view().range(range(shape.values())).unwrap(),
            b: b.view(),
            a: a.view(),
            out: self.out.view_mut().range(range(shape.values())).unwrap(),
            rows,
            from: from.map(Buffer::view),
            keep,
        };
        self.layer.queue(&mut self.state, &call, &self.stream).unwrap();
        self.stream.synchronize().unwrap();
    }

    fn gates(&self, all: &Buffer<bf16>, first: usize, rows: usize) -> Buffer<bf16> {
        let heads = self.layer.shape().heads;
        let mut gates = vec![bf16::ZERO; rows * heads];
        all.copy_range_to_host(&self.stream, first * heads, &mut gates).unwrap();
        Buffer::from_host(&self.stream, &gates, &[rows, heads]).unwrap()
    }

    /// Every element of the result is written, none beside it.
    fn left(&self) -> Left {
        let mut out = self.out.to_host(&self.stream).unwrap();
        let poison = bf16::from_bits(u16::from_ne_bytes([POISON; 2]));
        let tail = out.split_off(out.len() - TAIL);
        assert!(out.iter().all(|&y| y != poison), "an element is not written");
        assert!(tail.iter().all(|&y| y == poison), "the tail is touched");
        let (conv, delta) = self.slot(0);
        Left { out, conv, delta }
    }

    fn slot(&self, slot: usize) -> (Vec<bf16>, Vec<f32>) {
        let (conv, delta) = (self.state.conv(), self.state.delta());
        let mut rows = vec![bf16::ZERO; conv.len() / self.state.slots()];
        let mut matrices = vec![0.0; delta.len() / self.state.slots()];
        conv.copy_range_to_host(&self.stream, slot * rows.len(), &mut rows).unwrap();
        delta.copy_range_to_host(&self.stream, slot * matrices.len(), &mut matrices).unwrap();
        (rows, matrices)
    }
}

/// A number in FP64 and how far an FP32 form of it may be off.
#[derive(Clone, Copy, Default)]
struct Near {
    value: f64,
    error: f64,
}

/// Half a unit in the last place of FP32, relative.
const ROUND: f64 = 1.0 / (1u64 << 24) as f64;
/// Roundings of a function of one number: its steps, and the two units that exp, log1p, rsqrt and a reciprocal may be off.
const FUNCTION: f64 = 8.0 * ROUND;

fn norm(xs: impl IntoIterator<Item = f64>) -> f64 {
    xs.into_iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The relative error of a sigmoid whose exponential is taken as a power of two: that of its exponent grows with it.
fn sigmoid_error(x: f64) -> f64 {
    FUNCTION + 2.0 * ROUND * x.abs()
}

/// The layer as it is written, head by head in FP64, and beside every number a bound of what FP32 may add.
///
/// A sum of n products loses at most (n + 2) roundings of the sum of magnitudes. SiLU stretches an error by at most 1.1. Scaling to
/// unit length keeps a relative error of the vector within twice that. A step multiplies the error of a column of the state by the
/// decay, because I - beta k k^T has no norm above 1, and adds: the state's share of the decay's error and two roundings; the
/// errors of the correction, from the recalled sum, the value, and beta; the key's error times the correction.
struct Reference<'a> {
    case: &'a Case,
    /// `[rows, channels]`, after the convolution.
    mixed: Vec<Near>,
    /// `[heads, value_dim, key_dim]`.
    state: Vec<f64>,
    /// `[heads, value_dim]`: of the columns' lengths.
    errors: Vec<f64>,
    /// `[rows, heads, value_dim]`, before BF16.
    out: Vec<Near>,
}

impl<'a> Reference<'a> {
    fn new(case: &'a Case) -> Self {
        let DeltaShape { heads, key_dim, value_dim, taps, .. } = case.shape;
        let channels = case.shape.channels();
        let filtered = |i: usize| {
            let (t, channel) = (i / channels, i % channels);
            let products = (0..taps).filter(|tap| t + tap + 1 >= taps).map(|tap| {
                let x = case.mixed[(t + tap + 1 - taps) * channels + channel];
                f64::from(case.filters[channel * taps + tap]) * x.to_f64()
            });
            let (sum, magnitude) = products.fold((0.0, 0.0), |(sum, m), x| (sum + x, m + x.abs()));
            let value = silu(sum);
            Near {
                value,
                error: 1.1 * (taps + 2) as f64 * ROUND * magnitude + sigmoid_error(sum) * value.abs(),
            }
        };
        let mut reference = Reference {
            case,
            mixed: (0..case.rows * channels).map(filtered).collect(),
            state: vec![0.0; heads * value_dim * key_dim],
            errors: vec![0.0; heads * value_dim],
            out: Vec::new(),
        };
        for (t, head) in (0..case.rows).flat_map(|t| (0..heads).map(move |head| (t, head))) {
            reference.step(t, head);
        }
        reference
    }

    /// A query or key of unit length, and the length of its error.
    fn unit(&self, t: usize, first: usize) -> (Vec<f64>, f64) {
        let dim = self.case.shape.key_dim;
        let at = t * self.case.shape.channels() + first;
        let mixed = &self.mixed[at..at + dim];
        let length = (mixed.iter().map(|x| x.value * x.value).sum::<f64>() + 1e-6).sqrt();
        let error = 2.0 * norm(mixed.iter().map(|x| x.error)) / length + dim as f64 * ROUND + FUNCTION;
        (mixed.iter().map(|x| x.value / length).collect(), error)
    }

    fn step(&mut self, t: usize, head: usize) {
        let DeltaShape { key_heads, heads, key_dim, value_dim, .. } = self.case.shape;
        let key_head = head / (heads / key_heads);
        let (query, query_error) = self.unit(t, key_head * key_dim);
        let (key, key_error) = self.unit(t, (key_heads + key_head) * key_dim);
        let gate = t * heads + head;
        let b = self.case.b[gate].to_f64();
        let beta = 1.0 / (1.0 + (-b).exp());
        let (rate, x) = (f64::from(self.case.rate[head]), f64::from(self.case.dt_bias[head]));
        let x = self.case.a[gate].to_f64() + x;
        let softplus = x.exp().ln_1p();
        let decay = (rate * softplus).exp();
        let decay_error = -rate * (ROUND * x.abs() + FUNCTION * softplus) + FUNCTION;
        let (scale, sum) = ((key_dim as f64).powf(-0.5), (key_dim + 2) as f64 * ROUND);

        let mut row = vec![Near::default(); value_dim];
        for (v, o) in row.iter_mut().enumerate() {
            let column = head * value_dim + v;
            let state = &mut self.state[column * key_dim..(column + 1) * key_dim];
            let value = self.mixed[t * self.case.shape.channels() + 2 * key_heads * key_dim + column];
            state.iter_mut().for_each(|s| *s *= decay);
            let length = norm(state.iter().copied());
            let recalled: f64 = state.iter().zip(&key).map(|(s, k)| s * k).sum();
            let correction = beta * (value.value - recalled);
            let read = (sum + decay_error) * length;
            let off = beta * (read + key_error * length + value.error) + sigmoid_error(b) * correction.abs();
            state.iter_mut().zip(&key).for_each(|(s, k)| *s += k * correction);
            let before = decay * self.errors[column];
            self.errors[column] = before
                + (decay_error + 2.0 * ROUND) * length
                + off
                + (key_error + 2.0 * ROUND) * correction.abs();
            o.value = scale * state.iter().zip(&query).map(|(s, q)| s * q).sum::<f64>();
            // The kernel takes it as decay q^T S + (q.k) correction, of the state before.
            o.error = scale * (before + read + query_error * length + off);
            o.error += scale * (sum + query_error + key_error + FUNCTION) * correction.abs()
                + FUNCTION * o.value.abs();
        }
        self.finish(t, head, &row);
    }

    /// The gated norm: an error of the row moves its length by at most as much.
    fn finish(&mut self, t: usize, head: usize, row: &[Near]) {
        let dim = row.len();
        let length =
            (row.iter().map(|o| o.value * o.value).sum::<f64>() + dim as f64 * f64::from(EPS)).sqrt();
        let relative = norm(row.iter().map(|o| o.error)) / length + dim as f64 * ROUND + FUNCTION;
        for (v, o) in row.iter().enumerate() {
            let z = self.case.z[(t * self.case.shape.heads + head) * dim + v].to_f64();
            let factor = f64::from(self.case.scale[v]) * silu(z) * (dim as f64).sqrt() / length;
            let error = factor.abs() * (o.error + (relative + FUNCTION + sigmoid_error(z)) * o.value.abs());
            self.out.push(Near { value: factor * o.value, error });
        }
    }

    /// The worst share of their bounds that a layer's rows and state take.
    fn worst(&self, left: &Left) -> f64 {
        let mut worst = 0f64;
        let mut take = |error: f64, bound: f64| {
            worst = worst.max(if error.is_nan() { f64::INFINITY } else { error / bound })
        };
        for (got, expected) in left.out.iter().zip(&self.out) {
            // The one rounding to BF16 adds 2^-8 of the result.
            let bound = expected.error + (expected.value.abs() + expected.error) / 256.0;
            take((got.to_f64() - expected.value).abs(), bound + f64::MIN_POSITIVE);
        }
        let key_dim = self.case.shape.key_dim;
        for (column, error) in self.errors.iter().enumerate() {
            let range = column * key_dim..(column + 1) * key_dim;
            let pairs = left.delta[range.clone()].iter().zip(&self.state[range]);
            take(norm(pairs.map(|(got, expected)| f64::from(*got) - expected)), *error);
        }
        worst
    }
}

/// The state of the convolution is the last rows before it, whatever they are.
fn assert_last_rows(case: &Case, left: &Left) {
    let kept = (case.shape.taps - 1) * case.shape.channels();
    assert_eq!(left.conv, &case.mixed[case.mixed.len() - kept..]);
}

fn close_to_the_reference(arm: &Arm) {
    for shape in SHAPES {
        let case = Case::new(shape, 40, -3.0);
        let left = case.run(arm, &[7, 1, 16]);
        let worst = Reference::new(&case).worst(&left);
        assert!(worst <= 1.0, "{shape:?}: {worst} of the bound");
        assert_last_rows(&case, &left);
    }
}

/// A prompt and its steps; heads that forget at once and heads that forget nothing, whose state stays bounded.
fn thousands_of_rows_stay_close(arm: &Arm) {
    for (a, cuts) in [(-12.0, vec![4096]), (-3.0, vec![1000, 1, 64]), (8.0, vec![333])] {
        let case = Case::new(shape(1, 2, 64, 48, 4), 4096, a);
        let left = case.run(arm, &cuts);
        let reference = Reference::new(&case);
        let worst = reference.worst(&left);
        assert!(worst <= 1.0, "a moved by {a}: {worst} of the bound");
        assert_last_rows(&case, &left);
    }
}

fn bits_do_not_depend_on_the_cuts(arm: &Arm) {
    for shape in SHAPES {
        let case = Case::new(shape, 33, -3.0);
        let steps = case.run(arm, &[1]);
        for rows in (2..=16).chain([17, 33]) {
            assert!(case.run(arm, &[rows]) == steps, "{shape:?}: calls of {rows} rows");
        }
        assert!(case.run(arm, &[1]) == steps, "{shape:?}: steps again");
    }
    let case = Case::new(SHAPES[0], 1000, -3.0);
    let whole = case.run(arm, &[1000]);
    for cuts in [&[64, 1, 100, 17][..], &[999, 1], &[16]] {
        assert!(case.run(arm, cuts) == whole, "cuts {cuts:?}");
    }
}

fn kept_states_are_those_of_steps(arm: &Arm) {
    for shape in SHAPES {
        let case = Case::new(shape, 33, -3.0);
        let mut steps = case.upload(arm, 1);
        let states: Vec<_> = (0..33)
            .map(|row| {
                steps.queue(row, 1, None, false);
                steps.slot(0)
            })
            .collect();
        let expected = steps.left();
        // Rounds of drafts of which so many rows are accepted: the next round starts from the last one's state.
        let mut device = case.upload(arm, 16);
        let (mut first, mut from) = (5, Buffer::from_host(&device.stream, &[0], &[1]).unwrap());
        device.queue(0, first, None, false);
        for (rows, accepted) in [(7, 3), (16, 1), (1, 1), (8, 8), (5, 2), (12, 12)] {
            let untouched = (rows < 16).then(|| device.slot(15));
            device.queue(first, rows, Some(&from), true);
            for row in 0..rows {
                assert!(
                    device.slot(row) == states[first + row],
                    "{shape:?}: row {row} of {rows} from {first}"
                );
            }
            if let Some(untouched) = untouched {
                assert!(device.slot(15) == untouched, "{shape:?}: a slot that no row has");
            }
            first += accepted;
            from.copy_from_host(&device.stream, &[accepted as i32 - 1]).unwrap();
        }
        device.queue(first, 1, Some(&from), false);
        assert!(device.slot(0) == states[first], "{shape:?}: a step from a kept state");
        assert!(device.left().out == expected.out, "{shape:?}: the rows themselves");

        from.copy_from_host(&device.stream, &[16]).unwrap();
        device.queue(0, 1, Some(&from), false);
        let row = &device.out.to_host(&device.stream).unwrap()[..shape.values()];
        assert!(row.iter().all(|y| y.is_nan()), "{shape:?}: a slot that does not exist");
    }
}

/// Whatever later rows hold, and in whatever call. A row that is not a number leaves nothing plausible behind.
fn rows_do_not_reach_back(arm: &Arm) {
    const GOOD: usize = 5;
    for shape in SHAPES {
        let case = Case::new(shape, 12, -3.0);
        let expected = case.run(arm, &[1]);
        for (hostile, calls) in
            [f32::NAN, f32::INFINITY, 3e38, 0.0].into_iter().flat_map(|x| [(x, 12), (x, 7), (x, 1)])
        {
            let mut spoilt = Case::new(shape, 12, -3.0);
            for (rows, width) in [
                (&mut spoilt.mixed, shape.channels()),
                (&mut spoilt.z, shape.values()),
                (&mut spoilt.b, shape.heads),
                (&mut spoilt.a, shape.heads),
            ] {
                rows[GOOD * width..].fill(bf16::from_f32(hostile));
            }
            let got = spoilt.run(arm, &[calls]);
            let good = GOOD * shape.values();
            assert!(got.out[..good] == expected.out[..good], "{shape:?}: before rows of {hostile}");
            if hostile.is_nan() {
                assert!(got.out[good..].iter().all(|y| y.is_nan()), "{shape:?}: rows that are not numbers");
            }
        }
    }
}

/// A captured step, replayed over inputs that change, against steps one by one; and with states kept, from a slot that changes.
fn replays_are_steps(arm: &Arm) {
    const REPLAYS: usize = 50;
    for (shape, rows, keep) in
        [(SHAPES[0], 1, false), (SHAPES[0], 7, false), (SHAPES[0], 7, true), (SHAPES[2], 1, false)]
    {
        let case = Case::new(shape, REPLAYS * rows, -3.0);
        let widths = [shape.channels(), shape.values(), shape.heads, shape.heads];
        let mut eager = case.upload(arm, 8);
        let mut device = case.upload(arm, 8);
        let stream = device.stream.clone();
        let mut inputs = widths.map(|width| Buffer::<bf16>::zeros(&stream, &[rows, width]).unwrap());
        let mut out = Buffer::<bf16>::zeros(&stream, &[rows, shape.values()]).unwrap();
        let mut from = Buffer::from_host(&stream, &[0], &[1]).unwrap();
        let OnDevice { layer, state, .. } = &mut device;
        let mut graph = Graph::capture(&stream, |stream| {
            let [mixed, z, b, a] = inputs.each_ref().map(Buffer::view);
            let (out, from) = (out.view_mut(), Some(from.view()));
            layer.queue(state, &DeltaRows { mixed, z, b, a, out, rows, from, keep }, stream)
        })
        .unwrap();
        for replay in 0..REPLAYS {
            let slot = if keep && replay > 0 { (replay * 5) % rows } else { 0 };
            from.copy_from_host(&stream, &[slot as i32]).unwrap();
            for ((input, all), width) in
                inputs.iter_mut().zip([&case.mixed, &case.z, &case.b, &case.a]).zip(widths)
            {
                input
                    .copy_from_host(&stream, &all[replay * rows * width..(replay + 1) * rows * width])
                    .unwrap();
            }
            out.fill_bytes(&stream, POISON).unwrap();
            graph.launch().unwrap();
            let got = out.to_host(&stream).unwrap();
            eager.queue(replay * rows, rows, Some(&from), keep);
            let mut expected = vec![bf16::ZERO; got.len()];
            eager.out.copy_range_to_host(&eager.stream, replay * got.len(), &mut expected).unwrap();
            assert!(got == expected, "{shape:?}: replay {replay} of {rows} rows");
        }
        let slots = if keep { 0..rows } else { 0..1 };
        for slot in slots {
            assert!(device.slot(slot) == eager.slot(slot), "{shape:?}: slot {slot} after the replays");
        }
    }
}

fn what_does_not_fit_is_refused(arm: &Arm) {
    let stream = arm.stream();
    let refusal = |shape| DeltaState::new(&stream, &shape, 1).unwrap_err().to_string();
    assert!(refusal(shape(2, 3, 64, 64, 4)).contains("heads = 3"), "heads that key heads do not divide");
    assert!(
        refusal(shape(1, 5, 64, 128, 4)).contains("heads = 5"),
        "more value heads than a key head serves"
    );
    assert!(refusal(shape(3, 3, 64, 64, 4)).contains("heads = 3"), "a cluster of one block");
    assert!(refusal(shape(1, 1, 72, 64, 4)).contains("key_dim = 72"), "a key of no whole vectors");
    assert!(refusal(shape(1, 1, 64, 272, 4)).contains("value_dim = 272"), "a value too long");
    assert!(refusal(shape(1, 2, 64, 64, 9)).contains("taps = 9"), "too many taps");

    let case = Case::new(SHAPES[0], 4, -3.0);
    let mut device = case.upload(arm, 3);
    let OnDevice { layer, state, mixed, z, b, a, out, stream } = &mut device;
    let mut queue = |state: &mut DeltaState, rows, keep| {
        let out = out.view_mut();
        let call = DeltaRows {
            mixed: mixed.view(),
            z: z.view(),
            b: b.view(),
            a: a.view(),
            out,
            rows,
            from: None,
            keep,
        };
        layer.queue(state, &call, stream).unwrap_err().to_string()
    };
    assert!(queue(state, 0, false).contains("rows = 0"), "no rows");
    assert!(queue(state, 4, true).contains("rows = 4"), "more rows than slots");
    assert!(queue(state, 5, false).starts_with("mixed rows: shape"), "more rows than there are");
    let mut other = DeltaState::new(stream, &SHAPES[2], 3).unwrap();
    assert!(queue(&mut other, 1, false).starts_with("gated-delta state: shape"), "another layer's state");
}
