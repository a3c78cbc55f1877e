//! Calls inside a captured graph: the same bits as eager, every element written, nothing beside them touched.

use device::{Buffer, Graph};
use half::bf16;
use libtest_mimic::Trial;
use linear_proj::{Rows, RowsMut};

use crate::arm::{Arm, on_gpu};
use crate::random::Random;

pub fn trials() -> Vec<Trial> {
    vec![
        on_gpu("graph::replay_is_eager", replay_is_eager),
        on_gpu("graph::an_error_ends_the_capture", an_error_ends_the_capture),
    ]
}

fn replay_is_eager(arm: &Arm) {
    // The output is followed by a tail that no call may touch.
    const TAIL: usize = 4096;
    let poison = bf16::from_bits(0x7f7f);
    let stream = arm.stream();
    let cases = [("w8a16_static", 33), ("w8a16_static", 256), ("nvfp4_dynamic", 272), ("nvfp4_balance", 272)];
    for (n, (variant, k)) in [17, 1280, 6].into_iter().flat_map(|n| cases.map(|case| (n, case))) {
        let mut random = Random::new(41);
        let w = random.normals(n * k, 0.05);
        let mut proj = arm.bind(variant, &w, n, None).unwrap();
        for m in [1, 7, 8, 9, 16] {
            let x: Vec<bf16> = random.normals(m * k, 1.0).into_iter().map(bf16::from_f32).collect();
            let mut x_buffer = Buffer::from_host(&stream, &x, &[m, k]).unwrap();
            let mut y_buffer = Buffer::<bf16>::zeros(&stream, &[m * n + TAIL]).unwrap();
            let mut call = |x: &Buffer<bf16>, y: &mut Buffer<bf16>| {
                let y = y.view_mut().first(m * n)?;
                proj.project(Rows::device(x.view(), &stream, m, k)?, RowsMut::device(y, m, n)?)
            };
            let check = |y: Vec<bf16>, expected: &[bf16]| {
                assert_eq!(&y[..m * n], expected);
                assert!(
                    y[m * n..].iter().all(|&tail| tail == poison),
                    "{variant}, N = {n}, K = {k}, M = {m}: the tail"
                );
            };
            y_buffer.fill_bytes(&stream, 0x7f).unwrap();
            call(&x_buffer, &mut y_buffer).unwrap();
            let eager = y_buffer.to_host(&stream).unwrap();
            assert!(eager[..m * n].iter().all(|&y| y != poison), "every element is written");
            let expected = eager[..m * n].to_vec();
            check(eager, &expected);

            let mut graph = Graph::capture(&stream, |_| call(&x_buffer, &mut y_buffer)).unwrap();
            for _ in 0..3 {
                y_buffer.fill_bytes(&stream, 0x7f).unwrap();
                graph.launch().unwrap();
                check(y_buffer.to_host(&stream).unwrap(), &expected);
            }
            // A replay reads what is there now, not what was there at capture.
            let other: Vec<bf16> = random.normals(m * k, 1.0).into_iter().map(bf16::from_f32).collect();
            x_buffer.copy_from_host(&stream, &other).unwrap();
            graph.launch().unwrap();
            assert_ne!(&y_buffer.to_host(&stream).unwrap()[..m * n], &expected[..]);
            x_buffer.copy_from_host(&stream, &x).unwrap();
            graph.launch().unwrap();
            check(y_buffer.to_host(&stream).unwrap(), &expected);
        }
    }
}

fn an_error_ends_the_capture(arm: &Arm) {
    let stream = arm.stream();
    let refusal = Graph::capture(&stream, |_| Err(structure_core::Refusal::EmptyPrompt)).err();
    assert_eq!(refusal, Some(structure_core::Refusal::EmptyPrompt));
    let buffer = Buffer::from_host(&stream, &[1.0f32, 2.0], &[2]).unwrap();
    assert_eq!(buffer.to_host(&stream).unwrap(), [1.0, 2.0], "the stream is usable again");
}
