//! A balance folded into a norm: its rows come divided, so that those who read them need not divide.

use structure_core::Refusal;

use crate::Model;
use crate::layer::Layer;
use crate::mtp::Mtp;
use crate::seats::SeatId;

/// A norm whose rows nothing but seats read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NormFeed {
    /// Its path, such as `model.layers.0.input_layernorm`.
    pub norm: String,
    /// The paths of the seats.
    pub seats: Vec<String>,
}

impl Model {
    /// The norms that a balance can be folded into: those before the mixers, and before dense feed-forwards. A router and routed
    /// experts are no seats, so the norm before them is not among these, nor is the final one, whose rows are handed out.
    pub fn norm_feeds(&self) -> Vec<NormFeed> {
        let feeds = self.layers().flat_map(Layer::feeds);
        let paths =
            |seats: Vec<SeatId>| seats.into_iter().map(|seat| self.seats.path(seat).to_string()).collect();
        feeds.map(|(norm, seats)| NormFeed { norm, seats: paths(seats) }).collect()
    }

    /// Divides the rows of a norm by `balance`, `[hidden_size]`, from now on. All its seats are to be bound to an implementation
    /// that [expects it](linear_proj::InverseBalance::InProducer), with this one balance; the host's own forms of them multiply it
    /// back.
    ///
    /// # Errors
    /// [`Refusal::MissingTensor`] for a norm that is not one of [`norm_feeds`](Self::norm_feeds), [`Refusal::ShapeMismatch`] for
    /// another number of channels, [`Refusal::ValueOutside`] for a balance that is not finite and above zero.
    pub fn fold_balance(&mut self, norm: &str, balance: &[f32]) -> Result<(), Refusal> {
        if let Some(k) = balance.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
            return Err(Refusal::ValueOutside {
                what: format!("{norm}: balance of channel {k}"),
                value: balance[k].to_string(),
                bound: "finite and above zero".to_string(),
            });
        }
        self.set_fold(norm, Some(balance))
    }

    /// Takes a fold back: the norm and the host's forms have the bits they had.
    ///
    /// # Errors
    /// [`Refusal::MissingTensor`] for a norm that is not one of [`norm_feeds`](Self::norm_feeds).
    pub fn unfold_balance(&mut self, norm: &str) -> Result<(), Refusal> {
        self.set_fold(norm, None)
    }

    fn set_fold(&mut self, norm: &str, balance: Option<&[f32]>) -> Result<(), Refusal> {
        let draft = self.mtp.iter_mut().map(Mtp::layer_mut);
        for layer in self.layers.iter_mut().chain(draft) {
            let feed = layer.feeds().into_iter().find(|(path, _)| path == norm);
            let Some((path, seats)) = feed else { continue };
            if let Some(norm) = layer.norm_mut(&path) {
                norm.fold(balance)?;
            }
            seats.into_iter().for_each(|seat| self.seats.set_row_scale(seat, balance));
            return Ok(());
        }
        Err(Refusal::MissingTensor { path: "the model".to_string(), tensor: norm.to_string() })
    }

    fn layers(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter().chain(self.mtp.iter().map(Mtp::layer))
    }
}
