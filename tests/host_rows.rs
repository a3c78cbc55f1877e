//! The host's row kernels: each against FP64, bit for bit whatever the other rows are, every element written, captured as eager.

use device::{Buffer, Element, Graph, Stream, View, ViewMut};
use half::bf16;
use libtest_mimic::Trial;
use qwen3_5::cuda::{AddNorm, Embed, Norm, OutputGate, QkNormRope, SiluMul, prepare};
use structure_core::Refusal;

use crate::arm::{Arm, on_gpu};
use crate::random::Random;

pub fn trials() -> Vec<Trial> {
    vec![
        on_gpu("host_rows::embed", embed),
        on_gpu("host_rows::norm", norm),
        on_gpu("host_rows::norm_to_f32", norm_to_f32),
        on_gpu("host_rows::add_norm", add_norm),
        on_gpu("host_rows::silu_mul", silu_mul),
        on_gpu("host_rows::output_gate", output_gate),
        on_gpu("host_rows::qk_norm_rope", qk_norm_rope),
        on_gpu("host_rows::refusals", refusals),
    ]
}

/// What an FP32 operation rounds by, relative to its result.
const F32: f64 = 1.0 / (1u64 << 24) as f64;
/// What rounding to BF16 moves a number by: half of the last of eight bits, and half of the smallest subnormal.
fn bf16_rounding(value: f64) -> f64 {
    value.abs() / 256.0 + 2f64.powi(-134)
}
/// How far a norm's FP32 factor is off: no square passes more than 64 additions, whose relative error the root halves; the square,
/// mean, root (2 units in the last place, of 2 roundings each) and two products.
const NORM: f64 = (32 + 10) as f64 * F32;
const EPS: f32 = 1e-6;

const WIDTHS: [usize; 6] = [8, 128, 5120, 10_240, 17_408, 24_576];
/// A decode band's rows.
const ROWS: usize = 16;
/// A prompt's: they need more than one block where rows share one.
const PROMPT: usize = 300;

/// Runs a call into poisoned outputs that are followed by a poisoned tail: eagerly, then several times from a graph. All must give the
/// same bits, write all elements and leave the tails. An output may start with other contents than poison.
pub fn outputs<T: Element + Bits>(
    stream: &Stream,
    lens: &[usize],
    first: Option<&[T]>,
    queue: &dyn Fn(Vec<ViewMut<'_>>) -> Result<(), Refusal>,
) -> Vec<Vec<T>> {
    const TAIL: usize = 1024;
    const POISON: u8 = 0x7f;
    let mut buffers: Vec<_> =
        lens.iter().map(|len| Buffer::<T>::zeros(stream, &[len + TAIL]).unwrap()).collect();
    let contents = first.map(|first| [first, &[T::default(); TAIL]].concat());
    let reset = |buffers: &mut [Buffer<T>]| {
        buffers.iter_mut().for_each(|buffer| buffer.fill_bytes(stream, POISON).unwrap());
        contents.iter().for_each(|contents| buffers[0].copy_from_host(stream, contents).unwrap());
    };
    let run = |buffers: &mut [Buffer<T>]| {
        queue(
            buffers
                .iter_mut()
                .zip(lens)
                .map(|(buffer, len)| buffer.view_mut().first(*len).unwrap())
                .collect(),
        )
    };
    let read = |buffers: &[Buffer<T>]| -> Vec<Vec<T>> {
        let split = |(index, (buffer, len)): (usize, (&Buffer<T>, &usize))| {
            let mut elements = buffer.to_host(stream).unwrap();
            let tail = elements.split_off(*len);
            let untouched = if index == 0 && first.is_some() { 0 } else { u32::from_ne_bytes([POISON; 4]) };
            assert!(tail.iter().all(|x| x.poisoned(untouched)), "the tail of output {index}");
            let poison = u32::from_ne_bytes([POISON; 4]);
            assert!(
                !elements.iter().any(|x| x.poisoned(poison)),
                "every element of output {index} is written"
            );
            elements
        };
        buffers.iter().zip(lens).enumerate().map(split).collect()
    };
    reset(&mut buffers);
    run(&mut buffers).unwrap();
    let eager = read(&buffers);
    let mut graph = Graph::capture(stream, |_| run(&mut buffers)).unwrap();
    for _ in 0..3 {
        reset(&mut buffers);
        graph.launch().unwrap();
        for (replayed, eager) in read(&buffers).iter().zip(&eager) {
            assert!(same_bits(replayed, eager), "a replay is the eager call");
        }
    }
    eager
}

/// Elements whose bits can be compared, NaN or not.
pub trait Bits: Copy {
    fn bits(self) -> u32;
    /// Whether it is the element whose bytes are those of `pattern`.
    fn poisoned(self, pattern: u32) -> bool;
}

impl Bits for bf16 {
    fn bits(self) -> u32 {
        self.to_bits().into()
    }

    fn poisoned(self, pattern: u32) -> bool {
        self.bits() == pattern & 0xffff
    }
}

impl Bits for f32 {
    fn bits(self) -> u32 {
        self.to_bits()
    }

    fn poisoned(self, pattern: u32) -> bool {
        self.bits() == pattern
    }
}

impl Bits for i32 {
    fn bits(self) -> u32 {
        self.cast_unsigned()
    }

    fn poisoned(self, pattern: u32) -> bool {
        self.bits() == pattern
    }
}

pub fn same_bits<T: Bits>(a: &[T], b: &[T]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.bits() == b.bits())
}

