use std::marker::PhantomData;
use std::ops::Range;

use device::{Buffer, Stream, View, ViewMut, Workspace};
use linear_proj::decode_band::{self, GROUP};
use linear_proj::{Bind, CudaCall, CudaMatrix, CudaWeights, Options, RowType, ScaleMode};
use smallvec::{SmallVec, smallvec};
use structure_core::{Arch, Kernels, Refusal};

use crate::native_tiles::NATIVE as NATIVE_LAYOUT;
use crate::tiles::{CODES, CONVERTED, Layout, SCALES, TILE_K};
use crate::{Quantized, RowQuantiser};

/// The architecture that has the prefill band.
const PREFILL: Arch = Arch::new(90, true);
/// The architecture whose decode band is native: its tensor cores take NVFP4 as it is.
const NATIVE: Arch = Arch::new(120, true);

/// The launchers of one implementation: the ffi of its `cuda.rs`.
pub trait Launcher: Send {
    /// What was compiled.
    const KERNELS: &'static Kernels;

    /// Loads the kernels into the current context, so that no later call does: those of the decode band, native or not, and those
    /// of the prefill band where asked.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] with the name of the error.
    fn prepare(prefill: bool, native: bool) -> Result<(), Refusal>;

    /// Bytes of scratch memory that calls of up to `m` rows take; `multiprocessors` as in [`Call`].
    fn scratch_bytes(m: usize, k: usize, multiprocessors: usize) -> usize;

    /// Queues the quantiser and the projection on the call's stream; `matrices` are 1 to [`MAX_MATRICES`](decode_band::MAX_MATRICES).
    /// The device's context is current.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] with the name of the error.
    fn project(matrices: &[Matrix<'_>], call: &Call<'_>) -> Result<(), Refusal>;
}

/// A matrix of a launch. Every view lies on the device of the stream and has the length that its shape says; only a [`CudaForm`]
/// makes one.
#[derive(Debug)]
#[non_exhaustive]
pub struct Matrix<'a> {
    /// E2M1 codes of the weights in [tiles](crate::tiles), or [native ones](crate::native_tiles), U8 `[ceil(N / 16), ceil(K / 64), 512]`.
    pub codes: View<'a>,
    /// Their scales, U8 `[ceil(N / 16), ceil(K / 64), 64]`.
    pub scales: View<'a>,
    /// The weights' global scale, a multiplier.
    pub global: f32,
    /// F32 `[N]`.
    pub bias: Option<View<'a>>,
    /// `[M, N]` of the call's `dtype`.
    pub y: &'a ViewMut<'a>,
    /// Output features.
    pub n: usize,
}

/// The other arguments of a launch, with views as in [`Matrix`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Call<'a> {
    /// F32 `[K]`.
    pub inverse_balance: Option<View<'a>>,
    /// `[M, K]` of `dtype`.
    pub x: View<'a>,
    /// BF16 `[M, K]`: `x` is then to be multiplied by silu of it.
    pub gate: Option<View<'a>>,
    /// Scratch memory for calls of up to `chunk` rows.
    pub scratch: ViewMut<'a>,
    /// Rows that are taken at a time.
    pub chunk: usize,
    /// Whether the rows' global scales are 1, those of the quantiser's own making otherwise.
    pub single_level: bool,
    /// Rows, at least 1.
    pub m: usize,
    /// Input features, a multiple of 16.
    pub k: usize,
    /// The type of all rows.
    pub dtype: RowType,
    /// Whether the device has thread-block clusters.
    pub clusters: bool,
    /// How many the device has, where the prefill band takes calls of many rows; else 0, and the decode band takes all.
    pub multiprocessors: usize,
    /// Whether the native kernels are to run; there is no prefill band then.
    pub native: bool,
    /// Where the work is queued.
    pub stream: &'a Stream,
}

/// Packed weights in device memory, how rows meet them, and the scratch of one call.
pub struct CudaForm<L> {
    resident: Resident<L>,
    /// Of calls in the decode band.
    scratch: Buffer<u8>,
    prefill: Option<Prefill>,
    /// For reading back; calls run on the stream of their rows.
    stream: Stream,
}

