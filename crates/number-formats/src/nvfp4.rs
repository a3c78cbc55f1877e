//! NVFP4: E2M1 codes in blocks of 16, a UE4M3 scale a block, and one FP32 global scale.
//!
//! The global scale belongs to a tensor for weights and to a row for activations, and it multiplies:
//!
//! ```text
//! value = (e2m1 * e4m3) * global      the inner product is exact, the outer rounds once
//! ```
//!
//! The quantiser, in FP32, where every `/` is an IEEE division:
//!
//! ```text
//! global = amax / 2688                            2688 = 6 * 448, the largest e2m1 * e4m3; 1 if single-level
//! scale  = e4m3_rne_sat(block_amax / 6 / global)  two divisions, in this order
//! step   = scale * global                         one rounding
//! code   = e2m1_rne_sat(x / step)                 ties to even
//! ```
//!
//! A block whose step is not above zero (its scale rounded to zero, or the whole row is zero or too small for a global) has
//! a scale of 0 and codes of 0. An all-zero row or tensor, whose global comes out as 0, needs no other rule.
//!
//! Layout, row-major: codes `[N, K / 2]`, two a byte, the even element in the low nibble; scales `[N, K / 16]`.

use crate::amax::amax;
use crate::{FormatError, e2m1, e4m3};

/// Elements of a block, along K.
pub const BLOCK: usize = 16;
/// The largest `e2m1 * e4m3`.
const MAX_PRODUCT: f32 = e2m1::MAX * e4m3::MAX;
/// Bytes of a block's codes.
const BLOCK_BYTES: usize = BLOCK / 2;

/// Whether there is a global scale above the block scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScaleMode {
    /// The global scale puts the largest block scale at 448, so the block scales use all of UE4M3's range.
    #[default]
    TwoLevel,
    /// The global scale is 1. Blocks above 2688 saturate, those up to 6 * 2^-10 become zero, and those below 6 * 2^-6 have
    /// a subnormal scale of few bits.
    SingleLevel,
}

impl ScaleMode {
    /// The global scale of a row or tensor whose largest magnitude is `amax`, finite.
    pub fn global(self, amax: f32) -> f32 {
        match self {
            ScaleMode::TwoLevel => amax / MAX_PRODUCT,
            ScaleMode::SingleLevel => 1.0,
        }
    }
}

/// Quantises one row of K activations and returns its global scale. `codes` has K / 2 bytes, `scales` has K / 16.
///
/// A row with an infinity or a NaN has no plausible form: its codes and scales are zero and its global scale is NaN, so
/// every element dequantises to NaN and so does every dot product with it. The same is given if K is not a multiple of 16,
/// or `codes` or `scales` does not have the length that K asks for.
pub fn quantize_row(x: &[f32], mode: ScaleMode, codes: &mut [u8], scales: &mut [u8]) -> f32 {
    let amax = amax(x);
    if !amax.is_finite() || !is_row(x.len(), codes, scales) {
        codes.fill(0);
        scales.fill(0);
        return f32::NAN;
    }
    let global = mode.global(amax);
    quantize_blocks(x, global, codes, scales);
    global
}

/// Quantises one row of K finite weights under the global scale of its tensor, so that a large tensor goes row by row. `codes`
/// has K / 2 bytes, `scales` has K / 16.
///
/// If K is not a multiple of 16 or a length does not match, codes and scales are zero.
pub fn quantize_row_under(x: &[f32], global: f32, codes: &mut [u8], scales: &mut [u8]) {
    if is_row(x.len(), codes, scales) {
        quantize_blocks(x, global, codes, scales);
    } else {
        codes.fill(0);
        scales.fill(0);
    }
}

/// Writes the K values of one row to `out`. `codes` has K / 2 bytes, `scales` has K / 16.
///
/// If K is not a multiple of 16 or the lengths do not match, all of `out` is NaN.
pub fn dequantize_row(codes: &[u8], scales: &[u8], global: f32, out: &mut [f32]) {
    if is_row(out.len(), codes, scales) {
        dequantize_blocks(codes, scales, global, out);
    } else {
        out.fill(f32::NAN);
    }
}

/// A weight `[N, K]` with one global scale.
#[derive(Clone, Debug, PartialEq)]
pub struct Nvfp4Tensor {
    n: usize,
    k: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    global: f32,
}

