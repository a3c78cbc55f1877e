//! What a store is asked for: checks, sizes, and the arm that it is made on.

use decode_loop::{CpuKv, KvOptions, KvScale, KvShape, KvStore};
use device::Stream;
use structure_core::{DType, Refusal};

use crate::ENTRY;
use crate::cpu::Fp8Layer;

/// Positions of a page where nothing else is asked for.
const PAGE_SIZE: usize = 64;

/// Query vectors of a KV head that the kernel takes in one pass over the store (`cuda/attention_combine.cuh`).
const PASS_COLUMNS: usize = 56;

/// The page size that the options ask for.
pub(crate) fn page_size(options: &KvOptions<'_>) -> usize {
    options.page_size.unwrap_or(PAGE_SIZE)
}

/// The scales of the options, `[layers, kv_heads]`.
pub(crate) fn scales(shape: &KvShape, options: &KvOptions<'_>) -> Vec<KvScale> {
    let ones = || vec![KvScale::default(); shape.layers * shape.kv_heads];
    options.scales.map_or_else(ones, <[KvScale]>::to_vec)
}

/// Refuses a shape or options that no arm can take.
pub(crate) fn check(shape: &KvShape, options: &KvOptions<'_>) -> Result<(), Refusal> {
    let KvShape { layers, heads, kv_heads, head_dim, window } = *shape;
    let refuse = |what: &str, value: String, bound: &str| {
        Err(Refusal::ValueOutside { what: format!("fp8_kv: {what}"), value, bound: bound.to_string() })
    };
    let page_size = page_size(options);
    let dims = [
        ("layers", layers),
        ("kv_heads", kv_heads),
        ("group", heads.checked_div(kv_heads).unwrap_or(0)),
        ("head_dim", head_dim),
        ("page_size", page_size),
        ("window", window),
    ];
    ENTRY.envelope.check("fp8_kv", &dims.map(|(name, value)| (name, value as u64)), DType::BF16)?;
    shape.check_heads("fp8_kv")?;
    if !page_size.is_power_of_two() {
        return refuse("page_size", page_size.to_string(), "a power of two");
    }
    let Some(scales) = options.scales else { return Ok(()) };
    if scales.len() != layers * kv_heads {
        let (expected, got) = (vec![layers, kv_heads], vec![scales.len()]);
        return Err(Refusal::ShapeMismatch { what: "fp8_kv: scales".to_string(), expected, got });
    }
    for (index, scale) in scales.iter().enumerate() {
        for (name, value) in [("K", scale.k), ("V", scale.v)] {
            if !(value > 0.0 && value.is_finite()) {
                let (layer, head) = (index / kv_heads, index % kv_heads);
                let what = format!("the {name} scale of layer {layer}, KV head {head}");
                return refuse(&what, value.to_string(), "finite and above 0");
            }
        }
    }
    Ok(())
}

/// Bytes of a store on a device: codes, page table, scales and scratch.
pub(crate) fn bytes(shape: &KvShape, options: &KvOptions<'_>) -> u64 {
    let pages = shape.window.div_ceil(page_size(options));
    let codes = 2 * shape.layers * pages * page_size(options) * shape.kv_heads * shape.head_dim;
    let scales = 2 * shape.layers * shape.kv_heads * size_of::<f32>();
    (codes + pages * size_of::<i32>() + scales + scratch_bytes(shape)) as u64
}

/// Bytes of scratch, as the kernel counts them.
fn scratch_bytes(shape: &KvShape) -> usize {
    let group = shape.heads.checked_div(shape.kv_heads).unwrap_or(0).max(1);
    let rows = (PASS_COLUMNS / group).min(decode_loop::MAX_QUERY_ROWS);
    let columns = splits(shape.kv_heads, shape.window) * shape.kv_heads * rows * group;
    columns * (shape.head_dim + 2) * size_of::<f32>()
}

/// How many splits a window is cut into: `cuda/attention_splits.cuh`.
fn splits(kv_heads: usize, window: usize) -> usize {
    let most = 132usize.checked_div(kv_heads).unwrap_or(0).max(1);
    window.div_ceil(64).min(most)
}

/// A store on the stream's device.
#[cfg(kernels_built)]
pub(crate) fn cuda(
    stream: &Stream,
    shape: &KvShape,
    options: &KvOptions<'_>,
) -> Result<Box<dyn KvStore>, Refusal> {
    Ok(Box::new(crate::Fp8Kv::new(stream, shape, options)?))
}

