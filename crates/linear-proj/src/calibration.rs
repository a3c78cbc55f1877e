use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use structure_core::Refusal;

use crate::options::check_amax;
use crate::{Elements, Host};

/// The version of the file that this code reads and writes.
const FORMAT: u32 = 1;

/// What the input channels of a model's seats reached on sample texts: what binding a `calibrated` variant needs.
///
/// A sample is a window of tokens. Of each sample and channel the largest magnitude is kept, as the seat was given it; over
/// the samples, the quantile `percentile` of these is taken for each channel: 1 is the largest, 0.5 the median. Between two
/// samples it is interpolated linearly, at position `percentile * (samples - 1)` of the sorted ones.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    format: u32,
    /// Which quantile over the samples was taken, 0 to 1.
    pub percentile: f64,
    /// How many samples there were.
    pub samples: usize,
    /// Tokens of a sample.
    pub window: usize,
    /// The dims of the model, by the names that its config has for them.
    pub model: BTreeMap<String, usize>,
    seats: BTreeMap<String, Channels>,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Channels {
    k: usize,
    amax: Vec<f32>,
}

impl Calibration {
    /// Takes what the seats of a host have recorded since they were [told to](crate::Seat::record), `samples` of them each, and
    /// stops recording. Seats that were never called are left out.
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`] for a percentile outside 0..=1, [`Refusal::ShapeMismatch`] when a seat saw fewer samples than
    /// another.
    pub fn collect(
        host: &mut dyn Host,
        model: BTreeMap<String, usize>,
        window: usize,
        percentile: f64,
    ) -> Result<Self, Refusal> {
        Self::check_percentile(percentile)?;
        let paths: Vec<String> = host.seats().iter().map(|seat| seat.path().to_string()).collect();
        let mut seats = BTreeMap::new();
        let mut samples = None;
        for path in paths {
            let recorder = host.seat_mut(&path).and_then(|seat| seat.take_recorder());
            let Some(Recorder { samples: recorded, .. }) = recorder.filter(|recorder| recorder.rows > 0)
            else {
                continue;
            };
            let expected = *samples.get_or_insert(recorded.len());
            if recorded.len() != expected {
                return Err(Refusal::ShapeMismatch {
                    what: format!("{path}: samples of a calibration"),
                    expected: vec![expected],
                    got: vec![recorded.len()],
                });
            }
            let amax = quantile_by_channel(&recorded, percentile);
            seats.insert(path, Channels { k: amax.len(), amax });
        }
        let samples = samples.unwrap_or_default();
        Ok(Calibration { format: FORMAT, percentile, samples, window, model, seats })
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`Refusal::File`] for one that cannot be read, is cut short or is of another version; [`Refusal::ShapeMismatch`],
    /// [`Refusal::NonFinite`] or [`Refusal::ValueOutside`] for channels that are not as many as it says, or no magnitudes.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, Refusal> {
        let path = path.as_ref();
        let text = std::fs::read(path).map_err(|error| Refusal::file(path, error))?;
        // The version first: another one may have other fields.
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let Version { format } = serde_json::from_slice(&text).map_err(|error| Refusal::file(path, error))?;
        if format != FORMAT {
            return Err(Refusal::file(path, format!("format {format}, this program reads {FORMAT}")));
        }
        let calibration: Calibration =
            serde_json::from_slice(&text).map_err(|error| Refusal::file(path, error))?;
        Self::check_percentile(calibration.percentile)?;
        for (seat, channels) in &calibration.seats {
            check_amax(&format!("{}: {seat}: amax", path.display()), &channels.amax, channels.k)?;
        }
        Ok(calibration)
    }

    /// Writes a file.
    ///
    /// # Errors
    /// [`Refusal::File`] when it cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Refusal> {
        let path = path.as_ref();
        let text = serde_json::to_string(self).map_err(|error| Refusal::file(path, error))?;
        std::fs::write(path, text).map_err(|error| Refusal::file(path, error))
    }

    /// The magnitudes of a seat's input channels, `[K]`, if it was calibrated.
    pub fn amax(&self, seat: &str) -> Option<&[f32]> {
        self.seats.get(seat).map(|channels| channels.amax.as_slice())
    }

    /// How many seats there are.
    pub fn seats(&self) -> usize {
        self.seats.len()
    }

    /// Checks a percentile, so that a long run need not end with its refusal.
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`] for one outside 0..=1.
    pub fn check_percentile(percentile: f64) -> Result<(), Refusal> {
        if (0.0..=1.0).contains(&percentile) {
            return Ok(());
        }
        let (what, bound) = ("percentile of a calibration".to_string(), "in 0..=1".to_string());
        Err(Refusal::ValueOutside { what, value: percentile.to_string(), bound })
    }

    /// Refuses the calibration of another model.
    ///
    /// # Errors
    /// [`Refusal::ValueOutside`] naming the first dim that differs.
    pub fn check_model(&self, model: &BTreeMap<String, usize>) -> Result<(), Refusal> {
        for name in self.model.keys().chain(model.keys()) {
            let (calibrated, has) = (self.model.get(name), model.get(name));
            if calibrated != has {
                let text = |value: Option<&usize>| value.map_or("absent".to_string(), usize::to_string);
                return Err(Refusal::ValueOutside {
                    what: format!("calibration: {name}"),
                    value: text(calibrated),
                    bound: format!("that of the model, {}", text(has)),
                });
            }
        }
        Ok(())
    }
}