/// What every call reads.
struct Resident<L> {
    n: usize,
    k: usize,
    codes: Buffer<u8>,
    scales: Buffer<u8>,
    /// Of the weights.
    global: f32,
    bias: Option<Buffer<f32>>,
    inverse_balance: Option<Buffer<f32>>,
    clusters: bool,
    /// Whether codes and scales are packed for the native kernels.
    native: bool,
    rows: RowQuantiser,
    launcher: PhantomData<fn() -> L>,
}

/// What calls of many rows need.
#[derive(Clone)]
struct Prefill {
    workspace: Workspace,
    multiprocessors: usize,
}

impl<L: Launcher> Resident<L> {
    fn matrix<'a>(&'a self, y: &'a ViewMut<'a>) -> Matrix<'a> {
        Matrix {
            codes: self.codes.view(),
            scales: self.scales.view(),
            global: self.global,
            bias: self.bias.as_ref().map(Buffer::view),
            y,
            n: self.n,
        }
    }

    /// The call of this matrix and of those in one launch with it, in the given scratch memory, `chunk` rows at a time.
    fn call<'a>(
        &'a self,
        call: &'a CudaCall<'_>,
        scratch: ViewMut<'a>,
        chunk: usize,
        multiprocessors: usize,
    ) -> Call<'a> {
        Call {
            inverse_balance: self.inverse_balance.as_ref().map(Buffer::view),
            x: call.x,
            gate: call.gate,
            scratch,
            chunk,
            single_level: self.rows.mode == ScaleMode::SingleLevel,
            m: call.rows,
            k: self.k,
            dtype: call.dtype,
            clusters: self.clusters,
            multiprocessors,
            native: self.native,
            stream: call.stream,
        }
    }
}

impl<L: Launcher> CudaForm<L> {
    /// Packs and uploads; loads the kernels, so that no later call does.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] with the bytes asked and free, [`Refusal::Cuda`] when the driver or the launcher refuses.
    pub fn new(
        stream: &Stream,
        bind: &Bind<'_>,
        options: &Options<'_>,
        quantized: &Quantized,
        rows: RowQuantiser,
    ) -> Result<Self, Refusal> {
        let (n, k, gpu) = (quantized.n, quantized.k, stream.device());
        let native = built::<L>(NATIVE, stream);
        let (codes, scales) = layout(native).pack(quantized);
        let inverse_balance = rows.inverse_balance.as_deref();
        let floats = bind.bias.map_or(0, <[f32]>::len) + inverse_balance.map_or(0, <[f32]>::len);
        let scratch = L::scratch_bytes(decode_band::BAND.max, k, 0);
        let bytes = codes.len() + scales.len() + floats * size_of::<f32>() + scratch;
        gpu.require(bind.seat, bytes as u64)?;
        gpu.make_current()?;
        let prefill = prefill::<L>(stream, options)?;
        L::prepare(prefill.is_some(), native)?;
        if let Some(Prefill { workspace, multiprocessors }) = &prefill {
            workspace.reserve(L::scratch_bytes(workspace.rows(), k, *multiprocessors))?;
        }
        let (groups, tiles) = (n.div_ceil(GROUP), k.div_ceil(TILE_K));
        let resident = Resident {
            n,
            k,
            codes: Buffer::from_host(stream, &codes, &[groups, tiles, CODES])?,
            scales: Buffer::from_host(stream, &scales, &[groups, tiles, SCALES])?,
            global: quantized.global,
            bias: bind.bias.map(|bias| Buffer::from_host(stream, bias, &[n])).transpose()?,
            inverse_balance: inverse_balance
                .map(|inverse| Buffer::from_host(stream, inverse, &[k]))
                .transpose()?,
            clusters: gpu.compute_capability().major >= 9,
            native,
            rows,
            launcher: PhantomData,
        };
        Ok(CudaForm {
            resident,
            scratch: Buffer::zeros(stream, &[scratch])?,
            prefill,
            stream: stream.clone(),
        })
    }
}

/// How the weights lie for the kernels that are to run.
fn layout(native: bool) -> &'static Layout {
    if native { &NATIVE_LAYOUT } else { &CONVERTED }
}

