//! Projections over BF16 weights.

use std::any::Any;

use device::{Buffer, CudaDevice, Stream, View};
use half::bf16;
use linear_proj::decode_band::{BAND, MAX_MATRICES};
use linear_proj::{DenseWeights, LinearProj, Rows, RowsData, RowsMut, RowsMutData, Together, check_call};
use rayon::prelude::*;
use structure_core::{Arch, DType, Place, Refusal};

use super::check;
use crate::{KERNELS, ffi};

const _: () = assert!(MAX_MATRICES == ffi::QWEN3_5_LINEAR_MAX_MATRICES as usize);

/// The architecture that has the kernel for prompts.
const PROMPTS: Arch = Arch::new(90, true);
/// Output features of a group: weights are packed by whole groups.
const GROUP: usize = 16;
/// Input features of a tile.
const TILE_K: usize = 32;
/// About how many weights are staged at a time on their way to the device.
const STAGED: usize = 1 << 24;

/// The host's form of a projection on a GPU: BF16 weights, FP32 sums.
///
/// Rows of F32 and F16 are rounded to BF16 once; results are rounded once to the type of the rows, so those of F32 rows are the FP32
/// sums themselves. Up to 16 rows the bits of a row depend on that row alone. More rows of BF16 whose K is a multiple of 8 go to
/// tensor cores on sm_90a; any others pass in runs of 16 rows, each of which reads the weights again. No call needs scratch memory.
#[derive(Debug)]
pub struct Bf16Linear {
    seat: String,
    n: usize,
    k: usize,
    gpu: CudaDevice,
    /// `[ceil(N / 16), ceil(K / 32), 512]`, as `qwen3_5_linear_pack` writes them.
    weights: Buffer<bf16>,
    clusters: bool,
    /// How many the device has, where the kernel for prompts runs; else 0.
    multiprocessors: usize,
}