impl Nvfp4Tensor {
    /// Quantises the row-major weight `w` `[n, k]`.
    ///
    /// # Errors
    ///
    /// [`FormatError::PartialBlock`] if K is not a multiple of 16, [`FormatError::NonFinite`] naming the first infinity or
    /// NaN, [`FormatError::Length`] and [`FormatError::TooLarge`].
    pub fn quantize_weight(w: &[f32], n: usize, k: usize, mode: ScaleMode) -> Result<Self, FormatError> {
        let elements = check_shape(n, k)?;
        FormatError::check_length("weights", elements, w.len())?;
        if let Some((index, &value)) = w.iter().enumerate().find(|(_, w)| !w.is_finite()) {
            return Err(FormatError::NonFinite { index, value });
        }
        let mut codes = vec![0; elements / 2];
        let mut scales = vec![0; elements / BLOCK];
        let global = mode.global(amax(w));
        quantize_blocks(w, global, &mut codes, &mut scales);
        Ok(Nvfp4Tensor { n, k, codes, scales, global })
    }

    /// Adopts a weight `[n, k]` as compressed-tensors stores it: `weight_packed` `[n, k / 2]`, `weight_scale` `[n, k / 16]`
    /// and `weight_global_scale`, which is a **divisor** (2688 / amax).
    ///
    /// Codes and scales are kept as they are; the global scale becomes `1 / global_divisor`, one IEEE division.
    ///
    /// # Errors
    ///
    /// [`FormatError::GlobalScale`] if the divisor or its inverse is not finite and above zero; otherwise as
    /// [`from_modelopt`](Self::from_modelopt).
    pub fn from_compressed_tensors(
        packed: Vec<u8>,
        scales: Vec<u8>,
        n: usize,
        k: usize,
        global_divisor: f32,
    ) -> Result<Self, FormatError> {
        Self::from_modelopt(packed, scales, n, k, global_of_divisor(global_divisor)?)
    }

    /// Adopts a weight `[n, k]` as ModelOpt stores it: `weight` `[n, k / 2]`, `weight_scale` `[n, k / 16]` and
    /// `weight_scale_2`, which is a **multiplier** (amax / 2688). Nothing is changed.
    ///
    /// # Errors
    ///
    /// [`FormatError::GlobalScale`] if the multiplier is negative or not finite, [`FormatError::BlockScale`] naming the first
    /// scale that is negative or NaN, [`FormatError::PartialBlock`], [`FormatError::Length`] and [`FormatError::TooLarge`].
    pub fn from_modelopt(
        packed: Vec<u8>,
        scales: Vec<u8>,
        n: usize,
        k: usize,
        global_multiplier: f32,
    ) -> Result<Self, FormatError> {
        let view = Nvfp4View::new(&packed, &scales, n, k, global_multiplier)?;
        view.check_scales()?;
        let global = view.global;
        Ok(Nvfp4Tensor { n, k, codes: packed, scales, global })
    }

    /// Writes the values `[N, K]` to `out`.
    ///
    /// # Errors
    ///
    /// [`FormatError::Length`] if `out` does not have N * K elements.
    pub fn dequantize(&self, out: &mut [f32]) -> Result<(), FormatError> {
        FormatError::check_length("values", self.codes.len() * 2, out.len())?;
        dequantize_blocks(&self.codes, &self.scales, self.global, out);
        Ok(())
    }

    /// The same without the memory.
    pub fn view(&self) -> Nvfp4View<'_> {
        let Nvfp4Tensor { n, k, ref codes, ref scales, global } = *self;
        Nvfp4View { n, k, codes, scales, global }
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features, a multiple of 16.
    pub fn k(&self) -> usize {
        self.k
    }

    /// E2M1 codes `[N, K / 2]`, the even element in the low nibble.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// UE4M3 block scales `[N, K / 16]`.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// The FP32 global scale, a multiplier.
    pub fn global(&self) -> f32 {
        self.global
    }
}

/// The multiplier that the divisor of a compressed-tensors checkpoint stands for: `1 / divisor`, one IEEE division.
///
/// # Errors
///
/// [`FormatError::GlobalScale`] if the divisor or its inverse is not finite and above zero.
pub fn global_of_divisor(divisor: f32) -> Result<f32, FormatError> {
    let global = 1.0 / divisor;
    if global.is_finite() && global > 0.0 {
        return Ok(global);
    }
    let bound = "finite and above zero, and so must its inverse";
    Err(FormatError::GlobalScale { what: "the global divisor", value: divisor, bound })
}

/// A weight `[N, K]` with one global scale, in someone else's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nvfp4View<'a> {
    n: usize,
    k: usize,
    codes: &'a [u8],
    scales: &'a [u8],
    global: f32,
}

