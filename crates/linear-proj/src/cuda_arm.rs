use std::any::Any;
use std::ops::Range;

use device::{CudaDevice, Stream, View, ViewMut};
use smallvec::{SmallVec, smallvec};
use structure_core::{DType, Form, Place, Receipt, Refusal, Registration};

use crate::cpu_arm::round_to_bf16;
use crate::proj::{check_band, check_features, form};
use crate::{
    Bind, BoundProj, GatedProj, LinearProj, Rows, RowsData, RowsMut, RowsMutData, Staged, Together,
    check_call, decode_band, gates,
};

/// Packed weights in device memory and the call of their launcher: what an implementation's `cuda.rs` has of its own.
pub trait CudaWeights: Send + Sized + 'static {
    /// Whether its calls may have a gate.
    const GATED: bool = false;

    /// Queues one call, which has been checked, on its stream: its rows times each of `matrices`, one at least and of up to 16 rows
    /// [`decode_band::MAX_MATRICES`] at most, all of which [join](Self::joins) the first. The device's context is current.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the launch fails.
    fn project(matrices: &mut [CudaMatrix<'_, Self>], call: &CudaCall<'_>) -> Result<(), Refusal>;

    /// Whether other weights on the same device can be in one launch with these: rows enter the products of both alike.
    fn joins(&self, other: &Self) -> bool;

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

/// A matrix of a call, and where its rows go.
#[derive(Debug)]
#[non_exhaustive]
pub struct CudaMatrix<'a, W> {
    /// Its weights.
    pub weights: &'a mut W,
    /// `[M, N]` of the call's `dtype`.
    pub y: ViewMut<'a>,
}

/// One call: M is in the band, rows and stream are the device's own, `x` has M rows of K elements and each `y` M of its matrix's N.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CudaCall<'a> {
    /// `[M, K]` of `dtype`.
    pub x: View<'a>,
    /// BF16 `[M, K]`, in calls of [gated](GatedProj) rows: what `x`, which is BF16 too, is to be multiplied by silu of.
    pub gate: Option<View<'a>>,
    /// M.
    pub rows: usize,
    /// The type of all rows.
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

    /// Checks the rows of a call against this seat.
    fn matrix<'a>(&'a mut self, x: &Rows<'_>, y: RowsMut<'a>) -> Result<CudaMatrix<'a, W>, Refusal> {
        check_call(&self.receipt.seat, self.n(), self.k(), x, &y)?;
        check_band(&self.receipt.seat, x.rows(), self.form.band)?;
        match y.into_data() {
            RowsMutData::Device(y) => Ok(CudaMatrix { weights: &mut self.weights, y }),
            RowsMutData::Host(_) => Err(self.wrong_device(x.place())),
        }
    }

    /// Rows that are on this device.
    fn on_device<'a>(&self, x: &Rows<'a>) -> Result<(View<'a>, &'a Stream), Refusal> {
        let ordinal = self.gpu.ordinal();
        match x.data() {
            RowsData::Device(view, stream) if [view.ordinal(), stream.device().ordinal()] == [ordinal; 2] => {
                Ok((view, stream))
            }
            _ => Err(self.wrong_device(x.place())),
        }
    }

    /// The gate and the rows of a gated call.
    fn gated_rows<'a>(
        &self,
        gate: &Rows<'a>,
        x: &Rows<'a>,
    ) -> Result<(View<'a>, View<'a>, &'a Stream), Refusal> {
        let seat = &self.receipt.seat;
        check_band(seat, x.rows(), decode_band::BAND)?;
        if [gate.rows(), gate.width()] != [x.rows(), self.k()] {
            let (expected, got) = (vec![x.rows(), self.k()], vec![gate.rows(), gate.width()]);
            return Err(Refusal::ShapeMismatch { what: format!("{seat}: gate"), expected, got });
        }
        for rows in [gate, x] {
            if rows.dtype() != DType::BF16 {
                let (what, dtype) = (format!("{seat}: gated rows"), rows.dtype().to_string());
                return Err(Refusal::DTypeOutside { what, dtype, accepted: DType::list(&[DType::BF16]) });
            }
        }
        let (view, stream) = self.on_device(x)?;
        Ok((self.on_device(gate)?.0, view, stream))
    }

    /// Whether a projection can be in one launch with this one's weights.
    fn joins(weights: &W, ordinal: usize, proj: &dyn LinearProj) -> bool {
        let other = (proj as &dyn Any).downcast_ref::<Self>();
        other.is_some_and(|other| other.gpu.ordinal() == ordinal && weights.joins(&other.weights))
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

    fn project(&mut self, x: Rows<'_>, y: RowsMut<'_>) -> Result<(), Refusal> {
        self.project_with(x, y, &mut [])
    }

    fn project_with(
        &mut self,
        x: Rows<'_>,
        y: RowsMut<'_>,
        others: &mut [Option<Together<'_>>],
    ) -> Result<(), Refusal> {
        let (gpu, dtype, ordinal) = (self.gpu.clone(), self.row_type(x.dtype())?, self.gpu.ordinal());
        let (input, stream) = self.on_device(&x)?;
        let mut matrices: SmallVec<[_; decode_band::MAX_MATRICES]> = smallvec![self.matrix(&x, y)?];
        let others = if decode_band::BAND.takes(x.rows()) { others } else { &mut [] };
        for place in others {
            let joins = |other: &mut Together<'_>| Self::joins(matrices[0].weights, ordinal, other.proj);
            if matrices.len() == matrices.inline_size() {
                break;
            }
            let Some(Together { proj, y }) = place.take_if(joins) else { continue };
            if let Some(arm) = (proj as &mut dyn Any).downcast_mut::<Self>() {
                matrices.push(arm.matrix(&x, y)?);
            }
        }
        gpu.make_current()?;
        W::project(&mut matrices, &CudaCall { x: input, gate: None, rows: x.rows(), dtype, stream })
    }

    fn gated(&mut self) -> Option<&mut dyn GatedProj> {
        if W::GATED { Some(self) } else { None }
    }
}

impl<W: CudaWeights> GatedProj for CudaArm<W> {
    fn project(&mut self, gate: Rows<'_>, x: Rows<'_>, y: RowsMut<'_>) -> Result<(), Refusal> {
        let (gate_view, input, stream) = self.gated_rows(&gate, &x)?;
        let (gpu, rows) = (self.gpu.clone(), x.rows());
        let call = CudaCall { x: input, gate: Some(gate_view), rows, dtype: RowType::BF16, stream };
        let matrix = self.matrix(&x, y)?;
        gpu.make_current()?;
        W::project(&mut [matrix], &call)
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