impl Bf16Linear {
    /// Weights `[N, K]` on the device of `stream`, each rounded to BF16 once; loads the kernels, so that no later call does. `seat`
    /// is the path that refusals name.
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`] where N or K is 0, [`Refusal::OutOfMemory`] with the bytes asked and free, [`Refusal::Cuda`].
    pub fn new(stream: &Stream, seat: impl Into<String>, weights: DenseWeights<'_>) -> Result<Self, Refusal> {
        let mut linear = Self::unwritten(stream, seat.into(), weights.n(), weights.k())?;
        linear.upload(stream, &weights)?;
        Ok(linear)
    }

    /// The same weights once more, in memory of their own.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] with the bytes asked and free, [`Refusal::WrongDevice`] for a stream of another device,
    /// [`Refusal::Cuda`].
    pub fn duplicate(&self, stream: &Stream) -> Result<Self, Refusal> {
        self.check_device(stream)?;
        let mut copy = Self::unwritten(stream, self.seat.clone(), self.n, self.k)?;
        let to = copy.weights.view_mut().pointer() as *mut _;
        let from = self.weights.view().pointer() as *const _;
        // SAFETY: both buffers have these bytes, and the stream is waited for before either can be dropped.
        check("qwen3_5_linear_copy", unsafe {
            ffi::qwen3_5_linear_copy(to, from, self.bytes() as i64, stream.raw().cast())
        })?;
        stream.synchronize()?;
        Ok(copy)
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.weights.bytes()
    }

    fn unwritten(stream: &Stream, seat: String, n: usize, k: usize) -> Result<Self, Refusal> {
        for (dim, value) in [("N", n), ("K", k)] {
            if value == 0 {
                let bound = "at least 1".to_string();
                return Err(Refusal::ValueOutside {
                    what: format!("{seat}: {dim}"),
                    value: "0".to_string(),
                    bound,
                });
            }
        }
        let gpu = stream.device().clone();
        let prompts = has_prompts(&gpu);
        gpu.make_current()?;
        // SAFETY: the device's context is current.
        check("qwen3_5_linear_prepare", unsafe { ffi::qwen3_5_linear_prepare(prompts.into()) })?;
        let shape = [n.div_ceil(GROUP), k.div_ceil(TILE_K), GROUP * TILE_K];
        let bytes = shape.iter().product::<usize>() * size_of::<bf16>();
        gpu.require(&seat, bytes as u64)?;
        Ok(Bf16Linear {
            weights: Buffer::zeros(stream, &shape)?,
            clusters: gpu.compute_capability().major >= 9,
            multiprocessors: if prompts { gpu.multiprocessors()? } else { 0 },
            seat,
            n,
            k,
            gpu,
        })
    }

    /// Decodes the weights some rows at a time, and has the device pack them.
    fn upload(&mut self, stream: &Stream, weights: &DenseWeights<'_>) -> Result<(), Refusal> {
        let rows = (STAGED / self.k).next_multiple_of(GROUP).clamp(GROUP, self.n.next_multiple_of(GROUP));
        let mut decoded = vec![bf16::ZERO; rows * self.k];
        let mut staged = Buffer::<bf16>::zeros(stream, &[rows, self.k])?;
        for first in (0..self.n).step_by(rows) {
            let count = rows.min(self.n - first);
            decoded.par_chunks_mut(self.k).take(count).enumerate().for_each_init(
                || vec![0.0; self.k],
                |row, (index, out)| {
                    weights.decode_row(first + index, row);
                    out.iter_mut().zip(row).for_each(|(out, weight)| *out = bf16::from_f32(*weight));
                },
            );
            // In the order of the stream, after the rows before have been packed.
            staged.copy_from_host(stream, &decoded)?;
            let call = ffi::qwen3_5_linear_pack_call {
                rows: staged.view().pointer() as *const _,
                weights: self.weights.view_mut().pointer() as *mut _,
                first: first as i64,
                count: count as i64,
                k: self.k as i64,
            };
            // SAFETY: `staged` has the rows, and `first` and `count` lie within the N rows that the weights have room for; the
            // stream is waited for below, before anything is dropped.
            check("qwen3_5_linear_pack", unsafe { ffi::qwen3_5_linear_pack(&call, stream.raw().cast()) })?;
        }
        stream.synchronize()
    }

    fn check_device(&self, stream: &Stream) -> Result<(), Refusal> {
        if stream.device().ordinal() == self.gpu.ordinal() {
            return Ok(());
        }
        Err(self.wrong_device(Place::Cuda(stream.device().ordinal())))
    }

    fn wrong_device(&self, rows: Place) -> Refusal {
        let (rows, seat) = (rows.to_string(), Place::Cuda(self.gpu.ordinal()).to_string());
        Refusal::WrongDevice { what: self.seat.clone(), rows, seat }
    }

    /// The row type and the rows of a call, on this device.
    fn rows<'a>(&self, x: &Rows<'a>) -> Result<(u32, View<'a>, &'a Stream), Refusal> {
        let dtype = match x.dtype() {
            DType::F32 => ffi::QWEN3_5_LINEAR_F32,
            DType::F16 => ffi::QWEN3_5_LINEAR_F16,
            DType::BF16 => ffi::QWEN3_5_LINEAR_BF16,
            other => {
                return Err(Refusal::DTypeOutside {
                    what: format!("{}: input rows", self.seat),
                    dtype: other.to_string(),
                    accepted: DType::list(&[DType::F32, DType::F16, DType::BF16]),
                });
            }
        };
        let RowsData::Device(input, stream) = x.data() else { return Err(self.wrong_device(x.place())) };
        if input.ordinal() != self.gpu.ordinal() {
            return Err(self.wrong_device(x.place()));
        }
        self.check_device(stream)?;
        Ok((dtype, input, stream))
    }

    /// This matrix of a launch; `y` is borrowed by the caller until it is queued.
    fn matrix(&self, x: &Rows<'_>, y: &mut RowsMut<'_>) -> Result<ffi::qwen3_5_linear_matrix, Refusal> {
        check_call(&self.seat, self.n, self.k, x, y)?;
        let RowsMutData::Device(output) = y.data() else { return Err(self.wrong_device(x.place())) };
        Ok(ffi::qwen3_5_linear_matrix {
            weights: self.weights.view().pointer() as *const _,
            y: output.pointer() as *mut _,
            n: self.n as i64,
        })
    }
}

/// Whether the device runs the kernel for prompts, and the code of no other architecture that was built: the driver might choose
/// that, and the kernel is empty there.
fn has_prompts(gpu: &CudaDevice) -> bool {
    let device = gpu.compute_capability();
    let mut runs = KERNELS.built.iter().filter(|built| built.runs_on(device));
    runs.next() == Some(&PROMPTS) && runs.next().is_none()
}

impl LinearProj for Bf16Linear {
    fn n(&self) -> usize {
        self.n
    }

    fn k(&self) -> usize {
        self.k
    }

    fn project(&mut self, x: Rows<'_>, y: RowsMut<'_>) -> Result<(), Refusal> {
        self.project_with(x, y, &mut [])
    }

    fn project_with(
        &mut self,
        x: Rows<'_>,
        mut y: RowsMut<'_>,
        others: &mut [Option<Together<'_>>],
    ) -> Result<(), Refusal> {
        let (dtype, input, stream) = self.rows(&x)?;
        let mut call = ffi::qwen3_5_linear_call {
            matrices: [self.matrix(&x, &mut y)?; MAX_MATRICES],
            count: 1,
            dtype: dtype as i32,
            x: input.pointer() as *const _,
            m: x.rows() as i64,
            k: self.k as i64,
            clusters: self.clusters.into(),
            multiprocessors: self.multiprocessors as i32,
            overlap: stream.overlap().into(),
        };
        let others = if BAND.takes(x.rows()) { others } else { &mut [] };
        for place in others {
            let Some(argument) = call.matrices.get_mut(call.count as usize) else { break };
            let Some(Together { proj, y }) = place else { continue };
            let Some(other) = (&**proj as &dyn Any).downcast_ref::<Self>() else { continue };
            *argument = other.matrix(&x, y)?;
            call.count += 1;
            *place = None;
        }
        self.gpu.make_current()?;
        // SAFETY: rows hold as many elements of the type as their shape says, all on this device, and the weights those of N and K;
        // a view's contract holds until the stream's work is done.
        check("qwen3_5_linear", unsafe { ffi::qwen3_5_linear(&call, stream.raw().cast()) })
    }
}
