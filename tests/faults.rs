//! What an implementation is given wrongly is refused with the thing, its value and its bound.

use device::{Buffer, CudaDevice, Device};
use libtest_mimic::Trial;
use linear_proj::{Bind, DenseWeights, Rows, RowsMut};
use structure_core::{DType, Refusal};

use crate::arm::{Arm, on_each_arm, on_gpu};

pub fn trials() -> Vec<Trial> {
    [
        on_each_arm("w8a16::bad_binds_are_refused", bad_binds_are_refused),
        on_each_arm("w8a16::bad_rows_are_refused", bad_rows_are_refused),
    ]
    .into_iter()
    .flatten()
    .chain([
        on_gpu("device::too_much_memory_is_refused", too_much_memory_is_refused),
        on_gpu("device::an_absent_ordinal_is_refused", an_absent_ordinal_is_refused),
        Trial::test("device::no_driver_is_a_refusal", || {
            // Whether there is one or not, asking must not panic.
            if let Err(refusal) = CudaDevice::open(0) {
                assert!(matches!(refusal, Refusal::NoDevice { .. }), "{refusal}");
            }
            Ok(())
        }),
    ])
    .collect()
}

fn bad_binds_are_refused(arm: &Arm) {
    let refusal = |w: &[f32], n: usize, bias: Option<&[f32]>| {
        arm.bind("w8a16_static", w, n, bias).err().map(|refusal| refusal.to_string()).unwrap_or_default()
    };
    assert_eq!(refusal(&[], 0, None), "seat: N = 0 is outside 1..=2147483648");
    assert_eq!(refusal(&[], 4, None), "seat: K = 0 is outside 1..=16777216");
    let mut w = vec![1.0f32; 64];
    w[37] = f32::NAN;
    assert_eq!(refusal(&w, 4, None), "seat: weights: element 37 is NaN; it must be finite");
    w[37] = f32::INFINITY;
    assert_eq!(refusal(&w, 4, None), "seat: weights: element 37 is inf; it must be finite");
    w[37] = 0.5;
    assert_eq!(refusal(&w, 4, Some(&[0.0; 3])), "seat: bias: shape [3], expected [4]");
    let bias = [0.0, f32::NAN, 0.0, 0.0];
    assert_eq!(refusal(&w, 4, Some(&bias)), "seat: bias: element 1 is NaN; it must be finite");

    let door = structures::linear_proj("w8a16_static").unwrap();
    let f16 = DenseWeights::new(1, 2, DType::F16, &[0x00, 0x3c, 0x00, 0x7c]).unwrap();
    let bind = Bind { seat: "seat", weights: f16, bias: None, device: &arm.device };
    let refusal = door.bind(&bind).err().map(|refusal| refusal.to_string());
    assert_eq!(refusal.as_deref(), Some("seat: weights: element 1 is inf; it must be finite"));
}

fn bad_rows_are_refused(arm: &Arm) {
    let (n, k) = (4, 16);
    let w = vec![0.5f32; n * k];
    let mut proj = arm.bind_staged("w8a16_static", &w, n, None);
    let mut y = vec![0f32; 17 * n];
    let mut call = |m: usize, width: usize, out: usize| {
        let x = vec![1f32; m * width];
        let output = RowsMut::host(&mut y[..out * n], out, n).unwrap();
        proj.project(Rows::host(&x[..], m, width).unwrap(), output).err().map(|refusal| refusal.to_string())
    };
    assert_eq!(call(1, 16, 1), None);
    assert_eq!(call(1, 15, 1).as_deref(), Some("seat: input rows: shape [1, 15], expected [1, 16]"));
    assert_eq!(call(2, 16, 1).as_deref(), Some("seat: output rows: shape [1, 4], expected [2, 4]"));
    assert!(call(17, 16, 17).is_some(), "more rows than the band");

    // Rows on the other side than the seat: host rows for a seat that was bound on a GPU and is not staged.
    if let Device::Cuda(_) = arm.device {
        let mut proj = arm.bind("w8a16_static", &w, n, None).unwrap();
        let (x, mut y) = (vec![1f32; k], vec![0f32; n]);
        let output = RowsMut::host(&mut y[..], 1, n).unwrap();
        let refusal = proj.project(Rows::host(&x[..], 1, k).unwrap(), output).unwrap_err().to_string();
        assert_eq!(refusal, "seat: rows are on cpu, the seat is on cuda:0");
    }
}

fn too_much_memory_is_refused(arm: &Arm) {
    let stream = arm.stream();
    let free = stream.device().memory().unwrap().free;
    for elements in [1usize << 50, usize::MAX] {
        match Buffer::<f32>::zeros(&stream, &[elements]) {
            Err(Refusal::OutOfMemory { asked, free: seen, .. }) => {
                assert!(asked > seen && seen <= free.next_power_of_two());
            }
            other => panic!("{:?}", other.map(|buffer| buffer.len())),
        }
    }
}

fn an_absent_ordinal_is_refused(_: &Arm) {
    let refusal = CudaDevice::open(4096).err().map(|refusal| refusal.to_string()).unwrap_or_default();
    assert!(refusal.starts_with("no CUDA device: device 4096 was asked for, the driver lists "), "{refusal}");
}
