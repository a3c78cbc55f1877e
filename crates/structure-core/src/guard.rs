use std::collections::BTreeSet;
use std::fmt;

use crate::{Band, DType, Fallback, Refusal, SeatLedger};

/// Misses in a row after which a seat hands itself back to its host form for good.
pub const MISSES_BEFORE_DETACH: u32 = 32;

/// Where rows or a seat's weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Host memory.
    Cpu,
    /// The memory of the CUDA device with this ordinal.
    Cuda(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Cpu => f.write_str("cpu"),
            Place::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// What a seat does with a call that is not of the bound form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuardMode {
    /// It goes to the host form, counted, and warned about once for each reason.
    #[default]
    Fallback,
    /// It is refused.
    Strict,
}

/// The form of call that a seat was bound for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Types that rows may come in.
    pub dtypes: &'static [DType],
    /// Elements of a row.
    pub width: usize,
    /// Where rows must be.
    pub place: Place,
    /// Rows of one call that the implementation serves itself.
    pub band: Band,
    /// What happens to calls that are not of this form.
    pub fallback: Fallback,
}

/// What one call brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The rows' type.
    pub dtype: DType,
    /// Elements of a row.
    pub width: usize,
    /// Where the rows are.
    pub place: Place,
    /// How many rows.
    pub rows: usize,
}

/// Who runs a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The implementation.
    Serve,
    /// The host form, as planned for this many rows.
    Dispatch,
    /// The host form, because the call was not of the bound form.
    FallBack,
}

/// Admits or turns away the calls of one bound seat, and keeps its ledger.
///
/// Checks come in this order: dtype, width, place, rows. The first three are misses: the call falls back or, where the
/// implementation has it so, the seat is strict or there is no host form, is refused, and [`MISSES_BEFORE_DETACH`] of them in a row detach the seat. A row count outside the band is not a miss but
/// a plan, and goes to the host form without a word.
#[derive(Clone, Debug)]
pub struct Guard {
    seat: String,
    form: Form,
    mode: GuardMode,
    has_host: bool,
    misses_in_a_row: u32,
    warned: BTreeSet<String>,
    ledger: SeatLedger,
}

impl Guard {
    /// Arms a guard for `seat`. Without a host form nothing can fall back, so every miss is refused.
    pub fn new(seat: impl Into<String>, form: Form, mode: GuardMode, has_host: bool) -> Self {
        Guard {
            seat: seat.into(),
            form,
            mode,
            has_host,
            misses_in_a_row: 0,
            warned: BTreeSet::new(),
            ledger: SeatLedger::default(),
        }
    }

    /// Decides who runs a call, and counts it.
    ///
    /// # Errors
    /// [`Refusal::GuardRefused`] for a miss that nothing may fall back from, [`Refusal::BandExceeded`] for a row
    /// count outside the band without a host form.
    pub fn admit(&mut self, offer: Offer) -> Result<Decision, Refusal> {
        self.ledger.calls += 1;
        if let Some(reason) = self.miss(offer) {
            return self.turn_away(reason);
        }
        self.misses_in_a_row = 0;
        if self.form.band.takes(offer.rows) {
            self.ledger.served += 1;
            return Ok(Decision::Serve);
        }
        if self.has_host {
            self.ledger.dispatched_by_band += 1;
            return Ok(Decision::Dispatch);
        }
        let refusal = Refusal::BandExceeded { what: self.seat.clone(), m: offer.rows, band: self.form.band };
        Err(self.refused(refusal))
    }

    /// Counts a call that was admitted and then failed while it ran.
    pub fn failed(&mut self, refusal: Refusal) -> Refusal {
        self.ledger.served -= 1;
        self.refused(refusal)
    }

    /// The counts so far.
    pub fn ledger(&self) -> &SeatLedger {
        &self.ledger
    }

    /// Whether the seat has handed itself back to its host form.
    pub fn is_detached(&self) -> bool {
        self.ledger.detached
    }

    fn refused(&mut self, refusal: Refusal) -> Refusal {
        self.ledger.refused += 1;
        self.ledger.last_reason = Some(refusal.to_string());
        refusal
    }

    /// What is wrong with a call, if anything; allocates only when something is.
    fn miss(&self, offer: Offer) -> Option<String> {
        let Form { dtypes, width, place, .. } = self.form;
        if !dtypes.contains(&offer.dtype) {
            Some(format!("rows are {}, bound for {}", offer.dtype, DType::list(dtypes)))
        } else if offer.width != width {
            Some(format!("rows have K = {}, bound for K = {width}", offer.width))
        } else if offer.place != place {
            Some(format!("rows are on {}, bound on {place}", offer.place))
        } else {
            None
        }
    }

