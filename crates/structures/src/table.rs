//! Tables for a terminal.

use comfy_table::{ContentArrangement, Table, presets};
use structure_core::{Bound, Registration};

use crate::{Outcome, Plan};

fn table<const COLUMNS: usize>(header: [&str; COLUMNS]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header);
    table
}

/// The linked implementations: what each takes, and what it was built for or why it was not.
pub fn registrations_table(registrations: &[&Registration]) -> String {
    let mut table = table(["STRUCTURE", "VARIANT", "M", "WEIGHTS", "ACTIVATIONS", "TAKES", "KERNELS"]);
    for registration in registrations {
        let dims: Vec<String> = registration
            .envelope
            .dims
            .iter()
            .map(|dim| format!("{} {}", dim.name, short(dim.bound)))
            .collect();
        table.add_row([
            registration.id.structure.to_string(),
            registration.id.variant.to_string(),
            registration.envelope.band.to_string(),
            registration.formats.weights.to_string(),
            registration.formats.activations.to_string(),
            dims.join(", "),
            kernels(registration),
        ]);
    }
    trimmed(&table)
}

fn short(bound: Bound) -> String {
    let step = if bound.multiple_of > 1 { format!(" step {}", bound.multiple_of) } else { String::new() };
    format!("{}..={}{step}", bound.min, bound.max)
}

fn kernels(registration: &Registration) -> String {
    if registration.kernels.built.is_empty() {
        return format!("CPU arm only: {}", registration.kernels.why_not);
    }
    let arches: Vec<String> = registration.kernels.built.iter().map(ToString::to_string).collect();
    format!("CPU arm, {}", arches.join(", "))
}

impl Plan {
    /// One line a seat: its shape, who serves it, and why.
    pub fn table(&self) -> String {
        let mut table = table(["SEAT", "SHAPE", "SERVED BY", "WHY"]);
        for row in self.rows() {
            let dims: Vec<String> = row.dims.iter().map(ToString::to_string).collect();
            let (served, why) = match &row.outcome {
                Outcome::Bound { receipt, digest } => (
                    receipt.id.to_string(),
                    format!(
                        "bound for M {} on {}, other M dispatched to the host; conversion error {:.5}, receipt {}",
                        receipt.band,
                        receipt.device,
                        receipt.conversion_error,
                        digest.get(..12).unwrap_or(digest),
                    ),
                ),
                Outcome::Kept { reason } => ("host".to_string(), format!("kept: {reason}")),
                Outcome::Refused { id, reason } => ("host".to_string(), format!("{id} refused: {reason}")),
            };
            table.add_row([row.path.clone(), dims.join(" x "), served, why]);
        }
        let sum = self.summary();
        format!("{}\n\nbound {}, kept {}, refused {}", trimmed(&table), sum.bound, sum.kept, sum.refused)
    }
}

/// Without the spaces that pad the last column.
fn trimmed(table: &Table) -> String {
    table.lines().map(|line| line.trim().to_string()).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use structure_core::{Kernels, StructureId};

    use super::*;

    static NOT_BUILT: Kernels = Kernels { built: &[], why_not: "no nvcc was found", source_digest: "" };

    #[test]
    fn a_variant_without_kernels_says_why() {
        let linked = *crate::get("linear_proj", "w8a16_static").unwrap();
        let id = StructureId { structure: "linear_proj", variant: "other" };
        let other = Registration { id, kernels: &NOT_BUILT, ..linked };
        let table = registrations_table(&[&other]);
        let row = table.lines().nth(1).unwrap();
        assert!(row.starts_with("linear_proj"), "{table}");
        assert!(row.ends_with("CPU arm only: no nvcc was found"), "{table}");
    }
}
