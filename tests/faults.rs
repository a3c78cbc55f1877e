//! What an implementation is given wrongly is refused with the thing, its value and its bound.

use device::{Buffer, CudaDevice, Device};
use libtest_mimic::Trial;
use linear_proj::{
    Bind, BoundProj, DenseWeights, Door, LinearProj, Options, Rows, RowsMut, RowsMutData, gates,
};
use number_formats::nvfp4::Nvfp4View;
use structure_core::{Arch, ComputeCapability, DType, Form, Kernels, Receipt, Refusal, Registration};

use crate::arm::{Arm, on_each_arm, on_gpu, uneven_amax};
use crate::gates::VARIANTS;

const N: usize = 4;
const K: usize = 16;

pub fn trials() -> Vec<Trial> {
    [
        on_each_arm("faults::bad_weights", |arm| VARIANTS.iter().for_each(|v| bad_weights(arm, v))),
        on_each_arm("faults::bad_packed_weights", |arm| {
            VARIANTS.iter().for_each(|v| bad_packed_weights(arm, v))
        }),
        on_each_arm("faults::dims_outside_the_envelope", dims_outside_the_envelope),
        on_each_arm("faults::bad_calibrations", bad_calibrations),
        on_each_arm("faults::bad_rows", |arm| VARIANTS.iter().for_each(|v| bad_rows(arm, v))),
        on_each_arm("faults::features_past_n", |arm| VARIANTS.iter().for_each(|v| features_past_n(arm, v))),
        on_each_arm("faults::gates_see_a_wrong_result", |arm| {
            VARIANTS.iter().for_each(|v| wrong_results(arm, v))
        }),
    ]
    .into_iter()
    .flatten()
    .chain([
        on_gpu("faults::rows_elsewhere", |arm| VARIANTS.iter().for_each(|v| rows_elsewhere(arm, v))),
        on_gpu("faults::kernels_that_do_not_run_here", |arm| {
            VARIANTS.iter().for_each(|v| kernels_elsewhere(arm, v))
        }),
        on_gpu("device::too_much_memory_is_refused", too_much_memory_is_refused),
        on_gpu("device::an_absent_ordinal_is_refused", an_absent_ordinal_is_refused),
        Trial::test("faults::kernels_say_what_they_run_on", || {
            VARIANTS.iter().for_each(|variant| kernels_say_what_they_run_on(variant));
            Ok(())
        }),
        Trial::test("faults::a_foreign_factory", || {
            VARIANTS.iter().for_each(|variant| foreign_factory(variant));
            Ok(())
        }),
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

fn line<T>(result: Result<T, Refusal>) -> String {
    result.err().map(|refusal| refusal.to_string()).unwrap_or_default()
}

fn bad_weights(arm: &Arm, variant: &str) {
    let refusal = |w: &[f32], bias: Option<&[f32]>| line(arm.bind(variant, w, N, bias));
    let mut w = vec![1.0f32; N * K];
    for (value, name) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        w[37] = value;
        assert_eq!(refusal(&w, None), format!("seat: weights: element 37 is {name}; it must be finite"));
    }
    w[37] = 0.5;
    assert_eq!(refusal(&w, Some(&[0.0; 3])), "seat: bias: shape [3], expected [4]");
    let bias = [0.0, f32::NAN, 0.0, 0.0];
    assert_eq!(refusal(&w, Some(&bias)), "seat: bias: element 1 is NaN; it must be finite");

    let mut f16 = [0x00u8, 0x3c].repeat(K);
    f16[2..4].copy_from_slice(&[0x00, 0x7c]);
    let weights = DenseWeights::new(1, K, DType::F16, &f16).unwrap();
    let options = Options { amax: Some(&[1.0; K]), ..Options::default() };
    let refusal = line(arm.bind_with(variant, weights, None, &options));
    assert_eq!(refusal, "seat: weights: element 1 is inf; it must be finite");
    let refusal = line(DenseWeights::new(1, K, DType::I8, &[0; K]));
    assert_eq!(refusal, "dense weights: dtype I8 is not one of BF16, F16 or F32");
}

/// NVFP4 whose scales are no scales, or whose values leave FP32's range.
fn bad_packed_weights(arm: &Arm, variant: &str) {
    let options = Options { amax: Some(&[1.0; K]), ..Options::default() };
    let refusal = |scales: &[u8], global: f32| {
        let view = Nvfp4View::new(&[0x77; N * K / 2], scales, N, K, global).unwrap();
        line(arm.bind_with(variant, DenseWeights::from_nvfp4(view), None, &options))
    };
    let bound = "it must be a UE4M3 code, at most 0x7e";
    assert_eq!(refusal(&[8, 8, 0x7f, 8], 1.0), format!("seat: weights: block scale 2 is 0x7f; {bound}"));
    assert_eq!(refusal(&[8, 0x88, 8, 8], 1.0), format!("seat: weights: block scale 1 is 0x88; {bound}"));
    assert_eq!(refusal(&[8, 8, 0x7e, 8], 1e36), "seat: weights: element 32 is inf; it must be finite");
}

fn dims_outside_the_envelope(arm: &Arm) {
    for variant in VARIANTS {
        let refusal = |n: usize, k: usize| line(arm.bind(variant, &vec![1.0; n * k], n, None));
        assert_eq!(refusal(0, 0), "seat: N = 0 is outside 1..=2147483648", "{variant}");
        let envelope = structures::get("linear_proj", variant).unwrap().envelope;
        let k = envelope.dims.iter().find(|dim| dim.name == "K").unwrap().bound;
        assert_eq!(refusal(4, 0), format!("seat: K = 0 is outside {k}"), "{variant}");
        for outside in [1, 15, 17, 40].into_iter().filter(|&outside| !k.takes(outside)) {
            let expected = format!("seat: K = {outside} is outside {k}");
            assert_eq!(refusal(1, outside as usize), expected, "{variant}");
        }
        if variant.starts_with("nvfp4") {
            assert_eq!(k.to_string(), "16..=16777216 in steps of 16");
        }
    }
}

fn bad_calibrations(arm: &Arm) {
    let w = vec![0.5f32; N * K];
    let refusal = |amax: Option<&[f32]>| {
        let options = Options { amax, ..Options::default() };
        line(arm.bind_with("nvfp4_balance", DenseWeights::from_f32(N, K, &w).unwrap(), None, &options))
    };
    let without = refusal(None);
    assert!(
        without
            .starts_with("seat: linear_proj/nvfp4_balance needs the largest magnitude of each input channel"),
        "{without}"
    );
    assert!(without.contains("structures calibrate"), "it says how: {without}");
    let amax = "seat: amax of input channels";
    assert_eq!(refusal(Some(&[1.0; K - 1])), format!("{amax}: shape [15], expected [16]"));
    let mut channels = [1.0f32; K];
    channels[3] = f32::NAN;
    assert_eq!(refusal(Some(&channels)), format!("{amax}: element 3 is NaN; it must be finite"));
    channels[3] = -2.0;
    assert_eq!(
        refusal(Some(&channels)),
        format!("{amax}: element 3 is -2; it must be a magnitude, not negative")
    );
    channels[3] = 0.0;
    assert_eq!(refusal(Some(&channels)), "", "a channel that was never used is balanced too");

    // Weights that the balance takes out of FP32's range: the first channel's is 4.
    let mut channels = [1.0f32; K];
    channels[0] = 1e6;
    let mut large = vec![0.5f32; N * K];
    large[2 * K] = 2e38;
    let options = Options { amax: Some(&channels), ..Options::default() };
    let weights = DenseWeights::from_f32(N, K, &large).unwrap();
    let refusal = line(arm.bind_with("nvfp4_balance", weights, None, &options));
    assert_eq!(refusal, "seat: weights times their balance: element 32 is inf; it must be finite");

    // Variants that need none do not look at it.
    for variant in ["w8a16_static", "nvfp4_dynamic"] {
        let options = Options { amax: Some(&[f32::NAN]), ..Options::default() };
        assert_eq!(
            line(arm.bind_with(variant, DenseWeights::from_f32(N, K, &w).unwrap(), None, &options)),
            ""
        );
    }
}

fn bad_rows(arm: &Arm, variant: &str) {
    let w = vec![0.5f32; N * K];
    let mut proj = arm.bind_staged(variant, &w, N, None);
    let band = proj.form().band;
    let mut y = vec![0f32; (band.max + 1) * N];
    let mut call = |m: usize, width: usize, out: usize| {
        let x = vec![1f32; m * width];
        let output = RowsMut::host(&mut y[..out * N], out, N).unwrap();
        line(proj.project(Rows::host(&x[..], m, width).unwrap(), output))
    };
    assert_eq!(call(1, 16, 1), "");
    assert_eq!(call(1, 15, 1), "seat: input rows: shape [1, 15], expected [1, 16]");
    assert_eq!(call(2, 16, 1), "seat: output rows: shape [1, 4], expected [2, 4]");
    for m in [0, band.max + 1] {
        let expected =
            format!("seat: M = {m} is outside the band {band} and the seat has no host form to dispatch to");
        assert_eq!(call(m, 16, m), expected, "{variant}");
    }
    // Results of another type than the rows.
    let mut other = [half::bf16::ZERO; N];
    let output = RowsMut::host(&mut other[..], 1, N).unwrap();
    let refusal = line(proj.project(Rows::host(&[1f32; K][..], 1, K).unwrap(), output));
    assert_eq!(refusal, "seat: output rows: dtype BF16 is not one of F32");
}

/// Rows on the other side than the seat, and of a type that no kernel takes.
fn rows_elsewhere(arm: &Arm, variant: &str) {
    let w = vec![0.5f32; N * K];
    let (x, mut y) = (vec![1f32; K], vec![0f32; N]);
    let mut on_gpu = arm.bind(variant, &w, N, None).unwrap();
    let output = RowsMut::host(&mut y[..], 1, N).unwrap();
    let refusal = line(on_gpu.project(Rows::host(&x[..], 1, K).unwrap(), output));
    assert_eq!(refusal, "seat: rows are on cpu, the seat is on cuda:0");

    let stream = arm.stream();
    let rows = Buffer::from_host(&stream, &x, &[1, K]).unwrap();
    let mut out = Buffer::<f32>::zeros(&stream, &[1, N]).unwrap();
    let mut on_cpu = Arm::cpu().bind(variant, &w, N, None).unwrap();
    let input = Rows::device(rows.view(), &stream, 1, K).unwrap();
    let refusal = line(on_cpu.project(input, RowsMut::device(out.view_mut(), 1, N).unwrap()));
    assert_eq!(refusal, "seat: rows are on cuda:0, the seat is on cpu");
    let input = Rows::device(rows.view(), &stream, 1, K).unwrap();
    let refusal = line(on_gpu.project(input, RowsMut::host(&mut y[..], 1, N).unwrap()));
    assert_eq!(refusal, "seat: output: rows are on cpu, the seat is on cuda:0");

    let bytes = Buffer::<i8>::zeros(&stream, &[1, K]).unwrap();
    let mut out = Buffer::<i8>::zeros(&stream, &[1, N]).unwrap();
    let input = Rows::device(bytes.view(), &stream, 1, K).unwrap();
    let refusal = line(on_gpu.project(input, RowsMut::device(out.view_mut(), 1, N).unwrap()));
    assert_eq!(refusal, "seat: input rows: dtype I8 is not one of BF16, F16 or F32");
}

fn features_past_n(arm: &Arm, variant: &str) {
    let proj = arm.bind(variant, &[0.5; N * K], N, None).unwrap();
    for (first, end) in [(0, N + 1), (N + 3, N + 4), (3, 2), (0, usize::MAX)] {
        let expected = format!("features to dequantise: shape [{first}, {end}], expected [0, 4]");
        #[allow(clippy::reversed_empty_ranges, reason = "that is the fault")]
        let features = std::ops::Range { start: first, end };
        assert_eq!(line(proj.dequantized(features)), expected, "{variant}");
    }
    assert!(proj.dequantized(2..2).unwrap().is_empty());
}

/// An implementation that adds one to a result, in every call or beside other rows only.
struct Wrong {
    proj: Box<dyn BoundProj>,
    from_rows: usize,
}

impl LinearProj for Wrong {
    fn n(&self) -> usize {
        self.proj.n()
    }

    fn k(&self) -> usize {
        self.proj.k()
    }

    fn project(&mut self, x: Rows<'_>, mut y: RowsMut<'_>) -> Result<(), Refusal> {
        let (m, n) = (x.rows(), self.n());
        let mut results = vec![0f32; m * n];
        self.proj.project(x, RowsMut::host(&mut results[..], m, n)?)?;
        if m >= self.from_rows {
            results[1] += 1.0;
        }
        let RowsMutData::Host(out) = y.data() else { panic!("host rows") };
        out.write_f32(results.into_iter());
        Ok(())
    }
}

impl BoundProj for Wrong {
    fn form(&self) -> Form {
        self.proj.form()
    }

    fn receipt(&self) -> &Receipt {
        self.proj.receipt()
    }

    fn operand(&self, row: &[f32]) -> Vec<f32> {
        self.proj.operand(row)
    }

    fn dequantized(&self, features: std::ops::Range<usize>) -> Result<Vec<f32>, Refusal> {
        self.proj.dequantized(features)
    }
}

fn wrong_results(arm: &Arm, variant: &str) {
    let w: Vec<f32> = (0..N * K).map(|i| (i % 7) as f32 / 8.0 - 0.25).collect();
    let x: Vec<f32> = (0..16 * K).map(|i| (i % 5) as f32 / 4.0 - 0.5).collect();
    let proj = arm.bind_staged(variant, &w, N, None);
    let mut wrong = Wrong { proj, from_rows: 1 };
    let refusal = line(gates::against_reference(&mut wrong, None, &x[..K], 1, 0..N));
    assert!(refusal.starts_with("seat: reference gate failed: y[0, 1] is "), "{refusal}");
    let refusal = line(gates::smoke(&mut wrong, None));
    assert!(refusal.starts_with("seat: reference gate failed: y[0, 1] is "), "{refusal}");
    wrong.from_rows = 9;
    let refusal = line(gates::row_invariance(&mut wrong, &x));
    assert!(refusal.starts_with("seat: row invariance gate failed: row 0, feature 1: "), "{refusal}");
    wrong.from_rows = 17;
    gates::row_invariance(&mut wrong, &x).unwrap();
}

/// The registration of a variant with other kernels or another factory.
fn changed(variant: &str, change: impl Fn(&mut Registration)) -> &'static Registration {
    let mut registration = *structures::get("linear_proj", variant).unwrap();
    change(&mut registration);
    Box::leak(Box::new(registration))
}

static NOT_BUILT: Kernels = Kernels { built: &[], why_not: "no nvcc", source_digest: "" };
/// For an architecture that nothing runs any more.
static FERMI: Kernels = Kernels { built: &[Arch::new(20, true)], why_not: "", source_digest: "" };

fn kernels_say_what_they_run_on(variant: &str) {
    let device = ComputeCapability { major: 9, minor: 0 };
    let id = structures::get("linear_proj", variant).unwrap().id;
    let refusal = line(NOT_BUILT.check(id, device));
    assert_eq!(refusal, format!("linear_proj/{variant} is linked but its kernels are not built: no nvcc"));
    let refusal = line(FERMI.check(id, device));
    assert_eq!(refusal, format!("linear_proj/{variant} is built for sm_20a, the device is 9.0"));
}

fn kernels_elsewhere(arm: &Arm, variant: &str) {
    let Device::Cuda(gpu) = &arm.device else { panic!("a GPU") };
    let (w, amax) = ([0.5f32; N * K], uneven_amax(K));
    let bind = |kernels: &'static Kernels| {
        let door = Door::of(changed(variant, |registration| registration.kernels = kernels)).unwrap();
        let weights = DenseWeights::from_f32(N, K, &w).unwrap();
        let bind = Bind { seat: "seat", weights, bias: None, device: &arm.device };
        line(door.bind_with(&bind, &Options { amax: Some(&amax), ..Options::default() }))
    };
    let expected = format!("linear_proj/{variant} is linked but its kernels are not built: no nvcc");
    assert_eq!(bind(&NOT_BUILT), expected);
    let device = gpu.compute_capability();
    assert_eq!(bind(&FERMI), format!("linear_proj/{variant} is built for sm_20a, the device is {device}"));
    let refusal = gpu.require("seat", u64::MAX).unwrap_err();
    assert!(matches!(refusal, Refusal::OutOfMemory { asked: u64::MAX, .. }), "{refusal}");
}

fn foreign_factory(variant: &str) {
    let foreign = Door::of(changed(variant, |registration| registration.factory = &7u8));
    let expected = format!(
        "linear_proj/{variant} does not provide the factory of linear_proj; it was built against another version of \
         that crate"
    );
    assert_eq!(line(foreign.map(|_| ())), expected);
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
