"""What is measured: shapes, rows of a call, weight formats, copies of weights. Needs neither PyTorch nor a GPU.

benches/src/protocol.rs has the same numbers for our own kernels; a test there compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# N and K of the projections of the 27B host, and its vocabulary head.
HEAD = (248320, 5120)
SHAPES = ((17408, 5120), (5120, 17408), (12288, 5120), (5120, 6144), (1024, 5120), HEAD)

# Rows of a call (M). Up to DECODE_ROWS a call waits for its weights; a prompt's 2048 wait for the arithmetic.
ROWS = (1, 2, 4, 8, 16, 2048)
DECODE_ROWS = 16

# Copies of the weights add up to at least this, several times any L2.
ROTATE_BYTES = 400_000_000
# A graph holds at least this many decode calls, so that its own launch does not show.
CALLS = 64
# Replays of the graph, of which the median counts.
REPLAYS = 20

BF16_BYTES = 2


@dataclass(frozen=True)
class Format:
    """A weight format and the activations it is multiplied with."""

    name: str
    # What a weight takes, in bits, scales of blocks included.
    bits: float
    # What an output feature takes beside that, in bytes.
    channel_bytes: int
    # The largest relative error (L2) against the dense product that is still this format at work, not a broken call.
    error: float

    def weight_bytes(self, n: int, k: int) -> int:
        return round(n * k * self.bits / 8) + n * self.channel_bytes

    def call_bytes(self, n: int, k: int, m: int) -> int:
        """The fewest bytes that a call must read and write: weights, rows in, rows out."""
        return self.weight_bytes(n, k) + m * (n + k) * BF16_BYTES


FORMATS = {
    form.name: form
    for form in (
        Format("bf16", bits=16, channel_bytes=0, error=0.01),
        Format("w8a16", bits=8, channel_bytes=4, error=0.02),
        Format("nvfp4_w4a16", bits=4.5, channel_bytes=0, error=0.2),
    )
}


def copies(weight_bytes: int) -> int:
    """How many copies of the weights keep a rotation out of L2."""
    return max(2, -(-ROTATE_BYTES // weight_bytes))


def calls(copies: int, m: int) -> int:
    """Calls of one graph: whole rotations, so that every copy is read equally often. Long calls need only one."""
    return -(-CALLS // copies) * copies if m <= DECODE_ROWS else copies


def cells(shapes: Sequence[tuple[int, int]], rows: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """N, K and the row counts to measure. A prompt's rows never pass the vocabulary head: only its last one does."""
    for n, k in shapes:
        taken = [m for m in rows if m <= DECODE_ROWS or (n, k) != HEAD]
        if taken:
            yield n, k, taken


@dataclass(frozen=True)
class Call:
    """One call of one peer, as a row of the results."""

    peer: str
    format: Format
    n: int
    k: int
    m: int

    def _row(self) -> dict[str, object]:
        return {
            "peer": self.peer,
            "format": self.format.name,
            "what": "project",
            "n": self.n,
            "k": self.k,
            "m": self.m,
        }

    def measured(self, us: float) -> dict[str, object]:
        return self._row() | {"us": us, "bytes": self.format.call_bytes(self.n, self.k, self.m)}

    def failed(self, problem: str) -> dict[str, object]:
        return self._row() | {"problem": problem}

    def __str__(self) -> str:
        return f"{self.peer} {self.format.name} {self.n} x {self.k}, M = {self.m}"
