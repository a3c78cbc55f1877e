use smallvec::SmallVec;
use structure_core::{
    Decision, Form, Guard, GuardMode, Offer, Place, Receipt, Refusal, SeatLedger, StructureId,
};

use crate::calibration::Recorder;
use crate::{BoundProj, LinearProj, Rows, RowsData, RowsMut, Together, decode_band};

/// The place in a model where one projection happens.
///
/// Holds the host's own form, if the host has one, and at most one implementation. Calls go to the implementation as far
/// as the guard admits them, and to the host form otherwise.
pub struct Seat {
    path: String,
    n: usize,
    k: usize,
    host: Option<Box<dyn LinearProj>>,
    bound: Option<Bound>,
    recorder: Option<Recorder>,
}

struct Bound {
    proj: Box<dyn BoundProj>,
    guard: Guard,
}

/// What serves a call: an implementation behind its guard, or the host's form.
struct Serving<'a> {
    proj: &'a mut (dyn LinearProj + 'static),
    guard: Option<&'a mut Guard>,
}

/// What becomes of a call that failed.
fn failed(guard: Option<&mut Guard>, refusal: Refusal) -> Refusal {
    match guard {
        Some(guard) => guard.failed(refusal),
        None => refusal,
    }
}

/// What serves a seat.
#[derive(Clone, Copy, Debug)]
pub enum SeatState<'a> {
    /// The host's own form.
    Host,
    /// An implementation, with its receipt and its counts.
    Bound(&'a Receipt, &'a SeatLedger),
}

impl Seat {
    /// A seat that its host form serves.
    pub fn new(path: impl Into<String>, host: Box<dyn LinearProj>) -> Self {
        Seat { path: path.into(), n: host.n(), k: host.k(), host: Some(host), bound: None, recorder: None }
    }

    /// A seat without a host form: a call that `proj` does not serve is refused.
    pub fn without_host(path: impl Into<String>, proj: Box<dyn BoundProj>) -> Self {
        let (path, n, k) = (path.into(), proj.n(), proj.k());
        let guard = Guard::new(path.clone(), proj.form(), GuardMode::Strict, false);
        Seat { path, n, k, host: None, bound: Some(Bound { proj, guard }), recorder: None }
    }

    /// Its path in the checkpoint, such as `model.layers.0.mlp.up_proj`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Puts an implementation in front of the host form, in place of any that was there.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when its N or K is not the seat's.
    pub fn bind(&mut self, proj: Box<dyn BoundProj>, mode: GuardMode) -> Result<(), Refusal> {
        if (proj.n(), proj.k()) != (self.n, self.k) {
            return Err(Refusal::ShapeMismatch {
                what: format!("{}: implementation", self.path),
                expected: vec![self.n, self.k],
                got: vec![proj.n(), proj.k()],
            });
        }
        let guard = Guard::new(self.path.clone(), proj.form(), mode, self.host.is_some());
        self.bound = Some(Bound { proj, guard });
        Ok(())
    }

    /// What is bound here once more, for another seat; see [`BoundProj::duplicate`].
    ///
    /// # Errors
    /// As [`BoundProj::duplicate`].
    pub fn duplicate_bound(&self, path: &str) -> Result<Option<Box<dyn BoundProj>>, Refusal> {
        self.bound.as_ref().map_or(Ok(None), |bound| bound.proj.duplicate(path))
    }

    /// Takes the implementation away, if one is bound; the host form, which was never touched, serves every call again.
    ///
    /// A seat without a host form keeps its implementation, as nothing else could serve it.
    pub fn detach(&mut self) -> Option<Box<dyn BoundProj>> {
        self.host.as_ref()?;
        self.bound.take().map(|bound| bound.proj)
    }

    /// Records the largest magnitude of each input channel from now on, as the next sample of a
    /// [`Calibration`](crate::Calibration).
    pub fn record(&mut self) {
        self.recorder.get_or_insert_default().begin_sample(self.k);
    }

    /// Stops recording.
    pub(crate) fn take_recorder(&mut self) -> Option<Recorder> {
        self.recorder.take()
    }

    /// Shows rows to the recorder, if there is one.
    fn show(&mut self, x: &Rows<'_>) -> Result<(), Refusal> {
        let Some(recorder) = &mut self.recorder else { return Ok(()) };
        match x.data() {
            RowsData::Host(elements) if x.width() == self.k => recorder.see(&self.path, &elements),
            RowsData::Host(_) => Ok(()),
            RowsData::Device(..) => Err(Refusal::WrongDevice {
                what: format!("{}: calibration", self.path),
                rows: x.place().to_string(),
                seat: Place::Cpu.to_string(),
            }),
        }
    }

