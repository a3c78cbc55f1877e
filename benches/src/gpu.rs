//! Measuring on a GPU.

use device::{Buffer, Event, Graph, Stream};
use structure_core::Refusal;

use crate::cuda;
use crate::protocol::{self, REPLAYS};

/// Median microseconds of one call, of `calls` that are replayed as one graph and take the copies in turn.
///
/// # Errors
/// What a call or the driver says.
pub fn time(
    stream: &Stream,
    copies: usize,
    calls: usize,
    mut call: impl FnMut(usize) -> Result<(), Refusal>,
) -> Result<f64, Refusal> {
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
    let us =
        time(stream, 2, protocol::calls(2, 1), |copy| cuda::stream_read(stream, &data[copy], &mut sink))?;
    Ok(BYTES as f64 / us / 1e3)
}
