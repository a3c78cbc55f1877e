//! Projections of the same rows in one launch: each as close to the reference as alone, and row-invariant; in fewer launches; and
//! what cannot be in one launch projects by itself.

use std::iter;
use std::ops::Range;

use device::{Buffer, Graph, Stream};
use half::bf16;
use libtest_mimic::Trial;
use linear_proj::{BoundProj, LinearProj, Rows, RowsMut, Seat, Staged, Together, gates};
use structure_core::{Form, Receipt, Refusal};

use crate::arm::{Arm, on_each_arm, on_gpu};
use crate::gates::VARIANTS;
use crate::random::Random;

/// Features of each, and K: row groups in every range by which a kernel is chosen, ends inside a group, and one member of few.
const CASES: &[(&[usize], usize)] = &[
    (&[40, 17, 300], 272),
    (&[16, 1, 1024, 5000], 320),
    (&[9000, 3000], 320),
    (&[12_288, 1024, 1024], 320),
    (&[17_000, 40, 1000], 144),
    (&[17_408, 17_408], 128),
    (&[33_800, 48, 48, 9000], 48),
];

pub fn trials() -> Vec<Trial> {
    on_each_arm("together::seats_count_their_own_calls", seats_count_their_own_calls)
        .into_iter()
        .chain([
            on_gpu("together::close_and_row_invariant", close_and_row_invariant),
            on_gpu("together::one_launch_where_it_can_be", one_launch_where_it_can_be),
            #[cfg(kernels_built)]
            on_gpu("together::the_hosts_own_form", of_the_host::close_and_row_invariant),
        ])
        .collect()
}

/// One of several projections that always project together; the others' results are thrown away.
struct Among {
    all: Vec<Box<dyn BoundProj>>,
    spare: Vec<Buffer<f32>>,
    which: usize,
}

impl Among {
    fn new(stream: &Stream, all: Vec<Box<dyn BoundProj>>) -> Self {
        let spare = all.iter().map(|proj| Buffer::zeros(stream, &[16 * proj.n()]).unwrap()).collect();
        Among { all, spare, which: 0 }
    }
}

impl LinearProj for Among {
    fn n(&self) -> usize {
        self.all[self.which].n()
    }

    fn k(&self) -> usize {
        self.all[self.which].k()
    }

    fn project(&mut self, x: Rows<'_>, y: RowsMut<'_>) -> Result<(), Refusal> {
        let mut y = Some(y);
        let mut calls = Vec::new();
        for (index, (proj, spare)) in self.all.iter_mut().zip(&mut self.spare).enumerate() {
            let n = proj.n();
            let y = match y.take_if(|_| index == self.which) {
                Some(y) => y,
                None => RowsMut::device(spare.view_mut().first(x.rows() * n)?, x.rows(), n)?,
            };
            calls.push(Some(Together { proj: &mut **proj, y }));
        }
        for index in 0..calls.len() {
            let (first, others) = calls[index..].split_at_mut(1);
            if let Some(Together { proj, y }) = first[0].take() {
                proj.project_with(x, y, others)?;
            }
        }
        Ok(())
    }
}

impl BoundProj for Among {
    fn form(&self) -> Form {
        self.all[self.which].form()
    }

    fn receipt(&self) -> &Receipt {
        self.all[self.which].receipt()
    }

    fn operand(&self, row: &[f32]) -> Vec<f32> {
        self.all[self.which].operand(row)
    }

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        self.all[self.which].dequantized(features)
    }
}

fn close_and_row_invariant(arm: &Arm) {
    let stream = arm.stream();
    for (variant, &(ns, k)) in
        VARIANTS.iter().flat_map(|variant| CASES.iter().map(move |case| (variant, case)))
    {
        let mut random = Random::new((ns.len() + k) as u64);
        let biases: Vec<_> = ns.iter().map(|&n| (n % 3 == 0).then(|| random.normals(n, 1.0))).collect();
        let bound = ns.iter().zip(&biases).enumerate().map(|(index, (&n, bias))| {
            // Scales of its own for each, so that one taken for another's shows.
            let w = random.normals(n * k, 0.05 * (index + 1) as f32);
            arm.bind(variant, &w, n, bias.as_deref()).unwrap()
        });
        let mut among = Among::new(&stream, bound.collect());
        let x = random.normals(16 * k, 1.0);
        for (which, &n) in ns.iter().enumerate() {
            among.which = which;
            let mut staged = Staged::with_rows(among, &stream, 16).unwrap();
            for (m, features) in
                [1, 5, 8, 9, 16].into_iter().flat_map(|m| [(m, 0..n.min(40)), (m, n.max(40) - 40..n)])
            {
                let bias = biases[which].as_deref();
                gates::against_reference(&mut staged, bias, &x[..m * k], m, features).unwrap();
            }
            gates::row_invariance(&mut staged, &x).unwrap();
            among = staged.into_inner();
        }
    }
}

