//! Attention over both stores of keys and values, and what they hold: against a plain FP64 reference, and bit for bit where nothing
//! may change them.

use decode_loop::{Attend, KvOptions, KvRows, KvScale, KvShape, KvStore, MAX_QUERY_ROWS};
use decode_loop_fp8_kv::Fp8Kv;
use device::{Buffer, Graph, Stream};
use half::bf16;
use libtest_mimic::Trial;
use number_formats::e4m3;
use qwen3_5::cuda::Bf16Kv;
use structure_core::Refusal;

use crate::arm::{Arm, on_gpu};
use crate::random::Random;

pub fn trials() -> Vec<Trial> {
    vec![
        on_gpu("attention::results_are_within_the_bound", results_are_within_the_bound),
        on_gpu("attention::edges_of_pages_splits_and_windows", edges_of_pages_splits_and_windows),
        on_gpu("attention::a_row_is_itself_among_any_others", a_row_is_itself_among_any_others),
        on_gpu("attention::tails_and_tables_change_no_bit", tails_and_tables_change_no_bit),
        on_gpu("attention::a_graph_of_a_short_context_serves_a_long_one", a_graph_serves_a_long_context),
        on_gpu("attention::every_bf16_number_is_stored_as_its_code", every_number_is_stored_as_its_code),
        on_gpu("attention::what_does_not_fit_is_refused", what_does_not_fit_is_refused),
    ]
}

/// A store under test.
enum Store {
    Fp8(Box<Fp8Kv>),
    Bf16(Box<Bf16Kv>),
}

impl Store {
    /// Both stores of a shape. `page_size` and `scales` are for the FP8 store alone.
    fn both(stream: &Stream, shape: &KvShape, page_size: usize, scales: &[KvScale]) -> [Store; 2] {
        let options = KvOptions { page_size: Some(page_size), scales: Some(scales) };
        [
            Store::Fp8(Box::new(Fp8Kv::new(stream, shape, &options).unwrap())),
            Store::Bf16(Box::new(Bf16Kv::new(stream, shape).unwrap())),
        ]
    }

    fn kv(&mut self) -> &mut dyn KvStore {
        match self {
            Store::Fp8(store) => store.as_mut(),
            Store::Bf16(store) => store.as_mut(),
        }
    }

    fn is_fp8(&self) -> bool {
        matches!(self, Store::Fp8(_))
    }

    /// Overwrites all that is stored: with NaN codes for 0x7f in the one store and 0xff in both.
    fn fill(&mut self, stream: &Stream, byte: u8) {
        match self {
            Store::Fp8(store) => store.fill(stream, byte).unwrap(),
            Store::Bf16(store) => store.fill_bytes(stream, byte).unwrap(),
        }
    }

    /// What a stored element stands for.
    fn held(&self, element: bf16, scale: f32) -> f64 {
        match self {
            Store::Fp8(_) => {
                f64::from(e4m3::decode(e4m3::encode_saturating(element.to_f32() / scale))) * f64::from(scale)
            }
            Store::Bf16(_) => element.to_f64(),
        }
    }
}

/// Keys, values and queries of one layer, and the buffers that bring them to a store.
#[derive(Clone)]
struct Rows {
    shape: KvShape,
    stream: Stream,
    /// `[positions, kv_heads, head_dim]`.
    keys: Vec<bf16>,
    values: Vec<bf16>,
    /// `[MAX_QUERY_ROWS, heads, head_dim]`.
    queries: Vec<bf16>,
}

impl Rows {
    fn random(stream: &Stream, shape: &KvShape, positions: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut numbers = |len: usize, deviation| -> Vec<bf16> {
            random.normals(len, deviation).into_iter().map(bf16::from_f32).collect()
        };
        let width = shape.kv_heads * shape.head_dim;
        Rows {
            shape: *shape,
            stream: stream.clone(),
            keys: numbers(positions * width, 1.0),
            values: numbers(positions * width, 1.0),
            queries: numbers(MAX_QUERY_ROWS * shape.heads * shape.head_dim, 1.5),
        }
    }

    fn width(&self) -> usize {
        self.shape.kv_heads * self.shape.head_dim
    }

    fn query_width(&self) -> usize {
        self.shape.heads * self.shape.head_dim
    }

    fn position(&self, position: usize) -> Buffer<i32> {
        Buffer::from_host(&self.stream, &[position as i32], &[1]).unwrap()
    }

