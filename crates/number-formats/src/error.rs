//! What the formats refuse.

/// Why a tensor could not be converted or adopted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FormatError {
    /// A slice does not have the length that the shape `[N, K]` asks for.
    #[error("{what}: {got} elements, the shape asks for {expected}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// The length that the shape asks for, in elements.
        expected: usize,
        /// The length it has.
        got: usize,
    },
    /// K is not whole blocks.
    #[error("K = {k} is not a multiple of {multiple_of}")]
    PartialBlock {
        /// Input features.
        k: usize,
        /// The block's length along K.
        multiple_of: usize,
    },
    /// N * K does not fit in a `usize`.
    #[error("the shape [{n}, {k}] has more elements than can be addressed")]
    TooLarge {
        /// Output features.
        n: usize,
        /// Input features.
        k: usize,
    },
    /// A weight is infinite or NaN.
    #[error("element {index} is {value}, weights must be finite")]
    NonFinite {
        /// Place of the first such weight in the row-major tensor.
        index: usize,
        /// The weight.
        value: f32,
    },
    /// A stored block scale is negative or NaN.
    #[error("block scale {index} is {code:#04x}, UE4M3 codes end at 0x7e")]
    BlockScale {
        /// Place of the first such scale in the row-major scales.
        index: usize,
        /// The code.
        code: u8,
    },
    /// A stored global scale is out of range, as itself or as the multiplier it stands for.
    #[error("{what} is {value}, it must be {bound}")]
    GlobalScale {
        /// Which form of the scale.
        what: &'static str,
        /// The value it has.
        value: f32,
        /// What it must be.
        bound: &'static str,
    },
}

impl FormatError {
    /// Checks the length of `what`.
    pub(crate) fn check_length(what: &'static str, expected: usize, got: usize) -> Result<(), FormatError> {
        if got == expected { Ok(()) } else { Err(FormatError::Length { what, expected, got }) }
    }

    /// Elements of an `[N, K]` tensor.
    pub(crate) fn elements(n: usize, k: usize) -> Result<usize, FormatError> {
        n.checked_mul(k).ok_or(FormatError::TooLarge { n, k })
    }
}
