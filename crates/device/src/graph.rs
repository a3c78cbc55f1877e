use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, cuGraphGetNodes};
use structure_core::Refusal;

use crate::Stream;
use crate::driver::Named;

/// Work recorded once and replayed as a whole, on the stream it was captured from.
///
/// Memory that the work reads and writes must outlive the graph; the graph keeps the stream alive, not the buffers.
pub struct Graph {
    graph: CudaGraph,
    stream: Stream,
}

// SAFETY: the driver asks only that calls on one graph are serialised, which `&mut self` does; it binds no thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` puts on `stream`. Nothing runs until [`Graph::launch`].
    ///
    /// An error of `work` ends the capture before it is returned, so the stream is usable again.
    ///
    /// # Errors
    /// The error of `work`, or [`Refusal::Cuda`] when it did something that cannot be captured, or put nothing there.
    pub fn capture(
        stream: &Stream,
        work: impl FnOnce(&Stream) -> Result<(), Refusal>,
    ) -> Result<Self, Refusal> {
        let raw = stream.inner();
        // Thread-local: another thread may allocate meanwhile, which the global mode would forbid.
        raw.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .named("cuStreamBeginCapture")?;
        let outcome = work(stream);
        let ended = raw.end_capture(CUgraphInstantiate_flags(0)).named("cuStreamEndCapture");
        outcome?;
        let graph = ended?.ok_or_else(|| Refusal::Cuda {
            call: "cuStreamEndCapture".to_string(),
            problem: "no work was captured".to_string(),
        })?;
        graph.upload().named("cuGraphUpload")?;
        Ok(Graph { graph, stream: stream.clone() })
    }

    /// Puts the whole graph on its stream.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver refuses.
    pub fn launch(&mut self) -> Result<(), Refusal> {
        self.graph.launch().named("cuGraphLaunch")
    }

    /// Kernels, copies and the like that a replay runs.
    ///
    /// # Errors
    /// [`Refusal::Cuda`] when the driver does not answer.
    pub fn nodes(&self) -> Result<usize, Refusal> {
        let mut nodes = 0;
        // SAFETY: the graph is alive; without a list to fill the driver writes the number alone.
        unsafe { cuGraphGetNodes(self.graph.cu_graph(), std::ptr::null_mut(), &mut nodes) }
            .result()
            .named("cuGraphGetNodes")?;
        Ok(nodes)
    }

    /// The stream it was captured from and runs on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}
