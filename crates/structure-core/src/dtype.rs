use std::fmt;

use serde::Serialize;

/// An element type that crosses a seat's boundary or is stored in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[allow(non_camel_case_types, reason = "the field's own spelling")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: binary32 with the low 16 bits cut off.
    BF16,
    /// OCP FP8 with 4 exponent and 3 mantissa bits, no infinities.
    F8_E4M3,
    /// Signed 8-bit integer.
    I8,
    /// Signed 32-bit integer.
    I32,
    /// Raw bytes, such as two E2M1 codes each.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::F8_E4M3 | DType::I8 | DType::U8 => 1,
        }
    }

    /// `BF16, F16 or F32`: a list as a person would write it.
    pub fn list(dtypes: &[DType]) -> String {
        let names: Vec<String> = dtypes.iter().map(ToString::to_string).collect();
        match names.split_last() {
            None => "nothing".to_string(),
            Some((last, [])) => last.clone(),
            Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
