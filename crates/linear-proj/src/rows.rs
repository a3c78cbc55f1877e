use device::{Stream, View, ViewMut};
use half::{bf16, f16};
use structure_core::{DType, Place, Refusal};

/// Elements in host memory, of a type a seat may be given.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// binary32.
    F32(&'a [f32]),
    /// binary16.
    F16(&'a [f16]),
    /// bfloat16.
    BF16(&'a [bf16]),
}

/// Elements in host memory, to be written.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    /// binary32.
    F32(&'a mut [f32]),
    /// binary16.
    F16(&'a mut [f16]),
    /// bfloat16.
    BF16(&'a mut [bf16]),
}

macro_rules! elements {
    ($($rust:ty => $variant:ident),*) => {
        $(impl<'a> From<&'a [$rust]> for Elements<'a> {
            fn from(elements: &'a [$rust]) -> Self {
                Elements::$variant(elements)
            }
        }
        impl<'a> From<&'a mut [$rust]> for ElementsMut<'a> {
            fn from(elements: &'a mut [$rust]) -> Self {
                ElementsMut::$variant(elements)
            }
        })*

        impl Elements<'_> {
            /// How many there are.
            pub fn len(&self) -> usize {
                match self { $(Elements::$variant(elements) => elements.len()),* }
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Their type.
            pub fn dtype(&self) -> DType {
                match self { $(Elements::$variant(_) => DType::$variant),* }
            }
        }

        impl ElementsMut<'_> {
            /// How many there are.
            pub fn len(&self) -> usize {
                match self { $(ElementsMut::$variant(elements) => elements.len()),* }
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Their type.
            pub fn dtype(&self) -> DType {
                match self { $(ElementsMut::$variant(_) => DType::$variant),* }
            }
        }
    };
}

elements!(f32 => F32, f16 => F16, bf16 => BF16);

impl Elements<'_> {
    /// Each element as binary32, exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Elements::F32(elements) => elements.to_vec(),
            Elements::F16(elements) => elements.iter().map(|element| element.to_f32()).collect(),
            Elements::BF16(elements) => elements.iter().map(|element| element.to_f32()).collect(),
        }
    }

    /// Each element rounded to BF16, to nearest with ties to even: what an implementation multiplies.
    pub fn to_bf16(&self) -> Vec<bf16> {
        match self {
            Elements::F32(elements) => elements.iter().map(|&element| bf16::from_f32(element)).collect(),
            Elements::F16(elements) => elements.iter().map(|e| bf16::from_f32(e.to_f32())).collect(),
            Elements::BF16(elements) => elements.to_vec(),
        }
    }
}

impl ElementsMut<'_> {
    /// Overwrites all elements with BF16 results. Into binary32 that is exact, into binary16 it rounds again.
    pub fn write_bf16(&mut self, results: impl Iterator<Item = bf16>) {
        match self {
            ElementsMut::F32(elements) => write(elements, results.map(bf16::to_f32)),
            ElementsMut::F16(elements) => write(elements, results.map(|r| f16::from_f32(r.to_f32()))),
            ElementsMut::BF16(elements) => write(elements, results),
        }
    }

    /// Overwrites all elements with binary32 results, rounded to the elements' type.
    pub fn write_f32(&mut self, results: impl Iterator<Item = f32>) {
        match self {
            ElementsMut::F32(elements) => write(elements, results),
            ElementsMut::F16(elements) => write(elements, results.map(f16::from_f32)),
            ElementsMut::BF16(elements) => write(elements, results.map(bf16::from_f32)),
        }
    }
}

fn write<T>(elements: &mut [T], results: impl Iterator<Item = T>) {
    for (element, result) in elements.iter_mut().zip(results) {
        *element = result;
    }
}

/// The input of a call: `rows` rows of `width` elements each, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    rows: usize,
    width: usize,
    data: RowsData<'a>,
}

/// Where the elements of [`Rows`] are.
#[derive(Clone, Copy, Debug)]
pub enum RowsData<'a> {
    /// Host memory.
    Host(Elements<'a>),
    /// Device memory, and the stream on which the elements are ready and the call is to run.
    Device(View<'a>, &'a Stream),
}

/// The output of a call: `rows` rows of `width` elements each, row-major and contiguous. Every element is written.
#[derive(Debug)]
pub struct RowsMut<'a> {
    rows: usize,
    width: usize,
    data: RowsMutData<'a>,
}

