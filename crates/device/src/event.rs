use cudarc::driver::{CudaEvent, sys::CUevent_flags};
use structure_core::Refusal;

use crate::Stream;
use crate::driver::Named;

/// A point in a stream's work, with the time at which the device passed it.
pub struct Event(CudaEvent);

impl Event {
    /// Marks the work so far on `stream`.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver refuses.
    pub fn record(stream: &Stream) -> Result<Self, Refusal> {
        let context = stream.device().context();
        let event = context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).named("cuEventCreate")?;
        event.record(stream.inner()).named("cuEventRecord")?;
        Ok(Event(event))
    }

    /// Microseconds from `earlier` to this event, after waiting for both.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the work before them failed.
    pub fn microseconds_since(&self, earlier: &Event) -> Result<f64, Refusal> {
        Ok(f64::from(earlier.0.elapsed_ms(&self.0).named("cuEventElapsedTime")?) * 1e3)
    }
}
