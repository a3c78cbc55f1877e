use serde::Serialize;
use structure_core::{Receipt, StructureId};

/// What serves each part of a host, and why.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Plan {
    rows: Vec<PlanRow>,
}

/// One seat or bank of a host.
#[derive(Clone, Debug, Serialize)]
pub struct PlanRow {
    /// Its path in the checkpoint.
    pub path: String,
    /// `[N, K]` of a projection, `[E, 2I, H]` of an expert bank.
    pub dims: Vec<usize>,
    /// What became of it.
    pub outcome: Outcome,
}

/// What became of one seat or bank.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub enum Outcome {
    /// An implementation serves the rows of its band; other row counts are dispatched to the host form.
    Bound {
        /// sha256 of the receipt's canonical JSON, in hex.
        digest: String,
        /// What was bound.
        receipt: Box<Receipt>,
    },
    /// The host's own form serves it.
    Kept {
        /// Why.
        reason: String,
    },
    /// An implementation was asked for and refused; the host's own form serves it.
    Refused {
        /// The implementation.
        id: StructureId,
        /// Its refusal.
        reason: String,
    },
}

/// A [`Plan`] in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PlanSummary {
    /// Seats that an implementation serves.
    pub bound: usize,
    /// Seats and banks at the host's own form.
    pub kept: usize,
    /// Seats whose implementation refused.
    pub refused: usize,
}

impl Plan {
    /// Adds a row.
    pub fn push(&mut self, path: impl Into<String>, dims: impl Into<Vec<usize>>, outcome: Outcome) {
        self.rows.push(PlanRow { path: path.into(), dims: dims.into(), outcome });
    }

    /// All rows, in the order of the host.
    pub fn rows(&self) -> &[PlanRow] {
        &self.rows
    }

    /// The numbers.
    pub fn summary(&self) -> PlanSummary {
        let mut sum = PlanSummary::default();
        for row in &self.rows {
            match row.outcome {
                Outcome::Bound { .. } => sum.bound += 1,
                Outcome::Kept { .. } => sum.kept += 1,
                Outcome::Refused { .. } => sum.refused += 1,
            }
        }
        sum
    }

    /// The first refusal, with its seat: `path: reason`.
    pub fn first_refusal(&self) -> Option<&str> {
        self.rows.iter().find_map(|row| match &row.outcome {
            Outcome::Refused { reason, .. } => Some(reason.as_str()),
            _ => None,
        })
    }
}
