//! The projections on the device, in the order of the host's table: its handles serve here too.

use std::collections::HashMap;

use device::{Stream, View, ViewMut};
use half::bf16;
use linear_proj::decode_band::MAX_MATRICES;
use linear_proj::{DenseWeights, Rows, RowsMut, Seat, SeatState};
use smallvec::SmallVec;
use structure_core::Refusal;

use crate::cuda::Bf16Linear;
use crate::seats::SeatId;
use crate::tensor::Weights;

/// The table. Each seat's host form is its weights in BF16.
pub(crate) struct CudaSeats {
    seats: Vec<Seat>,
    weights: Vec<Weights>,
    stream: Stream,
}

impl CudaSeats {
    /// Uploads projections. Where several are the same memory, it is packed once and copied on the device.
    pub fn upload(stream: &Stream, projections: Vec<(String, Weights)>) -> Result<Self, Refusal> {
        let mut uses = HashMap::new();
        for (_, weights) in &projections {
            *uses.entry(weights.dense()?.identity()).or_insert(0usize) += 1;
        }
        let mut originals: HashMap<_, Bf16Linear> = HashMap::new();
        let (mut seats, mut all) = (Vec::new(), Vec::new());
        for (path, weights) in projections {
            let dense = weights.dense()?;
            let identity = dense.identity();
            let host = match originals.get(&identity) {
                Some(original) => original.duplicate(stream)?,
                None => {
                    let host = Bf16Linear::new(stream, path.as_str(), dense)?;
                    if uses.get(&identity).is_some_and(|&uses| uses > 1) {
                        originals.insert(identity, host.duplicate(stream)?);
                    }
                    host
                }
            };
            seats.push(Seat::new(path, Box::new(host)));
            all.push(weights);
        }
        Ok(CudaSeats { seats, weights: all, stream: stream.clone() })
    }

    /// Queues a projection of `x` `[rows, K]` to `y` `[rows, N]`, both of one type; both buffers may be longer.
    pub fn project(
        &mut self,
        SeatId(seat): SeatId,
        x: View<'_>,
        y: ViewMut<'_>,
        rows: usize,
    ) -> Result<(), Refusal> {
        let seat = &mut self.seats[seat];
        let (n, k) = (seat.n(), seat.k());
        let x = Rows::device(x.first(rows * k)?, &self.stream, rows, k)?;
        seat.project(x, RowsMut::device(y.first(rows * n)?, rows, n)?)
    }

    /// Queues projections of the same rows for several seats, in as few launches as what serves them allows; otherwise as
    /// [`project`](Self::project).
    pub fn project_together<const S: usize>(
        &mut self,
        ids: [SeatId; S],
        x: View<'_>,
        ys: [ViewMut<'_>; S],
        rows: usize,
    ) -> Result<(), Refusal> {
        let seats = self.seats.get_disjoint_mut(ids.map(|SeatId(seat)| seat)).map_err(|_| not_apart())?;
        let k = seats.first().map_or(0, |seat| seat.k());
        let x = Rows::device(x.first(rows * k)?, &self.stream, rows, k)?;
        let mut calls: SmallVec<[_; MAX_MATRICES]> = SmallVec::new();
        for (seat, y) in seats.into_iter().zip(ys) {
            let n = seat.n();
            calls.push((seat, RowsMut::device(y.first(rows * n)?, rows, n)?));
        }
        Seat::project_together(x, calls)
    }

    /// Queues a projection of `silu(gate) * x`, if what serves the seat makes these rows itself; `false` where they are to be made
    /// before.
    pub fn project_gated(
        &mut self,
        SeatId(seat): SeatId,
        [gate, x]: [View<'_>; 2],
        y: ViewMut<'_>,
        rows: usize,
    ) -> Result<bool, Refusal> {
        let seat = &mut self.seats[seat];
        let (n, k) = (seat.n(), seat.k());
        let [gate, x] = [gate.first(rows * k)?, x.first(rows * k)?];
        let device = |view| Rows::device(view, &self.stream, rows, k);
        seat.project_gated(device(gate)?, device(x)?, RowsMut::device(y.first(rows * n)?, rows, n)?)
    }

    /// Bytes of all weights, as they are bound.
    pub fn bytes(&self) -> u64 {
        let bytes = |seat: &Seat| match seat.state() {
            SeatState::Host => (seat.n() * seat.k() * size_of::<bf16>()) as u64,
            SeatState::Bound(receipt, _) => receipt.weight_bytes,
        };
        self.seats.iter().map(bytes).sum()
    }

    pub fn all(&self) -> Vec<&Seat> {
        self.seats.iter().collect()
    }

    pub fn by_path(&mut self, path: &str) -> Option<&mut Seat> {
        self.seats.iter_mut().find(|seat| seat.path() == path)
    }

    pub fn weights(&self, path: &str) -> Option<DenseWeights<'_>> {
        let seat = self.seats.iter().position(|seat| seat.path() == path)?;
        self.weights.get(seat)?.dense().ok()
    }
}

/// Parts of a model hold handles of their own.
fn not_apart() -> Refusal {
    let (what, value) = ("seats that project together".to_string(), "one of them twice".to_string());
    Refusal::ValueOutside { what, value, bound: "each once".to_string() }
}