pub fn normals(random: &mut Random, len: usize, deviation: f32) -> Vec<bf16> {
    random.normals(len, deviation).into_iter().map(bf16::from_f32).collect()
}

/// Queues a call: its inputs, its outputs, how many rows, and which of all rows the first one is.
type Queue<'a> = dyn Fn(&[View<'_>], Vec<ViewMut<'_>>, usize, usize) -> Result<(), Refusal> + 'a;
/// Each output of one of all rows, from the row's inputs; with how far each element may be off.
type Expect<'a> = dyn Fn(&[Vec<f64>], usize) -> Vec<Vec<(f64, f64)>> + 'a;

/// A call on rows of BF16.
struct Op<'a> {
    name: String,
    /// Elements of a row of each input.
    reads: Vec<usize>,
    /// Elements of a row of each output.
    writes: Vec<usize>,
    /// Whether the first output starts as the first input.
    in_place: bool,
    queue: &'a Queue<'a>,
    expect: &'a Expect<'a>,
}

impl Op<'_> {
    fn run(&self, stream: &Stream, inputs: &[Vec<bf16>], first: usize, rows: usize) -> Vec<Vec<bf16>> {
        let slice =
            |(input, width): (&Vec<bf16>, &usize)| input[first * width..(first + rows) * width].to_vec();
        let inputs: Vec<Vec<bf16>> = inputs.iter().zip(&self.reads).map(slice).collect();
        let buffers: Vec<_> =
            inputs.iter().map(|input| Buffer::from_host(stream, input, &[input.len()]).unwrap()).collect();
        let views: Vec<_> = buffers.iter().map(Buffer::view).collect();
        let lens: Vec<_> = self.writes.iter().map(|width| rows * width).collect();
        let contents = self.in_place.then_some(&inputs[0][..]);
        outputs(stream, &lens, contents, &|outputs| (self.queue)(&views, outputs, rows, first))
    }

    /// Against FP64; then each row alone, in calls of fewer and more rows, and among hostile ones.
    fn check(&self, stream: &Stream, deviation: f32) {
        let mut random = Random::new(11);
        let inputs: Vec<_> =
            self.reads.iter().map(|width| normals(&mut random, PROMPT * width, deviation)).collect();
        let band = self.run(stream, &inputs, 0, ROWS);
        self.compare(&inputs, &band);

        let prompt = self.run(stream, &inputs, 0, PROMPT);
        self.expect_rows(&prompt, 0, &band, 0, ROWS);
        for rows in [1, 2, 7, 8, 15] {
            self.expect_rows(&self.run(stream, &inputs, 0, rows), 0, &band, 0, rows);
        }
        for (row, hostile) in [0, 3, 9, 15].into_iter().zip([f32::NAN, f32::INFINITY, 3e38, 0.0]) {
            self.expect_rows(&self.run(stream, &inputs, row, 1), 0, &band, row, 1);
            let mut among = inputs.clone();
            for (input, width) in among.iter_mut().zip(&self.reads) {
                let own = row * width..(row + 1) * width;
                let others = input.iter_mut().enumerate().filter(|(index, _)| !own.contains(index));
                others.for_each(|(_, x)| *x = bf16::from_f32(hostile));
            }
            self.expect_rows(&self.run(stream, &among, 0, ROWS), row, &band, row, 1);
        }
    }

    fn compare(&self, inputs: &[Vec<bf16>], got: &[Vec<bf16>]) {
        for row in 0..ROWS {
            let of_row = |(input, width): (&Vec<bf16>, &usize)| {
                input[row * width..(row + 1) * width].iter().map(|x| x.to_f64()).collect()
            };
            let inputs: Vec<Vec<f64>> = inputs.iter().zip(&self.reads).map(of_row).collect();
            for (output, expected) in (self.expect)(&inputs, row).iter().enumerate() {
                for (index, (expected, bound)) in expected.iter().enumerate() {
                    let got = got[output][row * self.writes[output] + index].to_f64();
                    assert!(
                        (got - expected).abs() <= *bound,
                        "{}: row {row}, output {output}, element {index}: {got}, expected {expected} within {bound}",
                        self.name
                    );
                }
            }
        }
    }

    fn expect_rows(&self, got: &[Vec<bf16>], from: usize, band: &[Vec<bf16>], row: usize, rows: usize) {
        for ((got, band), width) in got.iter().zip(band).zip(&self.writes) {
            let (got, band) =
                (&got[from * width..(from + rows) * width], &band[row * width..(row + rows) * width]);
            assert!(same_bits(got, band), "{}: {rows} rows from {row} on", self.name);
        }
    }
}

