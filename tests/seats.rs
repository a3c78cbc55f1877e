//! A seat in front of a host form: served in the band, dispatched beside it, back on the host form bit for bit on detach.

use libtest_mimic::Trial;
use linear_proj::{LinearProj, Rows, RowsData, RowsMut, RowsMutData, Seat, dot};
use structure_core::{GuardMode, MISSES_BEFORE_DETACH, Refusal};

use crate::arm::{Arm, on_each_arm};
use crate::gates::VARIANTS;
use crate::random::Random;

const N: usize = 24;
const K: usize = 80;

pub fn trials() -> Vec<Trial> {
    [
        on_each_arm("seat::serves_dispatches_and_detaches", |arm| {
            VARIANTS.iter().for_each(|variant| serves_dispatches_and_detaches(arm, variant));
        }),
        on_each_arm("seat::an_implementation_may_refuse_to_fall_back", an_implementation_may_refuse),
        on_each_arm("seat::falls_back_and_hands_itself_back", falls_back_and_hands_itself_back),
        on_each_arm("seat::strict_refuses", strict_refuses),
        on_each_arm("seat::without_a_host_refuses", without_a_host_refuses),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A host form in FP32, which takes rows of any width so that the guard's own check of K can be seen.
struct HostForm {
    w: Vec<f32>,
}

impl LinearProj for HostForm {
    fn n(&self) -> usize {
        N
    }

    fn k(&self) -> usize {
        K
    }

    fn project(&mut self, x: Rows<'_>, mut y: RowsMut<'_>) -> Result<(), Refusal> {
        let (RowsData::Host(elements), RowsMutData::Host(out)) = (x.data(), y.data()) else {
            panic!("host rows");
        };
        let rows = elements.to_f32();
        out.write_f32(rows.chunks(x.width()).flat_map(|x| self.w.chunks(K).map(move |w| dot(w, x))));
        Ok(())
    }
}

fn seat(arm: &Arm, variant: &str, mode: GuardMode) -> (Seat, Vec<f32>) {
    let w = Random::new(7).normals(N * K, 0.2);
    let mut seat = Seat::new("seat", Box::new(HostForm { w: w.clone() }));
    seat.bind(arm.bind_staged(variant, &w, N, None), mode).unwrap();
    (seat, w)
}

fn call(seat: &mut Seat, x: &[f32], width: usize) -> Result<Vec<f32>, Refusal> {
    let rows = x.len() / width;
    let mut y = vec![f32::NAN; rows * N];
    seat.project(Rows::host(x, rows, width)?, RowsMut::host(&mut y[..], rows, N)?)?;
    Ok(y)
}

fn serves_dispatches_and_detaches(arm: &Arm, variant: &str) {
    let (mut seat, w) = seat(arm, variant, GuardMode::Fallback);
    let x = Random::new(8).normals(17 * K, 1.0);
    let mut host = Seat::new("host", Box::new(HostForm { w }));
    let (host_one, host_many) = (call(&mut host, &x[..K], K).unwrap(), call(&mut host, &x, K).unwrap());

    assert_ne!(call(&mut seat, &x[..K], K).unwrap(), host_one, "one row is the implementation's");
    let served = seat.form().unwrap().band.takes(17);
    assert_eq!(call(&mut seat, &x, K).unwrap() != host_many, served, "seventeen are whose the band says");
    let (_, id, ledger) = seat.ledger_row().unwrap();
    assert_eq!(id.to_string(), format!("linear_proj/{variant}"));
    let counts = if served { (2, 2, 0) } else { (2, 1, 1) };
    assert_eq!((ledger.calls, ledger.served, ledger.dispatched_by_band), counts);
    assert!(ledger.is_clean());

    assert!(seat.detach().is_some());
    assert_eq!(call(&mut seat, &x[..K], K).unwrap(), host_one, "the host form is back, bit for bit");
    assert!(seat.detach().is_none(), "detaching twice is nothing");
}

fn falls_back_and_hands_itself_back(arm: &Arm) {
    for variant in ["w8a16_static", "nvfp4_balance"] {
        falls_back(arm, variant);
    }
}

fn falls_back(arm: &Arm, variant: &str) {
    let (mut seat, _) = seat(arm, variant, GuardMode::Fallback);
    let narrow = Random::new(9).normals(K - 1, 1.0);
    for miss in 1..=MISSES_BEFORE_DETACH {
        call(&mut seat, &narrow, K - 1).unwrap();
        let (_, _, ledger) = seat.ledger_row().unwrap();
        assert_eq!(ledger.fallbacks, u64::from(miss));
        assert_eq!(ledger.detached, miss == MISSES_BEFORE_DETACH);
        assert_eq!(ledger.last_reason.as_deref(), Some("rows have K = 79, bound for K = 80"));
    }
    let before = seat.ledger_row().unwrap().2;
    call(&mut seat, &Random::new(9).normals(K, 1.0), K).unwrap();
    assert_eq!(seat.ledger_row().unwrap().2, before, "a detached seat is the host's, and counts no more");
}

/// `nvfp4_dynamic` says so itself, so the seat's own mode does not matter.
fn an_implementation_may_refuse(arm: &Arm) {
    for mode in [GuardMode::Fallback, GuardMode::Strict] {
        let (mut seat, _) = seat(arm, "nvfp4_dynamic", mode);
        let refusal = call(&mut seat, &[0.0; K - 1], K - 1).unwrap_err().to_string();
        let policy = "the implementation refuses what it was not bound for";
        assert_eq!(refusal, format!("seat: rows have K = 79, bound for K = 80; {policy}"));
    }
}

fn strict_refuses(arm: &Arm) {
    let (mut seat, _) = seat(arm, "w8a16_static", GuardMode::Strict);
    let refusal = call(&mut seat, &[0.0; K - 1], K - 1).unwrap_err().to_string();
    assert_eq!(refusal, "seat: rows have K = 79, bound for K = 80; the seat is strict");
    call(&mut seat, &[1.0; 17 * K], K).expect("the plan for many rows is no miss");
}

fn without_a_host_refuses(arm: &Arm) {
    let w = Random::new(7).normals(N * K, 0.2);
    let mut seat = Seat::without_host("seat", arm.bind_staged("w8a16_static", &w, N, None));
    assert!(seat.detach().is_none());
    call(&mut seat, &[1.0; 16 * K], K).unwrap();
    let refusal = call(&mut seat, &[1.0; 17 * K], K).unwrap_err().to_string();
    assert_eq!(
        refusal,
        "seat: M = 17 is outside the band 1..=16 and the seat has no host form to dispatch to"
    );
    let refusal = call(&mut seat, &[1.0; K + 1], K + 1).unwrap_err().to_string();
    assert_eq!(refusal, "seat: rows have K = 81, bound for K = 80; the seat has no host form");
}