/// How many kernels a graph of one call has, and its results, after a replay over poison; they are those of an eager call.
fn captured(stream: &Stream, projs: Vec<Box<dyn BoundProj>>, m: usize) -> (usize, Vec<Vec<bf16>>) {
    let k = projs[0].k();
    let x: Vec<bf16> = Random::new(3).normals(m * k, 1.0).into_iter().map(bf16::from_f32).collect();
    let x = Buffer::from_host(stream, &x, &[m, k]).unwrap();
    let mut seats: Vec<_> = projs.into_iter().map(|proj| Seat::without_host("seat", proj)).collect();
    // A row more than the call has: what lies behind is nobody's.
    let mut ys: Vec<_> =
        seats.iter().map(|seat| Buffer::<bf16>::zeros(stream, &[m + 1, seat.n()]).unwrap()).collect();
    let poison = |ys: &mut Vec<Buffer<bf16>>| ys.iter_mut().for_each(|y| y.fill_bytes(stream, 0x7f).unwrap());
    let results = |ys: &[Buffer<bf16>]| -> Vec<_> { ys.iter().map(|y| y.to_host(stream).unwrap()).collect() };
    let mut call = |ys: &mut Vec<Buffer<bf16>>| {
        let rows = Rows::device(x.view(), stream, m, k)?;
        let seats = seats.iter_mut().zip(ys).map(|(seat, y)| {
            let n = seat.n();
            (seat, RowsMut::device(y.view_mut().first(m * n).unwrap(), m, n).unwrap())
        });
        Seat::project_together(rows, seats)
    };
    poison(&mut ys);
    call(&mut ys).unwrap();
    let eager = results(&ys);
    let mut graph = Graph::capture(stream, |_| call(&mut ys)).unwrap();
    for _ in 0..3 {
        poison(&mut ys);
        graph.launch().unwrap();
        assert!(results(&ys) == eager, "a replay gives the bits of an eager call");
    }
    let poison = bf16::from_bits(0x7f7f);
    for (y, whole) in ys.iter().zip(&eager) {
        let n = y.shape()[1];
        assert!(whole[..m * n].iter().all(|&y| y != poison), "every element is written");
        assert!(whole[m * n..].iter().all(|&y| y == poison), "and nothing behind them");
    }
    (graph.nodes().unwrap(), eager)
}

fn one_launch_where_it_can_be(arm: &Arm) {
    let stream = arm.stream();
    let (ns, k) = ([300, 17, 1000], 272);
    for m in [1, 7, 16] {
        let bind = |variants: [&str; 3]| -> Vec<Box<dyn BoundProj>> {
            let mut random = Random::new(77);
            let bound = ns.iter().zip(variants);
            bound
                .map(|(&n, variant)| arm.bind(variant, &random.normals(n * k, 0.05), n, None).unwrap())
                .collect()
        };
        let launches = |variants| captured(&stream, bind(variants), m).0;
        let one = |variant: &str, index: usize| {
            let proj = bind([variant; 3]).swap_remove(index);
            captured(&stream, vec![proj], m).0
        };
        // All of a kind: as many as one of them takes.
        assert_eq!(launches(["w8a16_static"; 3]), 1, "M = {m}");
        assert_eq!(launches(["nvfp4_dynamic"; 3]), one("nvfp4_dynamic", 2), "M = {m}");
        // A kind of its own keeps its launch, wherever it stands, and its bits.
        let mixed = bind(["w8a16_static", "nvfp4_dynamic", "w8a16_static"]);
        let alone = captured(&stream, vec![bind(["nvfp4_dynamic"; 3]).swap_remove(1)], m).1;
        let (nodes, results) = captured(&stream, mixed, m);
        assert_eq!(nodes, 1 + one("nvfp4_dynamic", 1), "M = {m}");
        assert!(results[1] == alone[0], "M = {m}");
        // Rows that are divided by factors of one seat are not another's.
        let each: usize = (0..3).map(|index| one("nvfp4_balance", index)).sum();
        assert_eq!(launches(["nvfp4_balance"; 3]), each, "M = {m}");
    }
    // More rows than the decode band has: each by itself, as it would.
    let bind = || {
        ns.map(|n| arm.bind("nvfp4_dynamic", &Random::new(n as u64).normals(n * k, 0.05), n, None).unwrap())
    };
    let (_, together) = captured(&stream, bind().into(), 40);
    for (proj, together) in bind().into_iter().zip(together) {
        assert!(captured(&stream, vec![proj], 40).1[0] == together);
    }
}