fn stream(arm: &Arm) -> Stream {
    let stream = arm.stream();
    prepare(&stream).unwrap();
    stream
}

fn buffer<T: Element>(stream: &Stream, elements: &[T]) -> Buffer<T> {
    Buffer::from_host(stream, elements, &[elements.len()]).unwrap()
}

fn embed(arm: &Arm) {
    let (stream, mut random) = (stream(arm), Random::new(3));
    for (vocab, hidden) in [(5, 8), (1000, 128), (300, 5120)] {
        let table = normals(&mut random, vocab * hidden, 1.0);
        let table_buffer = buffer(&stream, &table);
        let mut tokens = vec![0, vocab as i32 - 1, -1, vocab as i32, i32::MAX, i32::MIN, 1];
        for rows in [1, 7, 300] {
            tokens.resize(rows.max(tokens.len()), 2);
            let tokens_buffer = buffer(&stream, &tokens[..rows]);
            let got = outputs::<bf16>(&stream, &[rows * hidden], None, &|mut out| {
                let (table, tokens, out) = (table_buffer.view(), tokens_buffer.view(), out.remove(0));
                Embed { table, tokens, out, rows, hidden }.queue(&stream)
            });
            for (got, &token) in got[0].chunks_exact(hidden).zip(&tokens) {
                match usize::try_from(token).ok().filter(|token| *token < vocab) {
                    Some(token) => assert_eq!(got, &table[token * hidden..(token + 1) * hidden]),
                    None => assert!(got.iter().all(|x| x.is_nan()), "token {token} of {vocab}"),
                }
            }
        }
    }
}

