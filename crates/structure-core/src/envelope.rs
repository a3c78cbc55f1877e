use std::fmt;

use serde::Serialize;

use crate::{DType, Refusal};

/// What values a dimension may have: from `min` to `max`, both taken, in steps of `multiple_of`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bound {
    /// The smallest value taken.
    pub min: u64,
    /// The largest value taken.
    pub max: u64,
    /// Every value is a multiple of this; 1 asks for nothing.
    pub multiple_of: u64,
}

impl Bound {
    /// Whether `value` lies inside.
    pub const fn takes(&self, value: u64) -> bool {
        self.min <= value && value <= self.max && value.is_multiple_of(self.multiple_of)
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..={}", self.min, self.max)?;
        if self.multiple_of > 1 { write!(f, " in steps of {}", self.multiple_of) } else { Ok(()) }
    }
}

/// A dimension by name, with its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DimBound {
    /// The dimension, in the field's own letters: `N`, `K`, `head_dim`.
    pub name: &'static str,
    /// The values it may have.
    pub bound: Bound,
}

/// The rows (M) of one call that an implementation serves itself, both ends taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Band {
    /// The fewest rows.
    pub min: usize,
    /// The most rows.
    pub max: usize,
}

impl Band {
    /// Whether a call of `m` rows lies inside.
    pub const fn takes(&self, m: usize) -> bool {
        self.min <= m && m <= self.max
    }
}

impl fmt::Display for Band {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..={}", self.min, self.max)
    }
}

/// What an implementation takes at bind time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Envelope {
    /// The dimensions with their bounds.
    pub dims: &'static [DimBound],
    /// The types the weights may come in.
    pub weight_dtypes: &'static [DType],
    /// The types the rows of a call may come in.
    pub row_dtypes: &'static [DType],
    /// The rows of one call that it serves itself.
    pub band: Band,
}

impl Envelope {
    /// Checks a bind: every dimension of the envelope against the value given for it, then the weights' type.
    ///
    /// `what` names the seat in the refusal. A dimension the envelope has no bound for is not checked, and one that
    /// `dims` lacks is refused as 0.
    ///
    /// # Errors
    /// [`Refusal::DimOutside`] or [`Refusal::DTypeOutside`], with the value and the bound.
    pub fn check(&self, what: &str, dims: &[(&'static str, u64)], weights: DType) -> Result<(), Refusal> {
        self.check_dims(what, dims)?;
        if !self.weight_dtypes.contains(&weights) {
            return Err(Refusal::DTypeOutside {
                what: format!("{what}: weights"),
                dtype: weights.to_string(),
                accepted: DType::list(self.weight_dtypes),
            });
        }
        Ok(())
    }

    /// The dimensions alone, of what has no weights.
    ///
    /// # Errors
    /// [`Refusal::DimOutside`], with the value and the bound.
    pub fn check_dims(&self, what: &str, dims: &[(&'static str, u64)]) -> Result<(), Refusal> {
        for DimBound { name, bound } in self.dims {
            let value = dims.iter().find(|(given, _)| given == name).map_or(0, |(_, value)| *value);
            if !bound.takes(value) {
                return Err(Refusal::DimOutside { what: what.to_string(), dim: name, value, bound: *bound });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENVELOPE: Envelope = Envelope {
        dims: &[
            DimBound { name: "N", bound: Bound { min: 1, max: 100, multiple_of: 1 } },
            DimBound { name: "K", bound: Bound { min: 16, max: 64, multiple_of: 16 } },
        ],
        weight_dtypes: &[DType::BF16, DType::F32],
        row_dtypes: &[DType::BF16],
        band: Band { min: 1, max: 16 },
    };

    #[test]
    fn both_ends_are_taken_and_their_neighbours_are_not() {
        let check = |n, k| ENVELOPE.check("seat", &[("N", n), ("K", k)], DType::BF16);
        for (n, k) in [(1, 16), (100, 64), (7, 48)] {
            assert_eq!(check(n, k), Ok(()));
        }
        for (n, k, text) in [
            (0, 16, "seat: N = 0 is outside 1..=100"),
            (101, 16, "seat: N = 101 is outside 1..=100"),
            (1, 15, "seat: K = 15 is outside 16..=64 in steps of 16"),
            (1, 24, "seat: K = 24 is outside 16..=64 in steps of 16"),
            (1, 80, "seat: K = 80 is outside 16..=64 in steps of 16"),
        ] {
            assert_eq!(check(n, k).unwrap_err().to_string(), text);
        }
    }

    #[test]
    fn a_missing_dim_and_a_foreign_dtype_are_refused() {
        assert!(ENVELOPE.check("seat", &[("N", 1)], DType::BF16).is_err());
        let refusal = ENVELOPE.check("seat", &[("N", 1), ("K", 16)], DType::I8).unwrap_err();
        assert_eq!(refusal.to_string(), "seat: weights: dtype I8 is not one of BF16 or F32");
    }
}