/// Whether the stream's device runs the code of an architecture, and that of no other that was built: the driver might choose the
/// other, and kernels that are this architecture's alone are empty there.
fn built<L: Launcher>(arch: Arch, stream: &Stream) -> bool {
    let device = stream.device().compute_capability();
    let runs: Vec<Arch> = L::KERNELS.built.iter().copied().filter(|built| built.runs_on(device)).collect();
    runs == [arch]
}

/// What calls of many rows need, where a workspace was given and the device has the code.
fn prefill<L: Launcher>(stream: &Stream, options: &Options<'_>) -> Result<Option<Prefill>, Refusal> {
    match options.workspace {
        Some(workspace) if built::<L>(PREFILL, stream) => {
            let multiprocessors = stream.device().multiprocessors()?;
            Ok(Some(Prefill { workspace: workspace.clone(), multiprocessors }))
        }
        _ => Ok(None),
    }
}

impl<L: Launcher + 'static> CudaWeights for CudaForm<L> {
    /// The quantiser takes the rows' gates too.
    const GATED: bool = true;

    fn project(matrices: &mut [CudaMatrix<'_, Self>], call: &CudaCall<'_>) -> Result<(), Refusal> {
        let Some((first, others)) = matrices.split_first_mut() else { return Ok(()) };
        let CudaForm { resident, scratch, prefill, .. } = &mut *first.weights;
        let mut all: SmallVec<[_; decode_band::MAX_MATRICES]> = smallvec![resident.matrix(&first.y)];
        all.extend(others.iter().map(|matrix| matrix.weights.resident.matrix(&matrix.y)));
        let band = decode_band::BAND.max;
        if let Some(Prefill { workspace, multiprocessors }) = prefill.as_ref().filter(|_| call.rows > band) {
            let launch = |scratch: ViewMut<'_>| {
                L::project(&all, &resident.call(call, scratch, workspace.rows(), *multiprocessors))
            };
            if let Some(launched) = workspace.lend(call.stream, launch) {
                return launched;
            }
        }
        // The rows are quantised in the scratch memory of the first.
        L::project(&all, &resident.call(call, scratch.view_mut(), band, 0))
    }

    /// Where no factors of their own divide the rows and the scales of both are made alike.
    fn joins(&self, other: &Self) -> bool {
        let (rows, others) = (&self.resident.rows, &other.resident.rows);
        let balanced = rows.inverse_balance.is_some() || others.inverse_balance.is_some();
        !balanced && rows.mode == others.mode && self.resident.native == other.resident.native
    }

    fn duplicate(&self) -> Result<Self, Refusal> {
        let (stream, resident) = (&self.stream, &self.resident);
        Ok(CudaForm {
            resident: Resident {
                codes: resident.codes.duplicate(stream)?,
                scales: resident.scales.duplicate(stream)?,
                bias: resident.bias.as_ref().map(|bias| bias.duplicate(stream)).transpose()?,
                inverse_balance: resident
                    .inverse_balance
                    .as_ref()
                    .map(|inverse| inverse.duplicate(stream))
                    .transpose()?,
                rows: resident.rows.clone(),
                ..*resident
            },
            scratch: self.scratch.duplicate(stream)?,
            prefill: self.prefill.clone(),
            stream: stream.clone(),
        })
    }

    fn operand(&self, row: &[f32]) -> Vec<f32> {
        self.resident.rows.operand(row)
    }

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        // Whole groups of 16 features are read back, then those before and after are dropped.
        let groups = features.start / GROUP..features.end.div_ceil(GROUP);
        let Resident { k, codes: packed_codes, scales: packed_scales, global, native, .. } = &self.resident;
        let tiles = groups.len() * k.div_ceil(TILE_K);
        let first_tile = groups.start * k.div_ceil(TILE_K);
        let (mut codes, mut scales) = (vec![0u8; tiles * CODES], vec![0u8; tiles * SCALES]);
        packed_codes.copy_range_to_host(&self.stream, first_tile * CODES, &mut codes)?;
        packed_scales.copy_range_to_host(&self.stream, first_tile * SCALES, &mut scales)?;
        let first = groups.start * GROUP;
        let quantized = layout(*native).unpack(&codes, &scales, *k, *global);
        Ok(quantized.dequantized(features.start - first..features.end - first, *global))
    }
}