    fn turn_away(&mut self, reason: String) -> Result<Decision, Refusal> {
        let policy = match (self.has_host, self.form.fallback, self.mode) {
            (false, ..) => Some("the seat has no host form"),
            (_, Fallback::Refuse, _) => Some("the implementation refuses what it was not bound for"),
            (.., GuardMode::Strict) => Some("the seat is strict"),
            _ => None,
        };
        if let Some(policy) = policy {
            let refusal = Refusal::GuardRefused { seat: self.seat.clone(), reason, policy };
            return Err(self.refused(refusal));
        }
        self.ledger.fallbacks += 1;
        self.misses_in_a_row += 1;
        if self.misses_in_a_row >= MISSES_BEFORE_DETACH {
            self.ledger.detached = true;
            log::warn!("{}: {MISSES_BEFORE_DETACH} misses in a row, handed back to the host form", self.seat);
        }
        if self.warned.insert(reason.clone()) {
            log::warn!("{}: {reason}; the host form ran instead", self.seat);
        }
        self.ledger.last_reason = Some(reason);
        Ok(Decision::FallBack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORM: Form = Form {
        dtypes: &[DType::BF16, DType::F32],
        width: 256,
        place: Place::Cpu,
        band: Band { min: 1, max: 16 },
        fallback: Fallback::HostForm,
    };
    const GOOD: Offer = Offer { dtype: DType::BF16, width: 256, place: Place::Cpu, rows: 1 };

    fn adds_up(guard: &Guard) {
        let SeatLedger { calls, served, dispatched_by_band, fallbacks, refused, .. } = *guard.ledger();
        assert_eq!(calls, served + dispatched_by_band + fallbacks + refused);
    }

    #[test]
    fn calls_are_served_in_the_band_and_dispatched_beside_it() {
        let mut guard = Guard::new("s", FORM, GuardMode::Strict, true);
        for (rows, decision) in
            [(0, Decision::Dispatch), (1, Decision::Serve), (16, Decision::Serve), (17, Decision::Dispatch)]
        {
            assert_eq!(guard.admit(Offer { rows, ..GOOD }), Ok(decision));
        }
        assert!(guard.ledger().is_clean());
        assert_eq!((guard.ledger().served, guard.ledger().dispatched_by_band), (2, 2));
        adds_up(&guard);
    }

    #[test]
    fn the_first_broken_check_is_the_reason() {
        let mut guard = Guard::new("s", FORM, GuardMode::Fallback, true);
        let all_wrong = Offer { dtype: DType::I8, width: 1, place: Place::Cuda(1), rows: 99 };
        for (offer, reason) in [
            (all_wrong, "rows are I8, bound for BF16 or F32"),
            (Offer { dtype: DType::F32, ..all_wrong }, "rows have K = 1, bound for K = 256"),
            (Offer { place: Place::Cuda(1), ..GOOD }, "rows are on cuda:1, bound on cpu"),
        ] {
            assert_eq!(guard.admit(offer), Ok(Decision::FallBack));
            assert_eq!(guard.ledger().last_reason.as_deref(), Some(reason));
        }
        assert_eq!(guard.ledger().fallbacks, 3);
        adds_up(&guard);
    }

    #[test]
    fn thirty_two_misses_in_a_row_detach_and_one_hit_starts_over() {
        let mut guard = Guard::new("s", FORM, GuardMode::Fallback, true);
        let bad = Offer { width: 8, ..GOOD };
        for _ in 0..31 {
            assert_eq!(guard.admit(bad), Ok(Decision::FallBack));
        }
        assert_eq!(guard.admit(GOOD), Ok(Decision::Serve));
        for _ in 0..31 {
            assert_eq!(guard.admit(bad), Ok(Decision::FallBack));
        }
        assert!(!guard.is_detached());
        assert_eq!(guard.admit(bad), Ok(Decision::FallBack));
        assert!(guard.is_detached());
        assert_eq!(guard.warned.len(), 1, "one reason is warned about once");
        adds_up(&guard);
    }

    #[test]
    fn strict_seats_and_seats_without_a_host_refuse() {
        let bad = Offer { width: 8, ..GOOD };
        let mut strict = Guard::new("s", FORM, GuardMode::Strict, true);
        let refusal = strict.admit(bad).unwrap_err().to_string();
        assert_eq!(refusal, "s: rows have K = 8, bound for K = 256; the seat is strict");
        assert_eq!((strict.ledger().fallbacks, strict.ledger().refused), (0, 1));
        let mut alone = Guard::new("s", FORM, GuardMode::Fallback, false);
        assert!(alone.admit(bad).unwrap_err().to_string().ends_with("the seat has no host form"));
        let refusal = alone.admit(Offer { rows: 17, ..GOOD }).unwrap_err().to_string();
        assert_eq!(
            refusal,
            "s: M = 17 is outside the band 1..=16 and the seat has no host form to dispatch to"
        );
        adds_up(&alone);
    }

    #[test]
    fn an_implementation_that_refuses_does_not_fall_back() {
        let form = Form { fallback: Fallback::Refuse, ..FORM };
        let mut guard = Guard::new("s", form, GuardMode::Fallback, true);
        let refusal = guard.admit(Offer { width: 8, ..GOOD }).unwrap_err().to_string();
        assert!(refusal.ends_with("; the implementation refuses what it was not bound for"), "{refusal}");
        assert_eq!((guard.ledger().fallbacks, guard.ledger().refused), (0, 1));
    }

    #[test]
    fn a_call_that_fails_while_it_runs_is_refused_not_served() {
        let mut guard = Guard::new("s", FORM, GuardMode::Fallback, true);
        assert_eq!(guard.admit(GOOD), Ok(Decision::Serve));
        guard.failed(Refusal::EmptyPrompt);
        assert_eq!((guard.ledger().served, guard.ledger().refused), (0, 1));
        adds_up(&guard);
    }
}
