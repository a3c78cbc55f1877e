use serde::Serialize;

use crate::StructureId;

/// What the calls of one seat came to.
///
/// `calls = served + dispatched_by_band + fallbacks + refused` at all times.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SeatLedger {
    /// Calls made while an implementation was bound, whatever became of them.
    pub calls: u64,
    /// Calls the implementation ran.
    pub served: u64,
    /// Calls that the plan gives to the host form, because of their row count; never warned about.
    pub dispatched_by_band: u64,
    /// Calls that were not of the bound form and went to the host form.
    pub fallbacks: u64,
    /// Calls that ended in an error.
    pub refused: u64,
    /// Whether the seat was handed back to the host form after too many misses in a row.
    pub detached: bool,
    /// Why the last call that was not served was not.
    pub last_reason: Option<String>,
}

impl SeatLedger {
    /// Whether every call was served or dispatched as planned.
    pub fn is_clean(&self) -> bool {
        self.fallbacks == 0 && self.refused == 0 && !self.detached
    }
}

/// The ledgers of a model's bound seats, by seat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ledger {
    /// One row a bound seat: its path, what is bound there, and its counts.
    pub seats: Vec<(String, StructureId, SeatLedger)>,
}

/// The totals of a [`Ledger`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LedgerSummary {
    /// Bound seats.
    pub seats: usize,
    /// Sum of calls.
    pub calls: u64,
    /// Sum of calls served by implementations.
    pub served: u64,
    /// Sum of calls dispatched to host forms by band.
    pub dispatched_by_band: u64,
    /// Sum of fallbacks.
    pub fallbacks: u64,
    /// Sum of calls refused.
    pub refused: u64,
    /// Seats that handed themselves back to the host form.
    pub seats_detached: usize,
    /// Bound seats that no call has reached.
    pub seats_never_called: usize,
}

impl Ledger {
    /// Adds the seats up.
    pub fn summary(&self) -> LedgerSummary {
        let mut sum = LedgerSummary { seats: self.seats.len(), ..LedgerSummary::default() };
        for (_, _, seat) in &self.seats {
            sum.calls += seat.calls;
            sum.served += seat.served;
            sum.dispatched_by_band += seat.dispatched_by_band;
            sum.fallbacks += seat.fallbacks;
            sum.refused += seat.refused;
            sum.seats_detached += usize::from(seat.detached);
            sum.seats_never_called += usize::from(seat.calls == 0);
        }
        sum
    }
}

impl LedgerSummary {
    /// Whether every call of every seat was served or dispatched as planned.
    pub fn is_clean(&self) -> bool {
        self.fallbacks == 0 && self.refused == 0 && self.seats_detached == 0
    }
}