#[cfg(not(kernels_built))]
pub(crate) fn cuda(_: &Stream, _: &KvShape, _: &KvOptions<'_>) -> Result<Box<dyn KvStore>, Refusal> {
    Err(Refusal::KernelsNotBuilt { id: ENTRY.id, reason: ENTRY.kernels.why_not.to_string() })
}

/// The store of a layer in host memory.
pub(crate) fn cpu(shape: &KvShape, options: &KvOptions<'_>, layer: usize) -> Result<Box<dyn CpuKv>, Refusal> {
    check(shape, options)?;
    shape.check_layer("fp8_kv", layer)?;
    let scales = &scales(shape, options)[layer * shape.kv_heads..][..shape.kv_heads];
    Ok(Box::new(Fp8Layer::new(shape.head_dim, scales)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape { layers: 2, heads: 24, kv_heads: 4, head_dim: 256, window: 1000 };

    #[test]
    fn what_cannot_be_taken_is_refused_by_name() {
        let ones = [KvScale::default(); 8];
        let with_scales = |scales| KvOptions { page_size: None, scales: Some(scales) };
        assert_eq!(check(&SHAPE, &with_scales(&ones)), Ok(()));
        let mut zero = ones;
        zero[5].v = 0.0;
        let mut infinite = ones;
        infinite[1].k = f32::INFINITY;
        let page = |page_size| KvOptions { page_size: Some(page_size), scales: None };
        let none = KvOptions::default();
        for (shape, options, text) in [
            (KvShape { window: 0, ..SHAPE }, none, "window = 0 is outside"),
            (KvShape { head_dim: 192, ..SHAPE }, none, "head_dim is 192; it must be 64, 128 or 256"),
            (KvShape { head_dim: 80, ..SHAPE }, none, "head_dim = 80 is outside 64..=256 in steps of 64"),
            (KvShape { heads: 26, ..SHAPE }, none, "heads is 26; it must be a multiple of the 4 KV heads"),
            (KvShape { heads: 68, ..SHAPE }, none, "group = 17 is outside 1..=16"),
            (KvShape { kv_heads: 0, ..SHAPE }, none, "kv_heads = 0 is outside"),
            (SHAPE, page(8), "page_size = 8 is outside"),
            (SHAPE, page(48), "page_size is 48; it must be a power of two"),
            (SHAPE, with_scales(&ones[1..]), "scales: shape [7], expected [2, 4]"),
            (
                SHAPE,
                with_scales(&zero),
                "the V scale of layer 1, KV head 1 is 0; it must be finite and above 0",
            ),
            (SHAPE, with_scales(&infinite), "the K scale of layer 0, KV head 1 is inf"),
        ] {
            let refusal = check(&shape, &options).unwrap_err().to_string();
            assert!(refusal.contains(text), "{refusal}");
        }
    }

    #[test]
    fn a_store_takes_half_the_bytes_of_bf16_and_a_little_scratch() {
        let shape = KvShape { layers: 16, window: 131_072, ..SHAPE };
        let bf16 = 16 * 131_072 * 4 * 256 * 2 * 2;
        let taken = bytes(&shape, &KvOptions::default());
        assert!(taken > bf16 / 2 && taken < bf16 / 2 + bf16 / 100, "{taken} of {bf16}");
    }

    #[cfg(kernels_built)]
    #[test]
    #[allow(unsafe_code, reason = "the launchers are C functions")]
    fn scratch_is_what_the_kernel_counts() {
        for (heads, kv_heads, head_dim) in [(24, 4, 256), (16, 2, 256), (8, 8, 128), (5, 1, 64), (48, 3, 64)]
        {
            for window in [1, 63, 64, 65, 128, 129, 4095, 4096, 4097, 8192, 8193, 100_000, 131_072, 1 << 30] {
                let shape = KvShape { layers: 1, heads, kv_heads, head_dim, window };
                // SAFETY: the function touches no memory.
                let counted = unsafe {
                    crate::ffi::fp8_kv_scratch_bytes(
                        window as i64,
                        heads as i32,
                        kv_heads as i32,
                        head_dim as i32,
                    )
                };
                assert_eq!(scratch_bytes(&shape) as i64, counted, "{shape:?}");
            }
        }
    }
}