impl<'a> Nvfp4View<'a> {
    /// Views codes `[n, k / 2]` and scales `[n, k / 16]` under a global scale that multiplies. Costs nothing: the scales are not
    /// looked at, see [`check_scales`](Self::check_scales).
    ///
    /// # Errors
    ///
    /// [`FormatError::GlobalScale`] if the multiplier is negative or not finite, [`FormatError::PartialBlock`],
    /// [`FormatError::Length`] and [`FormatError::TooLarge`].
    pub fn new(
        codes: &'a [u8],
        scales: &'a [u8],
        n: usize,
        k: usize,
        global: f32,
    ) -> Result<Self, FormatError> {
        let elements = check_shape(n, k)?;
        FormatError::check_length("packed codes", elements / 2, codes.len())?;
        FormatError::check_length("block scales", elements / BLOCK, scales.len())?;
        if !(global.is_finite() && global >= 0.0) {
            let bound = "finite and not negative";
            return Err(FormatError::GlobalScale { what: "the global multiplier", value: global, bound });
        }
        Ok(Nvfp4View { n, k, codes, scales, global })
    }

    /// Looks for a scale that is no UE4M3 code.
    ///
    /// # Errors
    ///
    /// [`FormatError::BlockScale`] naming the first scale that is negative or NaN.
    pub fn check_scales(&self) -> Result<(), FormatError> {
        match self.scales.iter().position(|&code| code >= 0x7f) {
            Some(index) => Err(FormatError::BlockScale { index, code: self.scales[index] }),
            None => Ok(()),
        }
    }

    /// Writes the K values of row `n` to `out`. A row past the last one leaves it as it was.
    pub fn decode_row(&self, n: usize, out: &mut [f32]) {
        let codes = self.codes.get(n * self.k / 2..(n + 1) * self.k / 2);
        let scales = self.scales.get(n * self.k / BLOCK..(n + 1) * self.k / BLOCK);
        if let (Some(codes), Some(scales)) = (codes, scales) {
            dequantize_row(codes, scales, self.global, out);
        }
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features, a multiple of 16.
    pub fn k(&self) -> usize {
        self.k
    }

    /// E2M1 codes `[N, K / 2]`, the even element in the low nibble.
    pub fn codes(&self) -> &'a [u8] {
        self.codes
    }

    /// UE4M3 block scales `[N, K / 16]`.
    pub fn scales(&self) -> &'a [u8] {
        self.scales
    }

    /// The FP32 global scale, a multiplier.
    pub fn global(&self) -> f32 {
        self.global
    }
}

/// The elements of `[n, k]`, if K is whole blocks.
fn check_shape(n: usize, k: usize) -> Result<usize, FormatError> {
    if k.is_multiple_of(BLOCK) {
        FormatError::elements(n, k)
    } else {
        Err(FormatError::PartialBlock { k, multiple_of: BLOCK })
    }
}

/// Whether `codes` and `scales` are those of a row of `k` elements.
fn is_row(k: usize, codes: &[u8], scales: &[u8]) -> bool {
    k.is_multiple_of(BLOCK) && codes.len() == k / 2 && scales.len() == k / BLOCK
}

/// Quantises whole blocks of finite numbers under a given global scale.
fn quantize_blocks(x: &[f32], global: f32, codes: &mut [u8], scales: &mut [u8]) {
    let (blocks, _) = x.as_chunks::<BLOCK>();
    let (codes, _) = codes.as_chunks_mut::<BLOCK_BYTES>();
    for ((x, codes), scale) in blocks.iter().zip(codes).zip(scales) {
        let scale_code = e4m3::encode_unsigned_saturating(amax(x) / e2m1::MAX / global);
        let step = e4m3::decode(scale_code) * global;
        // False for a step of NaN too, which is what 0 / 0 makes of a zero row.
        if step > 0.0 {
            *scale = scale_code;
            let (pairs, _) = x.as_chunks::<2>();
            for (&[even, odd], code) in pairs.iter().zip(codes) {
                *code = e2m1::encode_saturating(even / step) | e2m1::encode_saturating(odd / step) << 4;
            }
        } else {
            *scale = 0;
            codes.fill(0);
        }
    }
}

/// The values of whole blocks.
fn dequantize_blocks(codes: &[u8], scales: &[u8], global: f32, out: &mut [f32]) {
    let (codes, _) = codes.as_chunks::<BLOCK_BYTES>();
    let (out, _) = out.as_chunks_mut::<BLOCK>();
    for ((codes, &scale), out) in codes.iter().zip(scales).zip(out) {
        let scale = e4m3::decode(scale);
        let (pairs, _) = out.as_chunks_mut::<2>();
        for (&code, [even, odd]) in codes.iter().zip(pairs) {
            *even = e2m1::decode(code) * scale * global;
            *odd = e2m1::decode(code >> 4) * scale * global;
        }
    }
}

#[cfg(test)]
mod tests;