    /// Stores the rows of positions `first..end`.
    fn store(&self, store: &mut Store, layer: usize, first: usize, end: usize) {
        let elements = first * self.width()..end * self.width();
        let [keys, values] = [&self.keys, &self.values]
            .map(|rows| Buffer::from_host(&self.stream, &rows[elements.clone()], &[elements.len()]).unwrap());
        let position = self.position(first);
        let rows = KvRows {
            keys: keys.view(),
            values: values.view(),
            rows: end - first,
            position: position.view(),
            stream: &self.stream,
        };
        store.kv().append(layer, &rows).unwrap();
        self.stream.synchronize().unwrap();
    }

    /// The answers to query rows `rows` at positions from `position` on; what lies behind them is not touched.
    fn ask(
        &self,
        store: &mut Store,
        layer: usize,
        rows: std::ops::Range<usize>,
        position: usize,
    ) -> Vec<bf16> {
        const TAIL: usize = 512;
        let width = self.query_width();
        let queries = &self.queries[rows.start * width..rows.end * width];
        let queries = Buffer::from_host(&self.stream, queries, &[queries.len()]).unwrap();
        let position = self.position(position);
        let mut out = Buffer::<bf16>::zeros(&self.stream, &[queries.len() + TAIL]).unwrap();
        out.fill_bytes(&self.stream, 0x7f).unwrap();
        let attend = Attend {
            queries: queries.view(),
            out: &out.view_mut(),
            rows: rows.len(),
            position: position.view(),
            stream: &self.stream,
        };
        store.kv().attend(layer, &attend).unwrap();
        let mut out = out.to_host(&self.stream).unwrap();
        assert!(
            out[queries.len()..].iter().all(|element| element.to_bits() == 0x7f7f),
            "the tail is touched"
        );
        out.truncate(queries.len());
        out
    }

    /// The worst error of an answer of one head to query row `row` at `position`, as a fraction of the bound.
    fn error(
        &self,
        store: &Store,
        scales: &[KvScale],
        row: usize,
        position: usize,
        head: usize,
        got: &[bf16],
    ) -> f64 {
        let KvShape { heads, kv_heads, head_dim, .. } = self.shape;
        let kv_head = head / (heads / kv_heads);
        let scale = if store.is_fp8() { scales[kv_head] } else { KvScale::default() };
        let held = |rows: &[bf16], index: usize, scale: f32| -> Vec<f64> {
            let from = index * self.width() + kv_head * head_dim;
            rows[from..from + head_dim].iter().map(|&element| store.held(element, scale)).collect()
        };
        let from = row * self.query_width() + head * head_dim;
        let query: Vec<f64> = self.queries[from..from + head_dim].iter().map(|q| q.to_f64()).collect();
        let norm = (head_dim as f64).powf(-0.5);
        let mut scores = Vec::new();
        let mut magnitude = 0f64;
        for index in 0..=position {
            let products = query.iter().zip(held(&self.keys, index, scale.k)).map(|(q, k)| q * k * norm);
            let (sum, sizes) = products.fold((0.0, 0.0), |(sum, sizes), p| (sum + p, sizes + p.abs()));
            scores.push(sum);
            magnitude = magnitude.max(sizes);
        }
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut exact = vec![0.0; head_dim];
        let mut sizes = vec![0.0; head_dim];
        let mut all = vec![0.0; head_dim];
        for (index, weight) in weights.iter().enumerate() {
            for (d, value) in held(&self.values, index, scale.v).into_iter().enumerate() {
                exact[d] += weight * value / total;
                sizes[d] += (weight * value / total).abs();
                all[d] += value.abs() / total;
            }
        }
        let relative = relative_error(store.is_fp8(), head_dim, position + 1, magnitude);
        let mut worst = 0f64;
        for d in 0..head_dim {
            // F16 weights below its smallest normal lose an absolute amount.
            let small = if store.is_fp8() { 2f64.powi(-25) * all[d] } else { 0.0 };
            let bound = 2.0 * relative * sizes[d] + 2.0 * small + 2f64.powi(-8) * exact[d].abs();
            let error = (got[d].to_f64() - exact[d]).abs();
            assert!(error.is_finite(), "row {row} at {position}, head {head}, element {d}: {}", got[d]);
            worst = worst.max(error / bound);
        }
        worst
    }
}

