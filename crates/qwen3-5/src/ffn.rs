//! The dense feed-forward: `down(silu(gate(x)) * up(x))`.

use structure_core::Refusal;

use crate::loader::Loader;
use crate::math::silu;
use crate::seats::{SeatId, Seats};

pub(crate) struct DenseFfn {
    gate_proj: SeatId,
    up_proj: SeatId,
    down_proj: SeatId,
}

impl DenseFfn {
    pub fn load(loader: &mut Loader<'_>, path: &str, intermediate: usize) -> Result<Self, Refusal> {
        let hidden = loader.config.hidden_size;
        Ok(DenseFfn {
            gate_proj: loader.seat(&format!("{path}.gate_proj"), intermediate, hidden)?,
            up_proj: loader.seat(&format!("{path}.up_proj"), intermediate, hidden)?,
            down_proj: loader.seat(&format!("{path}.down_proj"), hidden, intermediate)?,
        })
    }

    /// The seats of gate, up and down.
    #[cfg(kernels_built)]
    pub fn seats(&self) -> [SeatId; 3] {
        [self.gate_proj, self.up_proj, self.down_proj]
    }

    /// The seats that read its input.
    pub fn input_seats(&self) -> Vec<SeatId> {
        vec![self.gate_proj, self.up_proj]
    }

    /// `x` and the result are `[rows, hidden]`.
    pub fn forward(&self, seats: &mut Seats, x: &[f32], rows: usize) -> Result<Vec<f32>, Refusal> {
        let mut gate = seats.project(self.gate_proj, x, rows)?;
        let up = seats.project(self.up_proj, x, rows)?;
        activate(&mut gate, &up);
        seats.project(self.down_proj, &gate, rows)
    }
}

/// `silu(gate) * up`, in place of the gate.
pub(crate) fn activate(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = silu(*gate) * up;
    }
}