/// The quantile of each channel over samples `[samples][K]`, interpolated linearly.
fn quantile_by_channel(samples: &[Vec<f32>], percentile: f64) -> Vec<f32> {
    let channels = samples.first().map_or(0, Vec::len);
    let position = percentile * (samples.len().saturating_sub(1)) as f64;
    let (below, above) = (position.floor() as usize, position.ceil() as usize);
    (0..channels)
        .map(|channel| {
            let mut values: Vec<f32> = samples.iter().map(|sample| sample[channel]).collect();
            values.sort_by(f32::total_cmp);
            let (low, high) = (f64::from(values[below]), f64::from(values[above]));
            (low + (high - low) * position.fract()) as f32
        })
        .collect()
}

/// What a seat records while its model is calibrated: per sample, the largest magnitude of each input channel.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recorder {
    samples: Vec<Vec<f32>>,
    /// Rows seen over all samples.
    rows: usize,
}

impl Recorder {
    /// Begins the next sample, of K channels.
    pub fn begin_sample(&mut self, k: usize) {
        self.samples.push(vec![0.0; k]);
    }

    /// Takes rows into the sample.
    pub fn see(&mut self, seat: &str, rows: &Elements<'_>) -> Result<(), Refusal> {
        let Some(amax) = self.samples.last_mut() else { return Ok(()) };
        let rows = rows.to_f32();
        if let Some(index) = rows.iter().position(|x| !x.is_finite()) {
            let what = format!("{seat}: input rows of a calibration");
            return Err(Refusal::NonFinite { what, index, value: rows[index] });
        }
        for row in rows.chunks_exact(amax.len()) {
            self.rows += 1;
            amax.iter_mut().zip(row).for_each(|(amax, x)| *amax = amax.max(x.abs()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_lies_between_its_samples() {
        // Two channels over five samples, out of order.
        let samples: Vec<Vec<f32>> =
            [3.0, 1.0, 5.0, 2.0, 4.0].into_iter().map(|v| vec![v, 10.0 * v]).collect();
        for (percentile, expected) in [(1.0, 5.0), (0.0, 1.0), (0.5, 3.0), (0.625, 3.5), (0.9, 4.6)] {
            assert_eq!(
                quantile_by_channel(&samples, percentile),
                [expected, 10.0 * expected],
                "{percentile}"
            );
        }
        assert_eq!(quantile_by_channel(&samples[..1], 0.3), [3.0, 30.0]);
    }

    #[test]
    fn a_recorder_keeps_samples_apart_and_refuses_what_is_not_finite() {
        let mut recorder = Recorder::default();
        recorder.begin_sample(2);
        recorder.see("seat", &Elements::F32(&[1.0, -7.0, -3.0, 2.0])).unwrap();
        recorder.see("seat", &Elements::F32(&[0.5, 0.5])).unwrap();
        recorder.begin_sample(2);
        recorder.see("seat", &Elements::F32(&[-0.25, 0.0])).unwrap();
        let refusal = recorder.see("seat", &Elements::F32(&[1.0, f32::NAN])).unwrap_err().to_string();
        assert_eq!(refusal, "seat: input rows of a calibration: element 1 is NaN; it must be finite");
        assert_eq!(recorder.samples, [[3.0, 7.0], [0.25, 0.0]]);
        assert_eq!(recorder.rows, 4);
    }
}
