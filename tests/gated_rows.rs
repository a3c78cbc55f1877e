//! Gated rows that a projection makes itself: the bits of those that are made before.

use device::{Buffer, Graph};
use half::bf16;
use libtest_mimic::Trial;
use linear_proj::{Rows, RowsMut, Seat};
use qwen3_5::cuda::SiluMul;
use structure_core::Refusal;

use crate::arm::{Arm, on_gpu};
use crate::random::Random;

pub fn trials() -> Vec<Trial> {
    vec![
        on_gpu("gated_rows::are_those_made_before", are_those_made_before),
        on_gpu("gated_rows::no_form_and_no_fit", no_form_and_no_fit),
    ]
}

fn bf16s(random: &mut Random, len: usize, scale: f32) -> Vec<bf16> {
    random.normals(len, scale).into_iter().map(bf16::from_f32).collect()
}

fn are_those_made_before(arm: &Arm) {
    let stream = arm.stream();
    let poison = bf16::from_bits(0x7f7f);
    // Each way that a row has into the products: quantised by every block, by a cluster, by a kernel of its own; and a long one.
    let shapes = [(17, 272), (1000, 528), (1300, 336), (40_000, 80), (1044, 17_408)];
    for (variant, (n, k)) in
        ["nvfp4_dynamic", "nvfp4_balance"].into_iter().flat_map(|v| shapes.map(|s| (v, s)))
    {
        let mut random = Random::new((n + k) as u64);
        let w = random.normals(n * k, 0.05);
        let mut seat = Seat::without_host("seat", arm.bind(variant, &w, n, None).unwrap());
        for m in [1, 7, 8, 9, 16] {
            let mut gates = bf16s(&mut random, m * k, 3.0);
            // Both ends of the sigmoid, and a number that is none in the last row of several.
            gates[1] = bf16::from_f32(-200.0);
            gates[2] = bf16::from_f32(200.0);
            if m > 1 {
                gates[m * k - 1] = bf16::NAN;
            }
            let gate = Buffer::from_host(&stream, &gates, &[m, k]).unwrap();
            let up = Buffer::from_host(&stream, &bf16s(&mut random, m * k, 1.0), &[m, k]).unwrap();
            let mut made = Buffer::<bf16>::zeros(&stream, &[m, k]).unwrap();
            let mut ys = [0; 2].map(|_| Buffer::<bf16>::zeros(&stream, &[m, n]).unwrap());
            ys.iter_mut().for_each(|y| y.fill_bytes(&stream, 0x7f).unwrap());

            let (rows, width) = (m, k);
            let call = SiluMul { gate: gate.view(), up: up.view(), out: made.view_mut(), rows, width };
            call.queue(&stream).unwrap();
            let out = RowsMut::device(ys[0].view_mut(), m, n).unwrap();
            seat.project(Rows::device(made.view(), &stream, m, k).unwrap(), out).unwrap();
            let expected = ys[0].to_host(&stream).unwrap();

            let mut call = |y: &mut Buffer<bf16>| {
                let [gate, up] = [&gate, &up].map(|rows| Rows::device(rows.view(), &stream, m, k).unwrap());
                assert!(seat.project_gated(gate, up, RowsMut::device(y.view_mut(), m, n)?)?);
                Ok(())
            };
            call(&mut ys[1]).unwrap();
            let same = |y: &Buffer<bf16>, how: &str| {
                let y: Vec<u16> = y.to_host(&stream).unwrap().iter().map(|y| y.to_bits()).collect();
                let expected: Vec<u16> = expected.iter().map(|y| y.to_bits()).collect();
                assert!(y == expected, "{variant}, N = {n}, K = {k}, M = {m}, {how}");
                assert!(y.iter().all(|&y| y != poison.to_bits()));
            };
            same(&ys[1], "eager");
            let mut graph = Graph::capture(&stream, |_| call(&mut ys[1])).unwrap();
            ys[1].fill_bytes(&stream, 0x7f).unwrap();
            graph.launch().unwrap();
            same(&ys[1], "replayed");
        }
    }
}

fn out(y: &mut Buffer<bf16>, m: usize, n: usize) -> RowsMut<'_> {
    RowsMut::device(y.view_mut().first(m * n).unwrap(), m, n).unwrap()
}

fn no_form_and_no_fit(arm: &Arm) {
    let stream = arm.stream();
    let (n, k) = (48, 256);
    let w = Random::new(1).normals(n * k, 0.05);
    let seat = |variant| Seat::without_host("seat", arm.bind(variant, &w, n, None).unwrap());
    let rows = Buffer::<bf16>::zeros(&stream, &[17, k]).unwrap();
    let mut y = Buffer::<bf16>::zeros(&stream, &[17, n]).unwrap();
    let view = |m: usize| Rows::device(rows.view().first(m * k).unwrap(), &stream, m, k).unwrap();
    // One that has no form for it, and more rows than a step has: nothing is queued, and no call counted.
    let mut w8a16 = seat("w8a16_static");
    assert!(!w8a16.project_gated(view(1), view(1), out(&mut y, 1, n)).unwrap());
    let mut nvfp4 = seat("nvfp4_dynamic");
    assert!(!nvfp4.project_gated(view(17), view(17), out(&mut y, 17, n)).unwrap());
    for seat in [&w8a16, &nvfp4] {
        assert_eq!(seat.ledger_row().unwrap().2.calls, 0);
    }
    let refusal = nvfp4.project_gated(view(2), view(1), out(&mut y, 1, n)).unwrap_err();
    assert_eq!(refusal.to_string(), "seat: gate: shape [2, 256], expected [1, 256]");
    let floats = Buffer::<f32>::zeros(&stream, &[1, k]).unwrap();
    let gate = Rows::device(floats.view(), &stream, 1, k).unwrap();
    let refusal = nvfp4.project_gated(gate, view(1), out(&mut y, 1, n)).unwrap_err();
    assert!(matches!(refusal, Refusal::DTypeOutside { .. }), "{refusal}");
}
