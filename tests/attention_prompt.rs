//! Attention of a prompt's rows over both stores: against FP64, and what later and unwritten positions may not do to it.

use decode_loop::{Attend, Door, KvOptions, KvRows, KvScale, KvShape, KvStore, STRUCTURE};
use device::{Buffer, Graph, Stream};
use half::bf16;
use libtest_mimic::Trial;
use number_formats::e4m3;
use qwen3_5::cuda::Bf16Kv;

use crate::arm::{Arm, on_gpu};
use crate::random::Random;

pub fn trials() -> Vec<Trial> {
    vec![
        on_gpu("attention_prompt::close_to_the_reference", close_to_the_reference),
        on_gpu("attention_prompt::rows_see_no_later_position", rows_see_no_later_position),
        on_gpu("attention_prompt::captured_is_eager_at_any_position", captured_is_eager_at_any_position),
    ]
}

#[derive(Clone, Copy, PartialEq)]
enum Elements {
    Bf16,
    E4m3,
}

/// Heads, KV heads, head size, rows, and the position of the first: few and many blocks, tiles of keys that end before, at and
/// after a row, groups that do not divide a block's rows.
const CASES: [[usize; 5]; 6] = [
    [24, 4, 256, 33, 15],
    [6, 1, 256, 257, 0],
    [16, 2, 256, 64, 511],
    [2, 2, 64, 130, 62],
    [12, 2, 128, 100, 1],
    [8, 1, 64, 300, 16],
];

/// A store with keys and values of all its positions, on both sides.
struct Case {
    shape: KvShape,
    elements: Elements,
    rows: usize,
    position: usize,
    keys: Vec<bf16>,
    values: Vec<bf16>,
    queries: Vec<bf16>,
    scales: Vec<KvScale>,
}

/// Positions after the last row, which hold anything.
const TAIL: usize = 70;
const GUARD: usize = 4096;
const POISON: u8 = 0x7f;

impl Case {
    fn new([heads, kv_heads, head_dim, rows, position]: [usize; 5], elements: Elements) -> Self {
        let shape = KvShape { layers: 1, heads, kv_heads, head_dim, window: position + rows + TAIL };
        let mut random = Random::new((heads * rows + position) as u64);
        let mut normals = |len: usize, deviation: f32| -> Vec<bf16> {
            random.normals(len, deviation).into_iter().map(bf16::from_f32).collect()
        };
        let stored = (position + rows) * kv_heads * head_dim;
        Case {
            shape,
            elements,
            rows,
            position,
            keys: normals(stored, 1.5),
            values: normals(stored, 1.0),
            queries: normals(rows * heads * head_dim, 2.0),
            scales: (0..kv_heads).map(|head| KvScale { k: 0.02 * (head + 1) as f32, v: 0.01 }).collect(),
        }
    }

    fn store(&self, stream: &Stream) -> Box<dyn KvStore> {
        match self.elements {
            Elements::Bf16 => Box::new(Bf16Kv::new(stream, &self.shape).unwrap()),
            Elements::E4m3 => {
                let registrations = structure_core::registrations().unwrap();
                let registration = structure_core::find(&registrations, STRUCTURE, "fp8_kv").unwrap();
                let options = KvOptions { page_size: None, scales: Some(&self.scales) };
                (Door::of(registration).unwrap().kv().unwrap().cuda)(stream, &self.shape, &options).unwrap()
            }
        }
    }

    /// What the store holds of an element of a KV head.
    fn stored(&self, element: bf16, scale: f32) -> f64 {
        match self.elements {
            Elements::Bf16 => f64::from(element.to_f32()),
            Elements::E4m3 => {
                f64::from(e4m3::decode(e4m3::encode_saturating(element.to_f32() / scale))) * f64::from(scale)
            }
        }
    }

    /// A store that holds the keys and values, `after` of them at the positions that follow too.
    fn filled(&self, stream: &Stream, after: bf16) -> Box<dyn KvStore> {
        let mut store = self.store(stream);
        let len = TAIL * self.shape.kv_heads * self.shape.head_dim;
        let mut append = |at: usize, keys: &[bf16], values: &[bf16]| {
            let [keys, values] =
                [keys, values].map(|rows| Buffer::from_host(stream, rows, &[rows.len()]).unwrap());
            let position = Buffer::from_host(stream, &[at as i32], &[1]).unwrap();
            let rows = KvRows {
                keys: keys.view(),
                values: values.view(),
                rows: keys.len() / self.shape.kv_heads / self.shape.head_dim,
                position: position.view(),
                stream,
            };
            store.append(0, &rows).unwrap();
            stream.synchronize().unwrap();
        };
        append(0, &self.keys, &self.values);
        append(self.position + self.rows, &vec![after; len], &vec![after; len]);
        store
    }

    /// The rows' result, after which nothing may have been written.
    fn attend(&self, stream: &Stream, store: &mut dyn KvStore, graph_from: Option<usize>) -> Vec<bf16> {
        let queries = Buffer::from_host(stream, &self.queries, &[self.queries.len()]).unwrap();
        let mut position =
            Buffer::from_host(stream, &[graph_from.unwrap_or(self.position) as i32], &[1]).unwrap();
        let mut out = Buffer::<bf16>::zeros(stream, &[self.queries.len() + GUARD]).unwrap();
        out.fill_bytes(stream, POISON).unwrap();
        let mut queue = |position: &Buffer<i32>, out: &mut Buffer<bf16>, stream: &Stream| {
            let out = out.view_mut().range(0..self.queries.len())?;
            let rows = self.rows;
            store.attend(
                0,
                &Attend { queries: queries.view(), out: &out, rows, position: position.view(), stream },
            )
        };
        if graph_from.is_some() {
            let mut graph = Graph::capture(stream, |stream| queue(&position, &mut out, stream)).unwrap();
            position.copy_from_host(stream, &[self.position as i32]).unwrap();
            graph.launch().unwrap();
            stream.synchronize().unwrap();
        } else {
            queue(&position, &mut out, stream).unwrap();
        }
        let mut out = out.to_host(stream).unwrap();
        let poison = bf16::from_bits(u16::from_le_bytes([POISON; 2]));
        assert!(out[self.queries.len()..].iter().all(|&x| x == poison), "written past the last row");
        out.truncate(self.queries.len());
        out
    }

