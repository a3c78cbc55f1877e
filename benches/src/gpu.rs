//! Measuring on a GPU.

use device::{Buffer, Event, Graph, Stream};
use structure_core::Refusal;

use crate::cuda;

/// Replays of a graph, of which the median counts.
const REPLAYS: usize = 20;
/// Calls of one graph: enough that the graph's own launch does not show.
const CALLS: usize = 64;
/// Bytes that rotating copies add up to at least, several times any L2.
const ROTATE_BYTES: usize = 400_000_000;

/// How many copies of `bytes` each keep a rotation out of L2.
pub fn copies(bytes: usize) -> usize {
    ROTATE_BYTES.div_ceil(bytes.max(1)).max(2)
}

/// Median microseconds of one call: `calls` are put into one graph in turn until it holds enough of them.
///
/// # Errors
/// What a call or the driver says.
pub fn time(
    stream: &Stream,
    copies: usize,
    mut call: impl FnMut(usize) -> Result<(), Refusal>,
) -> Result<f64, Refusal> {
    // Whole rotations, so that every copy is read equally often.
    let calls = CALLS.div_ceil(copies) * copies;
    for copy in 0..copies {
        call(copy)?;
    }
    let mut graph = Graph::capture(stream, |_| (0..calls).try_for_each(|index| call(index % copies)))?;
    for _ in 0..3 {
        graph.launch()?;
    }
    let mut replays = Vec::with_capacity(REPLAYS);
    for _ in 0..REPLAYS {
        let start = Event::record(stream)?;
        graph.launch()?;
        let end = Event::record(stream)?;
        replays.push(end.microseconds_since(&start)? / calls as f64);
    }
    replays.sort_by(f64::total_cmp);
    Ok(replays[REPLAYS / 2])
}

/// GB/s (10^9 bytes) of the streaming read over 2 GiB of random bytes.
///
/// # Errors
/// [`Refusal::OutOfMemory`] or what the driver says.
pub fn read_bandwidth(stream: &Stream) -> Result<f64, Refusal> {
    const BYTES: usize = 1 << 30;
    let random = crate::random::uniform_bf16(BYTES / 2, 1);
    let bytes: Vec<u8> = random.iter().flat_map(|value| value.to_le_bytes()).collect();
    let data = [Buffer::from_host(stream, &bytes, &[BYTES])?, Buffer::from_host(stream, &bytes, &[BYTES])?];
    let mut sink = Buffer::zeros(stream, &[16])?;
    let us = time(stream, 2, |copy| cuda::stream_read(stream, &data[copy], &mut sink))?;
    Ok(BYTES as f64 / us / 1e3)
}