/// How far a weight, and a sum by weights, may be off relatively. A score is a sum of `head_dim` products in FP32, each addition at
/// 2^-23 of the sum of magnitudes (docs/numerics.md), then scaled and subtracted; an error of a score is a relative error of its
/// weight, and of the largest score one of all. A weight is rounded to F16 or BF16, and the weighted sum has a product a position.
fn relative_error(fp8: bool, head_dim: usize, positions: usize, magnitude: f64) -> f64 {
    let step = 2f64.powi(-23);
    let score = (head_dim + head_dim / 16 + 32) as f64 * step * magnitude + 4.0 * step * magnitude;
    let rounding = if fp8 { 2f64.powi(-11) } else { 2f64.powi(-9) };
    let sum = (positions + positions / 16 + 64) as f64 * step;
    (2.0 * score).exp_m1() + rounding + sum
}

/// Uneven scales of each KV head.
fn uneven_scales(shape: &KvShape) -> Vec<KvScale> {
    (0..shape.layers * shape.kv_heads)
        .map(|i| KvScale { k: 0.75 + 0.5 * (i % 3) as f32, v: 0.03125 * (1 + i % 5) as f32 })
        .collect()
}

/// Shapes with every head size, groups of 1, 2, 6, 8 and 16, and every page size.
fn shapes(window: usize) -> Vec<(KvShape, usize)> {
    [
        (24, 4, 256, 64),
        (2, 2, 256, 16),
        (16, 2, 256, 128),
        (8, 4, 128, 256),
        (6, 1, 64, 32),
        (16, 1, 128, 64),
        (3, 3, 64, 16),
    ]
    .map(|(heads, kv_heads, head_dim, page)| (KvShape { layers: 2, heads, kv_heads, head_dim, window }, page))
    .to_vec()
}

fn shuffled(pages: usize, seed: u64) -> Vec<usize> {
    let mut random = Random::new(seed);
    let mut table: Vec<usize> = (0..pages).collect();
    for last in (1..pages).rev() {
        table.swap(last, (random.uniform() * last as f32) as usize);
    }
    table
}

fn results_are_within_the_bound(arm: &Arm) {
    let stream = arm.stream();
    for (shape, page) in shapes(4300) {
        let scales = uneven_scales(&shape);
        let layer_scales = &scales[shape.kv_heads..];
        let rows = Rows::random(&stream, &shape, shape.window, 3);
        for mut store in Store::both(&stream, &shape, page, &scales) {
            rows.store(&mut store, 1, 0, shape.window);
            let mut worst = 0f64;
            for position in [0, 1, 100, 1000, 4200] {
                for count in [1, 7, 32] {
                    let got = rows.ask(&mut store, 1, 0..count, position);
                    for (index, got) in got.chunks_exact(shape.head_dim).enumerate() {
                        let (row, head) = (index / shape.heads, index % shape.heads);
                        // The reference is slow: a few heads of long contexts will do.
                        if position < 200 && index % 5 == 0 || index % 61 == 7 || index == 0 {
                            let error = rows.error(&store, layer_scales, row, position + row, head, got);
                            worst = worst.max(error);
                        }
                    }
                }
            }
            assert!(worst <= 1.0, "{shape:?}, FP8 {}: {worst} of the bound", store.is_fp8());
        }
    }
}

/// Contexts that end just before, at and just past where pages, tiles, splits and the window do.
fn edges_of_pages_splits_and_windows(arm: &Arm) {
    let stream = arm.stream();
    for (shape, page) in shapes(8200 + 256).into_iter().take(3) {
        let scales = uneven_scales(&shape);
        let rows = Rows::random(&stream, &shape, shape.window, 4);
        for mut store in Store::both(&stream, &shape, page, &scales) {
            rows.store(&mut store, 0, 0, shape.window);
            for edge in [page, 64, 128, 256, 4096, 4096 + 256, 8192, shape.window] {
                for seq_len in [edge - 1, edge, edge + 1] {
                    if seq_len > shape.window {
                        continue;
                    }
                    let got = rows.ask(&mut store, 0, 0..1, seq_len - 1);
                    for head in [0, shape.heads - 1] {
                        let got = &got[head * shape.head_dim..][..shape.head_dim];
                        let error = rows.error(&store, &scales, 0, seq_len - 1, head, got);
                        assert!(error <= 1.0, "{shape:?}, {seq_len} positions: {error} of the bound");
                    }
                }
            }
        }
    }
}

