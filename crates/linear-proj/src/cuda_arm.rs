use std::ops::Range;

use device::{CudaDevice, Stream, View, ViewMut};
use structure_core::{DType, Form, Place, Receipt, Refusal, Registration};

use crate::cpu_arm::round_to_bf16;
use crate::proj::{check_band, check_features, form};
use crate::{Bind, BoundProj, LinearProj, Rows, RowsData, RowsMut, RowsMutData, Staged, check_call, gates};

/// Packed weights in device memory and the call of their launcher: what an implementation's `cuda.rs` has of its own.
pub trait CudaWeights: Send + Sized + 'static {
    /// Queues one call, which has been checked, on its stream. The device's context is current.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the launch fails.
    fn project(&mut self, call: &CudaCall<'_>) -> Result<(), Refusal>;

    /// The same weights once more, copied on the device.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`] or [`Refusal::Cuda`].
    fn duplicate(&self) -> Result<Self, Refusal>;

    /// A row as it enters the products; see [`BoundProj::operand`].
    fn operand(&self, row: &[f32]) -> Vec<f32> {
        round_to_bf16(row)
    }

    /// Rows `features`, which lie below N, of the weights as it multiplies them; see [`BoundProj::dequantized`].
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when they cannot be read back.
    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal>;
}

/// One call: M is in the band, rows and stream are the device's own, and `x` and `y` have M rows of K and of N elements.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CudaCall<'a> {
    /// `[M, K]` of `dtype`.
    pub x: View<'a>,
    /// `[M, N]` of `dtype`, borrowed mutably by the caller.
    pub y: &'a ViewMut<'a>,
    /// M.
    pub rows: usize,
    /// The type of both.
    pub dtype: RowType,
    /// Where the call is queued.
    pub stream: &'a Stream,
}

/// The types that rows may have, for a launcher to tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowType {
    /// binary32.
    F32,
    /// binary16.
    F16,
    /// bfloat16.
    BF16,
}

/// The CUDA arm of an implementation: every check of a call, then its launcher.
pub struct CudaArm<W> {
    weights: W,
    dims: [usize; 2],
    gpu: CudaDevice,
    form: Form,
    receipt: Receipt,
}

impl<W: CudaWeights> CudaArm<W> {
    /// Binds weights that are on the device of `stream`, and runs the smoke on it; `receipt` is that of the bind.
    ///
    /// # Errors
    /// What [`gates::smoke`] says, and [`Refusal::OutOfMemory`] when the rows of the smoke do not fit.
    pub fn bind(
        weights: W,
        stream: &Stream,
        bind: &Bind<'_>,
        entry: &Registration,
        receipt: Receipt,
    ) -> Result<Self, Refusal> {
        let gpu = stream.device().clone();
        let dims = [bind.weights.n(), bind.weights.k()];
        let form = form(entry, dims[1], Place::Cuda(gpu.ordinal()));
        let mut staged = Staged::new(CudaArm { weights, dims, gpu, form, receipt }, stream)?;
        let smoke = gates::smoke(&mut staged, bind.bias)?;
        let mut arm = staged.into_inner();
        arm.receipt.smoke = smoke;
        Ok(arm)
    }

    fn wrong_device(&self, rows: Place) -> Refusal {
        let (rows, seat) = (rows.to_string(), self.form.place.to_string());
        Refusal::WrongDevice { what: self.receipt.seat.clone(), rows, seat }
    }

    fn row_type(&self, dtype: DType) -> Result<RowType, Refusal> {
        match dtype {
            DType::F32 => Ok(RowType::F32),
            DType::F16 => Ok(RowType::F16),
            DType::BF16 => Ok(RowType::BF16),
            other => Err(Refusal::DTypeOutside {
                what: format!("{}: input rows", self.receipt.seat),
                dtype: other.to_string(),
                accepted: DType::list(self.form.dtypes),
            }),
        }
    }
}

impl<W: CudaWeights> LinearProj for CudaArm<W> {
    fn n(&self) -> usize {
        self.dims[0]
    }

    fn k(&self) -> usize {
        self.dims[1]
    }

    fn project(&mut self, x: Rows<'_>, mut y: RowsMut<'_>) -> Result<(), Refusal> {
        check_call(&self.receipt.seat, self.n(), self.k(), &x, &y)?;
        check_band(&self.receipt.seat, x.rows(), self.form.band)?;
        let dtype = self.row_type(x.dtype())?;
        let (RowsData::Device(input, stream), RowsMutData::Device(output)) = (x.data(), y.data()) else {
            return Err(self.wrong_device(x.place()));
        };
        let ordinal = self.gpu.ordinal();
        if input.ordinal() != ordinal || stream.device().ordinal() != ordinal {
            return Err(self.wrong_device(x.place()));
        }
        self.gpu.make_current()?;
        self.weights.project(&CudaCall { x: input, y: output, rows: x.rows(), dtype, stream })
    }
}

impl<W: CudaWeights> BoundProj for CudaArm<W> {
    fn form(&self) -> Form {
        self.form
    }

    fn receipt(&self) -> &Receipt {
        &self.receipt
    }

    fn operand(&self, row: &[f32]) -> Vec<f32> {
        self.weights.operand(row)
    }

    fn duplicate(&self, seat: &str) -> Result<Option<Box<dyn BoundProj>>, Refusal> {
        Ok(Some(Box::new(CudaArm {
            weights: self.weights.duplicate()?,
            dims: self.dims,
            gpu: self.gpu.clone(),
            form: self.form,
            receipt: Receipt { seat: seat.to_string(), ..self.receipt.clone() },
        })))
    }

    fn dequantized(&self, features: Range<usize>) -> Result<Vec<f32>, Refusal> {
        check_features(&features, self.n())?;
        self.weights.dequantized(features)
    }
}
