//! `decode_loop/fp8_kv`: keys and values in FP8 E4M3, in pages, with a scale per layer and KV head.
//!
//! Half the bytes of a BF16 store, so twice the context in the same memory and half the time of an attention that waits for them.
//! A key or value is divided by its head's scale and rounded to the nearest code, ties to even, saturating: no finite number becomes
//! NaN. Queries stay BF16, scores and sums FP32, and both scales are applied to sums, not to elements.
//!
//! Up to 32 query rows are answered row-invariantly: the bits of a row do not depend on how many rows there are or on the others.
//! Pages of any power of two from 16 positions on lie where a table on the device says. The context is cut at positions that
//! depend on nothing else, so a graph that was captured over a short context is right for a long one.
//!
//! ```
//! use decode_loop::{Door, KvOptions, KvScale, KvShape};
//!
//! let kv = Door::of(&decode_loop_fp8_kv::ENTRY)?.kv()?;
//! let shape = KvShape { layers: 1, heads: 2, kv_heads: 1, head_dim: 64, window: 100 };
//! let options = KvOptions { page_size: None, scales: Some(&[KvScale { k: 0.5, v: 2.0 }]) };
//! (kv.check)(&shape, &options)?;
//!
//! let mut layer = (kv.cpu)(&shape, &options, 0)?;
//! layer.append(&[0.25; 64], &[3.0; 64]);
//! let mut out = [0.0; 64];
//! layer.attend(0, 1, &[1.0; 64], &mut Vec::new(), &mut out);
//! assert_eq!(out, [3.0; 64]);
//! # Ok::<(), structure_core::Refusal>(())
//! ```

mod cpu;
#[cfg(kernels_built)]
mod cuda;
#[cfg(kernels_built)]
mod ffi;
mod store;

use decode_loop::{Factory, KvFactory, STRUCTURE};
use structure_core::{
    Band, Bound, DType, DimBound, Envelope, Fallback, Formats, Registration, StructureId, register,
};

#[cfg(kernels_built)]
pub use cuda::Fp8Kv;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// This implementation's id.
pub const ID: StructureId = StructureId { structure: STRUCTURE, variant: "fp8_kv" };

/// What it takes. 192 of `head_dim` is refused too.
const ENVELOPE: Envelope = Envelope {
    dims: &[
        DimBound { name: "layers", bound: Bound { min: 1, max: 1 << 16, multiple_of: 1 } },
        DimBound { name: "kv_heads", bound: Bound { min: 1, max: 1 << 10, multiple_of: 1 } },
        DimBound { name: "group", bound: Bound { min: 1, max: 16, multiple_of: 1 } },
        DimBound { name: "head_dim", bound: Bound { min: 64, max: 256, multiple_of: 64 } },
        DimBound { name: "page_size", bound: Bound { min: 16, max: 1 << 12, multiple_of: 16 } },
        DimBound { name: "window", bound: Bound { min: 1, max: (1 << 31) - (1 << 12), multiple_of: 1 } },
    ],
    weight_dtypes: &[DType::BF16],
    row_dtypes: &[DType::BF16],
    band: Band { min: 1, max: decode_loop::MAX_QUERY_ROWS },
};

static FACTORY: Factory =
    Factory::Kv(KvFactory { check: store::check, bytes: store::bytes, cuda: store::cuda, cpu: store::cpu });

/// The registration, for explicit registration where `inventory` does not reach.
pub static ENTRY: Registration = Registration {
    id: ID,
    summary: "keys and values in pages of FP8 E4M3, one scale per layer and head; BF16 queries",
    envelope: ENVELOPE,
    formats: Formats { weights: "E4M3 per head", activations: "BF16" },
    calibrated: false,
    fallback: Fallback::Refuse,
    kernels: &KERNELS,
    factory: &FACTORY,
};

register!(ENTRY);