/// Where the elements of [`RowsMut`] are.
#[derive(Debug)]
pub enum RowsMutData<'a> {
    /// Host memory.
    Host(ElementsMut<'a>),
    /// Device memory; the call runs on the stream of its input.
    Device(ViewMut<'a>),
}

impl<'a> Rows<'a> {
    /// Rows in host memory.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when the slice does not hold `rows` times `width` elements.
    pub fn host(elements: impl Into<Elements<'a>>, rows: usize, width: usize) -> Result<Self, Refusal> {
        let elements = elements.into();
        check_len("input rows", elements.len(), rows, width)?;
        Ok(Rows { rows, width, data: RowsData::Host(elements) })
    }

    /// Rows in device memory, for a call on `stream`.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when the view does not hold `rows` times `width` elements.
    pub fn device(view: View<'a>, stream: &'a Stream, rows: usize, width: usize) -> Result<Self, Refusal> {
        check_len("input rows", view.len(), rows, width)?;
        Ok(Rows { rows, width, data: RowsData::Device(view, stream) })
    }

    /// M.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// K.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The elements' type.
    pub fn dtype(&self) -> DType {
        match self.data {
            RowsData::Host(elements) => elements.dtype(),
            RowsData::Device(view, _) => view.dtype(),
        }
    }

    /// Where the elements are.
    pub fn place(&self) -> Place {
        match self.data {
            RowsData::Host(_) => Place::Cpu,
            RowsData::Device(view, _) => Place::Cuda(view.ordinal()),
        }
    }

    /// The elements.
    pub fn data(&self) -> RowsData<'a> {
        self.data
    }
}

impl<'a> RowsMut<'a> {
    /// Rows in host memory.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when the slice does not hold `rows` times `width` elements.
    pub fn host(elements: impl Into<ElementsMut<'a>>, rows: usize, width: usize) -> Result<Self, Refusal> {
        let elements = elements.into();
        check_len("output rows", elements.len(), rows, width)?;
        Ok(RowsMut { rows, width, data: RowsMutData::Host(elements) })
    }

    /// Rows in device memory.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when the view does not hold `rows` times `width` elements.
    pub fn device(view: ViewMut<'a>, rows: usize, width: usize) -> Result<Self, Refusal> {
        check_len("output rows", view.len(), rows, width)?;
        Ok(RowsMut { rows, width, data: RowsMutData::Device(view) })
    }

    /// M.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// N.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The elements' type.
    pub fn dtype(&self) -> DType {
        match &self.data {
            RowsMutData::Host(elements) => elements.dtype(),
            RowsMutData::Device(view) => view.dtype(),
        }
    }

    /// Where the elements are.
    pub fn place(&self) -> Place {
        match &self.data {
            RowsMutData::Host(_) => Place::Cpu,
            RowsMutData::Device(view) => Place::Cuda(view.ordinal()),
        }
    }

    /// The elements.
    pub fn data(&mut self) -> &mut RowsMutData<'a> {
        &mut self.data
    }

    /// The elements, for as long as they are borrowed.
    pub fn into_data(self) -> RowsMutData<'a> {
        self.data
    }
}

fn check_len(what: &str, len: usize, rows: usize, width: usize) -> Result<(), Refusal> {
    if rows.checked_mul(width) == Some(len) {
        return Ok(());
    }
    Err(Refusal::ShapeMismatch { what: what.to_string(), expected: vec![rows, width], got: vec![len] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_as_long_as_they_say() {
        assert!(Rows::host(&[0.0f32; 6][..], 2, 3).is_ok());
        let refusal = Rows::host(&[0.0f32; 6][..], 2, 4).unwrap_err().to_string();
        assert_eq!(refusal, "input rows: shape [6], expected [2, 4]");
        assert!(RowsMut::host(&mut [0.0f32; 6][..], usize::MAX, 2).is_err());
    }

    #[test]
    fn f32_rows_round_to_bf16_ties_to_even() {
        // 1 + 2^-8 lies halfway between 1 and 1 + 2^-7; the even neighbour is 1. 1 + 3 * 2^-8 goes up.
        let halfway = [1.0 + 2f32.powi(-8), 1.0 + 3.0 * 2f32.powi(-8)];
        let rounded = Elements::F32(&halfway).to_bf16();
        assert_eq!(rounded.iter().map(|r| r.to_f32()).collect::<Vec<_>>(), [1.0, 1.0 + 2f32.powi(-6)]);
    }
}