/// The bits of a row are the same in any call, as seven single steps' are those of one pass, and whatever lies in the rows after it.
fn a_row_is_itself_among_any_others(arm: &Arm) {
    let stream = arm.stream();
    for (shape, page) in shapes(4400) {
        let scales = uneven_scales(&shape);
        let rows = Rows::random(&stream, &shape, shape.window, 5);
        let width = rows.query_width();
        for mut store in Store::both(&stream, &shape, page, &scales) {
            let fp8 = store.is_fp8();
            rows.store(&mut store, 0, 0, shape.window);
            for position in [0, 15, 40, 64, 120, 1000, 4090] {
                let all = rows.ask(&mut store, 0, 0..MAX_QUERY_ROWS, position);
                for count in [1, 2, 4, 7, 8, 9, 16, 31] {
                    let got = rows.ask(&mut store, 0, 0..count, position);
                    assert_eq!(
                        bits(&got),
                        bits(&all[..count * width]),
                        "{shape:?}, FP8 {fp8}: {count} rows at {position}"
                    );
                }
                for row in 0..7 {
                    let got = rows.ask(&mut store, 0, row..row + 1, position + row);
                    assert_eq!(
                        bits(&got),
                        bits(&all[row * width..][..width]),
                        "{shape:?}, FP8 {fp8}: row {row} at {position} alone"
                    );
                }
                // Rows from the fourth on are hostile: their queries, keys and values.
                let mut hostile = rows.clone();
                let spoil = [bf16::NAN, bf16::INFINITY, bf16::MAX, bf16::NEG_INFINITY];
                for (index, query) in hostile.queries[3 * width..].iter_mut().enumerate() {
                    *query = spoil[index % 4];
                }
                for index in (position + 3) * hostile.width()..(position + MAX_QUERY_ROWS) * hostile.width() {
                    hostile.keys[index] = spoil[(index + 1) % 4];
                    hostile.values[index] = spoil[index % 3];
                }
                hostile.store(&mut store, 0, position + 3, position + MAX_QUERY_ROWS);
                for count in [7, MAX_QUERY_ROWS] {
                    let got = hostile.ask(&mut store, 0, 0..count, position);
                    assert_eq!(
                        bits(&got[..3 * width]),
                        bits(&all[..3 * width]),
                        "{shape:?}, FP8 {fp8}: {count} rows at {position}, hostile from the fourth on"
                    );
                    assert!(
                        got[3 * width..].iter().all(|element| !element.is_finite()),
                        "what is spoiled shows"
                    );
                }
                rows.store(&mut store, 0, position + 3, position + MAX_QUERY_ROWS);
            }
        }
    }
}

/// What lies past the end, how large pages are and where they lie changes no bit; calls repeat.
fn tails_and_tables_change_no_bit(arm: &Arm) {
    let stream = arm.stream();
    for (shape, _) in shapes(1000) {
        let scales = uneven_scales(&shape);
        let rows = Rows::random(&stream, &shape, shape.window, 6);
        let seq_lens = [5, 16, 130, 700, 961];
        let answers = |store: &mut Store, fill: u8| -> Vec<Vec<u16>> {
            store.fill(&stream, fill);
            let mut stored = 0;
            let mut answers = Vec::new();
            for seq_len in seq_lens {
                rows.store(store, 1, stored, seq_len);
                stored = seq_len;
                for count in [1, 5] {
                    let position = seq_len - count;
                    answers.push(bits(&rows.ask(store, 1, 0..count, position)));
                    assert_eq!(
                        answers.last(),
                        Some(&bits(&rows.ask(store, 1, 0..count, position))),
                        "a repeat"
                    );
                }
            }
            answers
        };
        let [mut fp8, mut bf16] = Store::both(&stream, &shape, 64, &scales);
        for store in [&mut fp8, &mut bf16] {
            let expected = answers(store, 0);
            for fill in [0x7f, 0xff, 0x7e] {
                assert_eq!(
                    answers(store, fill),
                    expected,
                    "{shape:?}, FP8 {}: tails of {fill:#x}",
                    store.is_fp8()
                );
            }
        }
        let expected = answers(&mut fp8, 0);
        for page_size in [16, 32, 64, 128, 256, 1024] {
            let options = KvOptions { page_size: Some(page_size), scales: Some(&scales) };
            let mut store = Fp8Kv::new(&stream, &shape, &options).unwrap();
            assert_eq!(store.page_size(), page_size);
            store.assign_pages(&stream, &shuffled(shape.window.div_ceil(page_size), 7)).unwrap();
            assert_eq!(
                answers(&mut Store::Fp8(Box::new(store)), 0x7f),
                expected,
                "{shape:?}: pages of {page_size}"
            );
        }
    }
}