fn scales(random: &mut Random, width: usize) -> Vec<f32> {
    (0..width).map(|_| 1.0 + 0.3 * random.normal()).collect()
}

/// A row's norm in FP64.
fn normed(x: &[f64], scale: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let inverse = 1.0 / (mean + f64::from(EPS)).sqrt();
    x.iter().zip(scale).map(|(x, scale)| x * inverse * f64::from(*scale)).collect()
}

fn norm(arm: &Arm) {
    let (stream, mut random) = (stream(arm), Random::new(5));
    // Rows of ordinary size, and so small that eps counts.
    for (hidden, deviation) in WIDTHS.into_iter().flat_map(|hidden| [(hidden, 2.0), (hidden, 1e-3)]) {
        let scale = scales(&mut random, hidden);
        let scale_buffer = buffer(&stream, &scale);
        Op {
            name: format!("norm of {hidden}"),
            reads: vec![hidden],
            writes: vec![hidden],
            in_place: false,
            queue: &|inputs, mut out, rows, _| {
                let (x, scale, out) = (inputs[0], scale_buffer.view(), out.remove(0));
                Norm { x, scale, eps: EPS, out, rows, hidden }.queue(&stream)
            },
            expect: &|inputs, _| {
                let normed = normed(&inputs[0], &scale);
                vec![normed.into_iter().map(|y| (y, bf16_rounding(y) + NORM * y.abs())).collect()]
            },
        }
        .check(&stream, deviation);
    }
}

fn norm_to_f32(arm: &Arm) {
    let (stream, mut random) = (stream(arm), Random::new(6));
    for hidden in WIDTHS {
        let (scale, rows) = (scales(&mut random, hidden), 7);
        let (x, update) =
            (normals(&mut random, rows * hidden, 2.0), normals(&mut random, rows * hidden, 1.0));
        let (scale_buffer, x_buffer) = (buffer(&stream, &scale), buffer(&stream, &x));
        let got = outputs::<f32>(&stream, &[rows * hidden], None, &|mut out| {
            let (x, scale, out) = (x_buffer.view(), scale_buffer.view(), out.remove(0));
            Norm { x, scale, eps: EPS, out, rows, hidden }.queue(&stream)
        });
        let x: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
        for (got, x) in got[0].chunks_exact(hidden).zip(x.chunks_exact(hidden)) {
            for (got, expected) in got.iter().zip(normed(x, &scale)) {
                assert!(
                    (f64::from(*got) - expected).abs() <= NORM * expected.abs(),
                    "{got}, expected {expected}"
                );
            }
        }

        // With an update: the same numbers as the norm of the sum that it leaves, and the one row of a view on its own.
        let update_buffer = buffer(&stream, &update);
        let (mut x_buffer, mut out) = (x_buffer, Buffer::<f32>::zeros(&stream, &[hidden]).unwrap());
        let last = (rows - 1) * hidden..rows * hidden;
        let x = x_buffer.view_mut().range(last.clone()).unwrap();
        let (update, scale) = (update_buffer.view().range(last.clone()).unwrap(), scale_buffer.view());
        AddNorm { x, update, scale, eps: EPS, out: out.view_mut(), rows: 1, hidden }.queue(&stream).unwrap();
        let alone = outputs::<f32>(&stream, &[hidden], None, &|mut out| {
            let (x, out) = (x_buffer.view().range(last.clone())?, out.remove(0));
            Norm { x, scale: scale_buffer.view(), eps: EPS, out, rows: 1, hidden }.queue(&stream)
        });
        assert!(same_bits(&alone[0], &out.to_host(&stream).unwrap()));
    }
}