    /// Projects `x` `[M, K]` to `y` `[M, N]`: by the implementation where the call has the bound form, by the host form
    /// otherwise.
    ///
    /// # Errors
    /// [`Refusal::ShapeMismatch`] when `y` does not fit `x`; what the guard says of calls that nothing may serve; while
    /// recording, [`Refusal::NonFinite`] or [`Refusal::WrongDevice`] for rows that cannot be; what the form that runs says.
    pub fn project(&mut self, x: Rows<'_>, y: RowsMut<'_>) -> Result<(), Refusal> {
        let Serving { proj, guard } = self.admit(&x)?;
        proj.project(x, y).map_err(|refusal| failed(guard, refusal))
    }

    /// Projects the same rows for several seats, each as [`project`](Self::project) would, in as few launches as what serves them
    /// [allows](LinearProj::project_with).
    ///
    /// # Errors
    /// As [`project`](Self::project), for the first seat that fails.
    pub fn project_together<'a>(
        x: Rows<'_>,
        seats: impl IntoIterator<Item = (&'a mut Seat, RowsMut<'a>)>,
    ) -> Result<(), Refusal> {
        let mut calls: SmallVec<[_; decode_band::MAX_MATRICES]> = SmallVec::new();
        let mut guards: SmallVec<[_; decode_band::MAX_MATRICES]> = SmallVec::new();
        for (seat, y) in seats {
            let Serving { proj, guard } = seat.admit(&x)?;
            calls.push(Some(Together { proj, y }));
            guards.push(guard);
        }
        for (index, guard) in guards.into_iter().enumerate() {
            let (call, others) = calls[index..].split_at_mut(1);
            if let Some(Together { proj, y }) = call[0].take() {
                proj.project_with(x, y, others).map_err(|refusal| failed(guard, refusal))?;
            }
        }
        Ok(())
    }

    /// Projects [gated](crate::GatedProj) rows, if what serves this seat has a form for that; `false` where it has none, for more rows
    /// than the decode band has, or where a recorder is to see them: they are then to be made, and [projected](Self::project).
    ///
    /// # Errors
    /// As [`project`](Self::project).
    pub fn project_gated(&mut self, gate: Rows<'_>, x: Rows<'_>, y: RowsMut<'_>) -> Result<bool, Refusal> {
        let takes = |bound: &mut Bound| !bound.guard.is_detached() && bound.proj.gated().is_some();
        if self.recorder.is_some()
            || !decode_band::BAND.takes(x.rows())
            || !self.bound.as_mut().is_some_and(takes)
        {
            return Ok(false);
        }
        let Serving { proj, guard } = self.admit(&x)?;
        match proj.gated() {
            Some(form) => form.project(gate, x, y).map(|()| true).map_err(|refusal| failed(guard, refusal)),
            None => Ok(false),
        }
    }

    /// What is to serve a call of these rows, which the recorder has seen.
    fn admit(&mut self, x: &Rows<'_>) -> Result<Serving<'_>, Refusal> {
        self.show(x)?;
        if let Some(Bound { proj, guard }) = self.bound.as_mut().filter(|bound| !bound.guard.is_detached()) {
            let offer = Offer { dtype: x.dtype(), width: x.width(), place: x.place(), rows: x.rows() };
            if guard.admit(offer)? == Decision::Serve {
                return Ok(Serving { proj: &mut **proj, guard: Some(guard) });
            }
        }
        match &mut self.host {
            Some(host) => Ok(Serving { proj: &mut **host, guard: None }),
            // A guard without a host form serves or refuses, and never detaches.
            None => Err(Refusal::GuardRefused {
                seat: self.path.clone(),
                reason: "no form is left to run".to_string(),
                policy: "the seat has no host form",
            }),
        }
    }

    /// What serves it.
    pub fn state(&self) -> SeatState<'_> {
        match &self.bound {
            Some(bound) => SeatState::Bound(bound.proj.receipt(), bound.guard.ledger()),
            None => SeatState::Host,
        }
    }

    /// The form that calls must have to reach the implementation, if one is bound.
    pub fn form(&self) -> Option<Form> {
        self.bound.as_ref().map(|bound| bound.proj.form())
    }

    /// A row of the model's ledger: path, what is bound and its counts; none while the host form serves.
    pub fn ledger_row(&self) -> Option<(String, StructureId, SeatLedger)> {
        let bound = self.bound.as_ref()?;
        Some((self.path.clone(), bound.proj.receipt().id, bound.guard.ledger().clone()))
    }
}