/// Captured where the context is short, replayed where it is long: the bits of an eager call, with nothing beside them written.
fn a_graph_serves_a_long_context(arm: &Arm) {
    let stream = arm.stream();
    for (shape, page) in shapes(20_000).into_iter().take(4) {
        let scales = uneven_scales(&shape);
        let rows = Rows::random(&stream, &shape, shape.window, 8);
        for mut store in Store::both(&stream, &shape, page, &scales) {
            rows.store(&mut store, 0, 0, shape.window);
            for count in [1, 7] {
                let width = rows.query_width();
                let queries =
                    Buffer::from_host(&stream, &rows.queries[..count * width], &[count, width]).unwrap();
                let mut out = Buffer::<bf16>::zeros(&stream, &[count + 1, width]).unwrap();
                let mut position = rows.position(0);
                let call = |store: &mut Store, out: &mut Buffer<bf16>, position: &Buffer<i32>| {
                    store.kv().attend(
                        0,
                        &Attend {
                            queries: queries.view(),
                            out: &out.view_mut(),
                            rows: count,
                            position: position.view(),
                            stream: &stream,
                        },
                    )
                };
                let mut graph = Graph::capture(&stream, |_| {
                    call(&mut store, &mut out, &position)?;
                    call(&mut store, &mut out, &position)
                })
                .unwrap();
                for at in [0, 100, 5000, 19_000, 3] {
                    position.copy_from_host(&stream, &[at as i32]).unwrap();
                    out.fill_bytes(&stream, 0x7f).unwrap();
                    graph.launch().unwrap();
                    let replayed = out.to_host(&stream).unwrap();
                    let eager = rows.ask(&mut store, 0, 0..count, at);
                    assert_eq!(
                        bits(&replayed[..count * width]),
                        bits(&eager),
                        "{shape:?}: {count} rows at {at}"
                    );
                    assert!(
                        replayed[count * width..].iter().all(|element| element.to_bits() == 0x7f7f),
                        "the tail"
                    );
                }
            }
        }
    }
}

/// All BF16 numbers under several scales, byte for byte; and nothing but their places is written.
fn every_number_is_stored_as_its_code(arm: &Arm) {
    let stream = arm.stream();
    let (positions, first) = (64, 5);
    let shape = KvShape { layers: 2, heads: 4, kv_heads: 4, head_dim: 256, window: first + positions - 1 };
    let scales: Vec<KvScale> = [1.0, 0.37, 448.0, 1e-30, 3e38, 0.001, 1.0, 17.0]
        .iter()
        .map(|&k| KvScale { k, v: 1.0 / k })
        .collect();
    // Every head sees every number, in four turns.
    let numbers = |turn: usize| -> Vec<bf16> {
        (0..positions * 4 * 256).map(|i| bf16::from_bits((i + turn * 256) as u16)).collect()
    };
    for turn in 0..4 {
        let options = KvOptions { page_size: Some(16), scales: Some(&scales) };
        let mut store = Fp8Kv::new(&stream, &shape, &options).unwrap();
        let pages = shape.window.div_ceil(16);
        let table = shuffled(pages, 9);
        store.assign_pages(&stream, &table).unwrap();
        store.fill(&stream, 0x55).unwrap();
        let keys = Buffer::from_host(&stream, &numbers(turn), &[positions * 1024]).unwrap();
        let values = Buffer::from_host(&stream, &numbers(turn + 2), &[positions * 1024]).unwrap();
        let position = Buffer::from_host(&stream, &[first as i32], &[1]).unwrap();
        let rows = KvRows {
            keys: keys.view(),
            values: values.view(),
            rows: positions,
            position: position.view(),
            stream: &stream,
        };
        store.append(1, &rows).unwrap();
        let untouched = store.codes(&stream, 0).unwrap();
        assert!(untouched.iter().flatten().all(|&code| code == 0x55), "the other layer");
        let codes = store.codes(&stream, 1).unwrap();
        for (of_values, codes) in codes.iter().enumerate() {
            let numbers = numbers(turn + 2 * of_values);
            let mut expected = vec![0x55; codes.len()];
            // The last row is past the window.
            for (index, number) in numbers[..(positions - 1) * 1024].iter().enumerate() {
                let (row, head, d) = (index / 1024, index / 256 % 4, index % 256);
                let at = first + row;
                let scale = [scales[4 + head].k, scales[4 + head].v][of_values];
                let x = number.to_f32();
                let code = e4m3::encode_saturating(if x.is_nan() { x } else { x / scale });
                expected[((table[at / 16] * 4 + head) * 16 + at % 16) * 256 + d] = code;
                assert!(x.is_nan() || code & 0x7f != 0x7f, "a number became NaN");
            }
            assert!(codes == &expected, "turn {turn}, values {of_values}");
        }
    }
}

