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
        on_gpu("graph::a_chain_is_its_calls", a_chain_is_its_calls),
    ]
}

fn replay_is_eager(arm: &Arm) {
    // The output is followed by a tail that no call may touch.
    const TAIL: usize = 4096;
    let poison = bf16::from_bits(0x7f7f);
    let stream = arm.stream();
    let cases = [("w8a16_static", 33), ("w8a16_static", 256), ("nvfp4_dynamic", 272), ("nvfp4_balance", 272)];
    for (n, (variant, k)) in [17, 1280, 9000, 20_000, 6].into_iter().flat_map(|n| cases.map(|case| (n, case)))
    {
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

/// Each call reads what the one before wrote, through the same seats and their scratch: kernels that start early must wait for it.
/// The same bits as one call at a time without overlap.
fn a_chain_is_its_calls(arm: &Arm) {
    const LINKS: usize = 24;
    let stream = arm.stream();
    for (variant, width) in ["w8a16_static", "nvfp4_dynamic", "nvfp4_balance"]
        .into_iter()
        .flat_map(|variant| [(variant, 256), (variant, 1280), (variant, 8224)])
    {
        let mut random = Random::new(width as u64);
        let deviation = 1.0 / (width as f32).sqrt();
        let mut seats: Vec<_> = (0..2)
            .map(|_| arm.bind(variant, &random.normals(width * width, deviation), width, None).unwrap())
            .collect();
        for m in [1, 8, 16] {
            let x: Vec<bf16> = random.normals(m * width, 1.0).into_iter().map(bf16::from_f32).collect();
            let mut rows: Vec<_> =
                (0..=LINKS).map(|_| Buffer::<bf16>::zeros(&stream, &[m, width]).unwrap()).collect();
            rows[0].copy_from_host(&stream, &x).unwrap();
            let mut link = |rows: &mut [Buffer<bf16>], index: usize| {
                let (from, to) = rows[index..index + 2].split_at_mut(1);
                let output = RowsMut::device(to[0].view_mut(), m, width)?;
                seats[index % 2].project(Rows::device(from[0].view(), &stream, m, width)?, output)
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
                rows[1..].iter_mut().for_each(|rows| rows.fill_bytes(&stream, 0x7f).unwrap());
                graph.launch().unwrap();
                for (index, (rows, alone)) in rows.iter().zip(&alone).enumerate() {
                    let got = rows.to_host(&stream).unwrap();
                    assert_eq!(
                        &got, alone,
                        "{variant}, width {width}, M = {m}, link {index}, replay {replay}"
                    );
                }
            }
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
