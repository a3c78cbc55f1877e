use std::marker::PhantomData;
use std::ops::Range;

use device::{Buffer, Stream, View, ViewMut};
use half::bf16;
use linear_proj::decode_band::{self, GROUP};
use linear_proj::{CudaCall, CudaWeights, RowType, ScaleMode};
use structure_core::Refusal;

use crate::tiles::{CODES, SCALES, TILE_K, pack, unpack};
use crate::{ENVELOPE, Quantized, RowQuantiser};

/// The launchers of one implementation: the ffi of its `cuda.rs`.
pub trait Launcher: Send {
    /// Loads the kernels into the current context, so that no later call does.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] with the name of the error.
    fn prepare() -> Result<(), Refusal>;

    /// Queues the quantiser and the projection on the call's stream. The device's context is current.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] with the name of the error.
    fn project(call: &Call<'_>) -> Result<(), Refusal>;
}

/// The arguments of one launch. Every view lies on the device of the stream and has the length that its shape says; only a
/// [`CudaForm`] makes one.
#[derive(Debug)]
#[non_exhaustive]
pub struct Call<'a> {
    /// E2M1 codes of the weights in [tiles](crate::tiles), U8 `[ceil(N / 16), ceil(K / 64), 512]`.
    pub codes: View<'a>,
    /// Their scales, U8 `[ceil(N / 16), ceil(K / 64), 64]`.
    pub scales: View<'a>,
    /// The weights' global scale, a multiplier.
    pub global: f32,
    /// F32 `[N]`.
    pub bias: Option<View<'a>>,
    /// F32 `[K]`.
    pub inverse_balance: Option<View<'a>>,
    /// `[M, K]` of `dtype`.
    pub x: View<'a>,
    /// `[M, N]` of `dtype`.
    pub y: &'a ViewMut<'a>,
    /// Scratch, BF16 `[M, K]`.
    pub quantised: ViewMut<'a>,
    /// Scratch, F32 `[M]`.
    pub globals: ViewMut<'a>,
    /// Whether the rows' global scales are 1, those of the quantiser's own making otherwise.
    pub single_level: bool,
    /// Rows, 1 to 16.
    pub m: usize,
    /// Output features.
    pub n: usize,
    /// Input features, a multiple of 16.
    pub k: usize,
    /// The type of `x` and `y`.
    pub dtype: RowType,
    /// Into how many parts K is cut.
    pub slices: usize,
    /// Where the work is queued.
    pub stream: &'a Stream,
}

/// Packed weights in device memory, how rows meet them, and the scratch of one call.
pub struct CudaForm<L> {
    n: usize,
    k: usize,
    codes: Buffer<u8>,
    scales: Buffer<u8>,
    /// Of the weights.
    global: f32,
    bias: Option<Buffer<f32>>,
    inverse_balance: Option<Buffer<f32>>,
    /// Rows as they enter the products, `[16, K]`.
    quantised: Buffer<bf16>,
    /// Of the rows, `[16]`.
    globals: Buffer<f32>,
    /// Into how many parts K is cut.
    slices: usize,
    rows: RowQuantiser,
    /// For reading back; calls run on the stream of their rows.
    stream: Stream,
    launcher: PhantomData<fn() -> L>,
}

impl<L: Launcher> CudaForm<L> {
    /// Packs and uploads; loads the kernels, so that no later call does. `seat` is for refusals.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] with the bytes asked and free, [`Refusal::Cuda`] when the driver or the launcher refuses.
    pub fn new(
        stream: &Stream,
        seat: &str,
        quantized: &Quantized,
        bias: Option<&[f32]>,
        rows: RowQuantiser,
    ) -> Result<Self, Refusal> {
        let (n, k, band) = (quantized.n, quantized.k, ENVELOPE.band.max);
        let (codes, scales) = pack(quantized);
        let inverse_balance = rows.inverse_balance.as_deref();
        let floats = band + bias.map_or(0, <[f32]>::len) + inverse_balance.map_or(0, <[f32]>::len);
        let bytes = codes.len() + scales.len() + floats * size_of::<f32>() + band * k * size_of::<bf16>();
        stream.device().require(seat, bytes as u64)?;
        stream.device().make_current()?;
        L::prepare()?;
        let (groups, tiles) = (n.div_ceil(GROUP), k.div_ceil(TILE_K));
        Ok(CudaForm {
            n,
            k,
            codes: Buffer::from_host(stream, &codes, &[groups, tiles, CODES])?,
            scales: Buffer::from_host(stream, &scales, &[groups, tiles, SCALES])?,
            global: quantized.global,
            bias: bias.map(|bias| Buffer::from_host(stream, bias, &[n])).transpose()?,
            inverse_balance: inverse_balance
                .map(|inverse| Buffer::from_host(stream, inverse, &[k]))
                .transpose()?,
            quantised: Buffer::zeros(stream, &[band, k])?,
            globals: Buffer::zeros(stream, &[band])?,
            slices: decode_band::slices(n, stream.device().compute_capability()),
            rows,
            stream: stream.clone(),
            launcher: PhantomData,
        })
    }
}

impl<L: Launcher> CudaWeights for CudaForm<L> {
    fn project(&mut self, call: &CudaCall<'_>) -> Result<(), Refusal> {
        L::project(&Call {
            codes: self.codes.view(),
            scales: self.scales.view(),
            global: self.global,
            bias: self.bias.as_ref().map(Buffer::view),
            inverse_balance: self.inverse_balance.as_ref().map(Buffer::view),
            x: call.x,
            y: call.y,
            quantised: self.quantised.view_mut(),
            globals: self.globals.view_mut(),
            single_level: self.rows.mode == ScaleMode::SingleLevel,
            m: call.rows,
            n: self.n,
            k: self.k,
            dtype: call.dtype,
            slices: self.slices,
            stream: call.stream,
        })
    }

    fn operand(&self, row: &[f32]) -> Vec<f32> {
        self.rows.operand(row)
    }

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        // Whole groups of 16 features are read back, then those before and after are dropped.
        let groups = features.start / GROUP..features.end.div_ceil(GROUP);
        let tiles = groups.len() * self.k.div_ceil(TILE_K);
        let first_tile = groups.start * self.k.div_ceil(TILE_K);
        let (mut codes, mut scales) = (vec![0u8; tiles * CODES], vec![0u8; tiles * SCALES]);
        self.codes.copy_range_to_host(&self.stream, first_tile * CODES, &mut codes)?;
        self.scales.copy_range_to_host(&self.stream, first_tile * SCALES, &mut scales)?;
        let first = groups.start * GROUP;
        let quantized = unpack(&codes, &scales, self.k, self.global);
        Ok(quantized.dequantized(features.start - first..features.end - first, self.global))
    }
}