fn what_does_not_fit_is_refused(arm: &Arm) {
    let stream = arm.stream();
    let shape = KvShape { layers: 1, heads: 4, kv_heads: 2, head_dim: 64, window: 100 };
    let scales = uneven_scales(&shape);
    let kv = decode_loop::Door::of(&decode_loop_fp8_kv::ENTRY).unwrap().kv().unwrap();
    for mut store in Store::both(&stream, &shape, 16, &scales) {
        let expected = match &store {
            Store::Fp8(_) => (kv.bytes)(&shape, &KvOptions { page_size: Some(16), scales: Some(&scales) }),
            Store::Bf16(_) => Bf16Kv::bytes_of(&shape),
        };
        assert_eq!(store.kv().bytes(), expected);
        assert_eq!(store.kv().shape(), shape);
        let rows = Buffer::<bf16>::zeros(&stream, &[7 * 256]).unwrap();
        let wrong = Buffer::<f32>::zeros(&stream, &[8 * 256]).unwrap();
        let mut out = Buffer::<bf16>::zeros(&stream, &[8 * 256]).unwrap();
        let position = Buffer::<i32>::zeros(&stream, &[1]).unwrap();
        let out = out.view_mut();
        let attend =
            |queries, rows| Attend { queries, out: &out, rows, position: position.view(), stream: &stream };
        let append =
            |keys, rows| KvRows { keys, values: keys, rows, position: position.view(), stream: &stream };
        assert!(store.kv().attend(0, &attend(rows.view(), 7)).is_ok());
        assert!(matches!(store.kv().attend(0, &attend(rows.view(), 8)), Err(Refusal::ShapeMismatch { .. })));
        assert!(matches!(store.kv().attend(0, &attend(wrong.view(), 8)), Err(Refusal::DTypeOutside { .. })));
        assert!(matches!(store.kv().attend(1, &attend(rows.view(), 1)), Err(Refusal::ValueOutside { .. })));
        assert!(store.kv().append(0, &append(rows.view(), 14)).is_ok());
        assert!(matches!(store.kv().append(0, &append(rows.view(), 15)), Err(Refusal::ShapeMismatch { .. })));
        assert!(matches!(store.kv().append(0, &append(wrong.view(), 1)), Err(Refusal::DTypeOutside { .. })));
        assert!(matches!(store.kv().append(1, &append(rows.view(), 1)), Err(Refusal::ValueOutside { .. })));
        stream.synchronize().unwrap();
    }
    // More memory than there is: refused before anything is taken, with the bytes that were asked for.
    let free = stream.device().memory().unwrap().free;
    let huge = KvShape { layers: 64, heads: 64, kv_heads: 64, head_dim: 256, window: 1 << 24 };
    let refusals = [
        (Fp8Kv::new(&stream, &huge, &KvOptions::default()).err(), (kv.bytes)(&huge, &KvOptions::default())),
        (Bf16Kv::new(&stream, &huge).err(), Bf16Kv::bytes_of(&huge)),
    ];
    for (refusal, bytes) in refusals {
        assert!(matches!(refusal, Some(Refusal::OutOfMemory { asked, .. }) if asked == bytes), "{refusal:?}");
    }
    assert_eq!(stream.device().memory().unwrap().free, free);
}

fn bits(elements: &[bf16]) -> Vec<u16> {
    elements.iter().map(|element| element.to_bits()).collect()
}