    /// One row of a head in FP64, and how far its result may be off.
    ///
    /// Scores are FP32 sums of head_dim products, so they move by `(D + D / 16 + 32) * 2^-23 * sum |q k|`, which moves weights by
    /// so much of themselves, numerator and denominator alike. Weights and the result round to BF16 once each, and the sums over
    /// positions are FP32 too.
    fn reference(&self, row: usize, head: usize) -> Vec<[f64; 2]> {
        let KvShape { heads, kv_heads, head_dim, .. } = self.shape;
        let kv_head = head / (heads / kv_heads);
        let KvScale { k, v } = self.scales[kv_head];
        let query = &self.queries[(row * heads + head) * head_dim..][..head_dim];
        let seen = self.position + row + 1;
        let of = |rows: &[bf16], position: usize, i: usize, scale: f32| {
            self.stored(rows[(position * kv_heads + kv_head) * head_dim + i], scale)
        };
        let terms = (head_dim + head_dim / 16 + 32) as f64;
        let ulp = 2f64.powi(-23);
        let (mut scores, mut moved) = (Vec::new(), 0f64);
        for position in 0..seen {
            let products =
                (0..head_dim).map(|i| f64::from(query[i].to_f32()) * of(&self.keys, position, i, k));
            let (sum, magnitude) = products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
            scores.push(sum / (head_dim as f64).sqrt());
            moved = moved.max((terms * magnitude + 4.0 * sum.abs()) / (head_dim as f64).sqrt() * ulp);
        }
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
        let total: f64 = weights.iter().sum();
        let relative = 2f64.powi(-8) * 1.01 + 2.0 * moved + (seen + seen / 16 + 64) as f64 * 2.0 * ulp;
        let dimension = |i: usize| {
            let products = weights.iter().enumerate().map(|(at, w)| w / total * of(&self.values, at, i, v));
            let (sum, magnitude) = products.fold((0.0, 0.0), |(sum, size), x: f64| (sum + x, size + x.abs()));
            [sum, relative * magnitude + 2f64.powi(-8) * sum.abs()]
        };
        (0..head_dim).map(dimension).collect()
    }
}

fn each(with: impl Fn(&Case)) {
    for elements in [Elements::Bf16, Elements::E4m3] {
        for case in CASES {
            with(&Case::new(case, elements));
        }
    }
}

fn close_to_the_reference(arm: &Arm) {
    let stream = arm.stream();
    each(|case| {
        let out = case.attend(&stream, case.filled(&stream, bf16::NAN).as_mut(), None);
        let KvShape { heads, head_dim, .. } = case.shape;
        // Every row of some head, the first and the last of all.
        for (row, head) in
            (0..case.rows).map(|row| (row, row % heads)).chain((0..heads).map(|h| (case.rows - 1, h)))
        {
            for (i, [exact, bound]) in case.reference(row, head).into_iter().enumerate() {
                let got = f64::from(out[(row * heads + head) * head_dim + i].to_f32());
                assert!(
                    (got - exact).abs() <= bound,
                    "row {row}, head {head}, {i}: {got} for {exact}, bound {bound}"
                );
            }
        }
    });
}

/// Not those after the call's rows, and not those of later rows of the call, whether finite or not.
fn rows_see_no_later_position(arm: &Arm) {
    let stream = arm.stream();
    each(|case| {
        let expected = case.attend(&stream, case.filled(&stream, bf16::ZERO).as_mut(), None);
        for after in [bf16::NAN, bf16::MAX] {
            let out = case.attend(&stream, case.filled(&stream, after).as_mut(), None);
            assert!(bits(&out) == bits(&expected), "{after} after the last row");
        }
        let KvShape { heads, kv_heads, head_dim, .. } = case.shape;
        let cut = case.rows / 2;
        for hostile in [bf16::NAN, bf16::MAX] {
            let later = (case.position + cut) * kv_heads * head_dim;
            let mut other = Case::new([heads, kv_heads, head_dim, case.rows, case.position], case.elements);
            other.keys[later..].fill(hostile);
            other.values[later..].fill(hostile);
            let out = other.attend(&stream, other.filled(&stream, bf16::ZERO).as_mut(), None);
            let split = cut * heads * head_dim;
            assert!(bits(&out[..split]) == bits(&expected[..split]), "{hostile} from row {cut} on");
            if hostile.is_nan() {
                assert!(out[split..].iter().all(|x| x.is_nan()), "a NaN that is seen was lost");
            }
        }
    });
}

fn captured_is_eager_at_any_position(arm: &Arm) {
    let stream = arm.stream();
    each(|case| {
        let mut store = case.filled(&stream, bf16::NAN);
        let eager = case.attend(&stream, store.as_mut(), None);
        assert!(bits(&case.attend(&stream, store.as_mut(), None)) == bits(&eager), "repeated");
        assert!(
            bits(&case.attend(&stream, store.as_mut(), Some(0))) == bits(&eager),
            "captured at position 0"
        );
    });
}

fn bits(rows: &[bf16]) -> Vec<u16> {
    rows.iter().map(|x| x.to_bits()).collect()
}