fn add_norm(arm: &Arm) {
    let (stream, mut random) = (stream(arm), Random::new(7));
    for hidden in WIDTHS {
        let scale = scales(&mut random, hidden);
        let scale_buffer = buffer(&stream, &scale);
        Op {
            name: format!("norm of {hidden} with an update"),
            reads: vec![hidden, hidden],
            writes: vec![hidden, hidden],
            in_place: true,
            queue: &|inputs, mut out, rows, _| {
                let (out, x) = (out.remove(1), out.remove(0));
                AddNorm { x, update: inputs[1], scale: scale_buffer.view(), eps: EPS, out, rows, hidden }
                    .queue(&stream)
            },
            expect: &|inputs, _| {
                // The new residual is this FP32 sum rounded, bit for bit, and what is normalised is the rounded one.
                let sums = inputs[0].iter().zip(&inputs[1]).map(|(x, update)| (*x as f32) + (*update as f32));
                let x: Vec<f64> = sums.map(|sum| bf16::from_f32(sum).to_f64()).collect();
                let normed = normed(&x, &scale);
                let out = normed.into_iter().map(|y| (y, bf16_rounding(y) + NORM * y.abs())).collect();
                vec![x.into_iter().map(|x| (x, 0.0)).collect(), out]
            },
        }
        .check(&stream, 2.0);
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(gate)` and how far it may be off: the exponential by `2 + 1.173 |gate|` units in the last place (the CUDA programming
/// guide's `__expf`), its reciprocal by one, four roundings, the one to BF16; where the exponential overflows a sigmoid below 2^-126
/// becomes zero.
fn gated(x: f64, gate: f64) -> (f64, f64) {
    let y = x * sigmoid(gate);
    (y, bf16_rounding(y) + (10.0 + 2.4 * gate.abs()) * F32 * y.abs() + x.abs() * 2f64.powi(-126))
}

fn silu_mul(arm: &Arm) {
    let stream = stream(arm);
    // Deviation 60 gives gates whose exponential overflows.
    for (width, deviation) in WIDTHS.into_iter().flat_map(|width| [(width, 2.0), (width, 60.0)]) {
        Op {
            name: format!("silu_mul of {width}"),
            reads: vec![width, width],
            writes: vec![width],
            in_place: false,
            queue: &|inputs, mut out, rows, _| {
                SiluMul { gate: inputs[0], up: inputs[1], out: out.remove(0), rows, width }.queue(&stream)
            },
            expect: &|inputs, _| {
                vec![inputs[0].iter().zip(&inputs[1]).map(|(gate, up)| gated(gate * up, *gate)).collect()]
            },
        }
        .check(&stream, deviation);
    }
}

fn output_gate(arm: &Arm) {
    let stream = stream(arm);
    for (heads, head_dim) in [(24, 256), (16, 256), (3, 64), (1, 8), (7, 40)] {
        let width = heads * head_dim;
        Op {
            name: format!("output gate of {heads} x {head_dim}"),
            reads: vec![width, 2 * width],
            writes: vec![width],
            in_place: false,
            queue: &|inputs, mut out, rows, _| {
                let (values, q_and_gate, out) = (inputs[0], inputs[1], out.remove(0));
                OutputGate { values, q_and_gate, out, rows, heads, head_dim }.queue(&stream)
            },
            expect: &|inputs, _| {
                let gates = inputs[1].chunks_exact(head_dim).skip(1).step_by(2).flatten();
                vec![inputs[0].iter().zip(gates).map(|(value, gate)| gated(*value, *gate)).collect()]
            },
        }
        .check(&stream, 2.0);
    }
}

fn qk_norm_rope(arm: &Arm) {
    let stream = stream(arm);
    let shapes = [
        (24, 4, 256, 32),
        (16, 2, 256, 32),
        (3, 1, 64, 8),
        (2, 2, 128, 64),
        (1, 1, 512, 256),
        (5, 1, 8, 2),
        (1, 3, 40, 5),
    ];
    for (index, position) in [0, 1, 4095, 32_767, 262_143].into_iter().enumerate() {
        for shape in shapes.into_iter().skip(index % 2).step_by(2) {
            rotates(&stream, position, shape);
        }
    }
    rotates(&stream, 7, (2, 1, 16, 0));
}

fn rotates(stream: &Stream, position: i32, (heads, kv_heads, head_dim, pairs): (usize, usize, usize, usize)) {
    let mut random = Random::new(9);
    let (q_scale, k_scale) = (scales(&mut random, head_dim), scales(&mut random, head_dim));
    let frequencies: Vec<f32> =
        (0..pairs.max(1)).map(|pair| 1.0 / 1e7f32.powf(pair as f32 / pairs.max(1) as f32)).collect();
    let (q_scale_buffer, k_scale_buffer) = (buffer(stream, &q_scale), buffer(stream, &k_scale));
    let frequencies_buffer = buffer(stream, &frequencies);
    let positions: Vec<_> = (0..ROWS as i32).map(|row| buffer(stream, &[position + row])).collect();
    let turned = |head: &[f64], scale: &[f32], row: usize| -> Vec<(f64, f64)> {
        let normed = normed(head, scale);
        let mut out: Vec<_> = normed.iter().map(|y| (*y, bf16_rounding(*y) + NORM * y.abs())).collect();
        for (pair, frequency) in frequencies.iter().enumerate().take(pairs) {
            // The angle is the host's: an FP32 product.
            let (sin, cos) = f64::from((position as usize + row) as f32 * frequency).sin_cos();
            let (x, y) = (normed[pair], normed[pairs + pair]);
            for (at, y) in [(pair, x * cos - y * sin), (pairs + pair, y * cos + x * sin)] {
                // Sine and cosine are off by two units in the last place at most, then two products and a sum.
                let terms = normed[pair].abs() + normed[pairs + pair].abs();
                out[at] = (y, bf16_rounding(y) + (NORM + 8.0 * F32) * terms);
            }
        }
        out
    };
    Op {
        name: format!("rotation of {heads} and {kv_heads} x {head_dim}, {pairs} pairs, at {position}"),
        reads: vec![2 * heads * head_dim, kv_heads * head_dim],
        writes: vec![heads * head_dim, kv_heads * head_dim],
        in_place: false,
        queue: &|inputs, mut out, rows, first| {
            let (k_out, q_out) = (out.remove(1), out.remove(0));
            let rope = QkNormRope {
                q_and_gate: inputs[0],
                k: inputs[1],
                q_scale: q_scale_buffer.view(),
                k_scale: k_scale_buffer.view(),
                frequencies: frequencies_buffer.view(),
                position: positions[first].view(),
                q_out,
                k_out,
                rows,
                heads,
                kv_heads,
                head_dim,
                pairs,
                eps: EPS,
            };
            rope.queue(stream)
        },
        expect: &|inputs, row| {
            let queries =
                inputs[0].chunks_exact(head_dim).step_by(2).flat_map(|head| turned(head, &q_scale, row));
            let keys = inputs[1].chunks_exact(head_dim).flat_map(|head| turned(head, &k_scale, row));
            vec![queries.collect(), keys.collect()]
        },
    }
    .check(stream, 2.0);
}

fn refusals(arm: &Arm) {
    let stream = stream(arm);
    let (x, floats) = (buffer(&stream, &[bf16::ONE; 64]), buffer(&stream, &[1.0f32; 64]));
    let mut out = Buffer::<bf16>::zeros(&stream, &[64]).unwrap();
    let mut norm = |x: View<'_>, rows, hidden| {
        Norm { x, scale: floats.view(), eps: EPS, out: out.view_mut(), rows, hidden }.queue(&stream)
    };
    assert!(norm(x.view(), 2, 32).is_ok() && norm(x.view(), 0, 32).is_ok());
    assert!(matches!(norm(x.view(), 3, 32), Err(Refusal::ShapeMismatch { .. })));
    assert!(matches!(norm(floats.view(), 1, 32), Err(Refusal::DTypeOutside { .. })));
    for hidden in [0, 12, 24_584] {
        assert!(matches!(norm(x.view(), 1, hidden), Err(Refusal::DimOutside { dim: "hidden", .. })));
    }
}