fn seats_count_their_own_calls(arm: &Arm) {
    let (n, k, m) = (24, 80, 3);
    let w = Random::new(4).normals(n * k, 0.2);
    let x = Random::new(5).normals(m * k, 1.0);
    let mut seats: Vec<_> = ["w8a16_static", "nvfp4_dynamic"]
        .iter()
        .map(|variant| Seat::without_host(*variant, arm.bind_staged(variant, &w, n, None)))
        .collect();
    let mut ys = [vec![f32::NAN; m * n], vec![f32::NAN; m * n]];
    let rows = || Rows::host(&x[..], m, k).unwrap();
    let calls = seats.iter_mut().zip(&mut ys);
    let calls = calls.map(|(seat, y)| (seat, RowsMut::host(&mut y[..], m, n).unwrap()));
    Seat::project_together(rows(), calls).unwrap();
    for (seat, y) in seats.iter_mut().zip(&ys) {
        assert_eq!(seat.ledger_row().unwrap().2.served, 1);
        let mut alone = vec![f32::NAN; m * n];
        seat.project(rows(), RowsMut::host(&mut alone[..], m, n).unwrap()).unwrap();
        assert_eq!(*y, alone);
    }
    // Rows that one of them refuses are refused by name.
    let mut narrow = vec![0.0; m * (n - 1)];
    let y = RowsMut::host(&mut narrow[..], m, n - 1).unwrap();
    let refusal = Seat::project_together(rows(), iter::once((&mut seats[1], y))).unwrap_err();
    assert!(matches!(refusal, Refusal::ShapeMismatch { .. }), "{refusal}");
}

#[cfg(kernels_built)]
mod of_the_host {
    use linear_proj::{DenseWeights, Rows, RowsMut, Seat};
    use qwen3_5::cuda::Bf16Linear;

    use super::*;

    /// Exact sums of small integers: whatever the slices, each feature has to have its own.
    pub fn close_and_row_invariant(arm: &Arm) {
        let stream = arm.stream();
        for &(ns, k) in CASES {
            let mut random = Random::new(k as u64);
            let ws: Vec<Vec<f32>> =
                ns.iter().map(|&n| (0..n * k).map(|_| random.integer(8)).collect()).collect();
            let mut seats: Vec<_> = ns
                .iter()
                .zip(&ws)
                .map(|(&n, w)| {
                    let weights = DenseWeights::from_f32(n, k, w).unwrap();
                    Seat::new("seat", Box::new(Bf16Linear::new(&stream, "seat", weights).unwrap()))
                })
                .collect();
            for m in [1, 8, 9, 16] {
                let x: Vec<f32> = (0..m * k).map(|_| random.integer(8)).collect();
                let x_buffer = Buffer::from_host(&stream, &x, &[m, k]).unwrap();
                let mut ys: Vec<_> =
                    ns.iter().map(|&n| Buffer::<f32>::zeros(&stream, &[m, n]).unwrap()).collect();
                let rows = Rows::device(x_buffer.view(), &stream, m, k).unwrap();
                let calls = seats.iter_mut().zip(&mut ys).zip(ns);
                let calls = calls.map(|((seat, y), &n)| (seat, RowsMut::device(y.view_mut(), m, n).unwrap()));
                let mut calls = Some(calls);
                let mut graph = Graph::capture(&stream, |_| {
                    calls.take().map_or(Ok(()), |calls| Seat::project_together(rows, calls))
                })
                .unwrap();
                assert_eq!(graph.nodes().unwrap(), 1);
                graph.launch().unwrap();
                for ((y, w), &n) in ys.iter().zip(&ws).zip(ns) {
                    let y = y.to_host(&stream).unwrap();
                    for (row, x) in x.chunks(k).enumerate() {
                        for (feature, w) in w.chunks(k).enumerate() {
                            let exact: f32 = w.iter().zip(x).map(|(w, x)| w * x).sum();
                            assert_eq!(y[row * n + feature], exact, "{ns:?}, M = {m}, y[{row}, {feature}]");
                        }
                    }
                }
            }
        }
    }
}
