"""What of a decode step is measured: attention, the gated delta rule, a whole step. Needs neither PyTorch nor a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import plan

# Rows of a call: one token, drafts to verify, and the most that a decode kernel takes.
ROWS = (1, 4, 7, 16)
DELTA_ROWS = (1, 4, 7)
# Positions in the store, those of the call's own rows among them.
CONTEXTS = (4096, 32768, 131072)
# Positions of a page.
PAGE = 128
# Tokens over which a whole step is averaged.
TOKENS = 32

BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class Attention:
    """Heads of the full-attention layers of the 27B host."""

    heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256

    def store_bytes(self, ctx: int, element_bytes: int) -> int:
        """Keys and values."""
        return 2 * ctx * self.kv_heads * self.head_dim * element_bytes

    def call_bytes(self, ctx: int, rows: int, element_bytes: int) -> int:
        """The fewest bytes that a call must read and write: keys and values, queries in, rows out."""
        return self.store_bytes(ctx, element_bytes) + 2 * rows * self.heads * self.head_dim * BF16_BYTES

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}/{self.head_dim}"


@dataclass(frozen=True)
class Delta:
    """Heads of the gated-delta layers of the 27B host."""

    key_heads: int = 16
    value_heads: int = 48
    head_dim: int = 128

    def state_bytes(self) -> int:
        return self.value_heads * self.head_dim**2 * FP32_BYTES

    def call_bytes(self, rows: int) -> int:
        """The state read and written once, queries, keys and values in, rows out."""
        width = (2 * self.key_heads + 2 * self.value_heads) * self.head_dim
        return 2 * self.state_bytes() + rows * (width * BF16_BYTES + 2 * self.value_heads * FP32_BYTES)

    def __str__(self) -> str:
        return f"{self.value_heads}x{self.head_dim}x{self.head_dim}"


@dataclass(frozen=True)
class Host:
    """A dense hybrid host: every fourth layer has full attention, the others the gated delta rule."""

    name: str = "27b"
    layers: int = 64
    hidden: int = 5120
    ffn: int = 17408
    vocab: int = 248320
    attention: Attention = Attention()
    delta: Delta = Delta()

    def weights(self) -> int:
        """Weights of all projections that a token passes; norms and convolutions do not count."""
        of_heads = self.attention.head_dim * (3 * self.attention.heads + 2 * self.attention.kv_heads)
        of_delta = (
            self.delta.head_dim * (2 * self.delta.key_heads + 3 * self.delta.value_heads) + 2 * self.delta.value_heads
        )
        full = self.layers // 4
        features = full * of_heads + (self.layers - full) * of_delta + self.layers * 3 * self.ffn + self.vocab
        return features * self.hidden

    def step_bytes(self, ctx: int) -> int:
        """What one token must touch: BF16 weights, BF16 keys and values, states read and written."""
        full = self.layers // 4
        states = (self.layers - full) * 2 * self.delta.state_bytes()
        return self.weights() * BF16_BYTES + full * self.attention.store_bytes(ctx, BF16_BYTES) + states

    def config(self) -> dict[str, object]:
        """As transformers' Qwen3_5TextConfig takes it."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "num_hidden_layers": self.layers,
            "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(self.layers)],
            "num_attention_heads": self.attention.heads,
            "num_key_value_heads": self.attention.kv_heads,
            "head_dim": self.attention.head_dim,
            "linear_num_key_heads": self.delta.key_heads,
            "linear_num_value_heads": self.delta.value_heads,
            "linear_key_head_dim": self.delta.head_dim,
            "linear_value_head_dim": self.delta.head_dim,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
        }


ATTENTION = Attention()
DELTA = Delta()
HOST = Host()


@dataclass(frozen=True)
class Case:
    """One call, as a row of the results."""

    what: str
    shape: str
    rows: int
    bytes: int
    ctx: int | None = None
    # Bytes that a call reads and that must not come from L2.
    cold_bytes: int = 0

    def dims(self) -> dict[str, object]:
        ctx = {} if self.ctx is None else {"ctx": self.ctx}
        return {"what": self.what, "shape": self.shape, **ctx, "rows": self.rows}

    def copies(self) -> int:
        return plan.copies(self.cold_bytes)

    def __str__(self) -> str:
        at = "" if self.ctx is None else f" at {self.ctx}"
        return f"{self.what} {self.shape}{at}, {self.rows} row{'s' * (self.rows > 1)}"


def attend(element_bytes: int, contexts: Sequence[int], rows: Sequence[int]) -> Iterator[Case]:
    for ctx in contexts:
        for taken in rows:
            yield Case(
                "attention",
                str(ATTENTION),
                taken,
                ATTENTION.call_bytes(ctx, taken, element_bytes),
                ctx,
                ATTENTION.store_bytes(ctx, element_bytes),
            )


def delta(rows: Sequence[int]) -> Iterator[Case]:
    for taken in rows:
        if taken in DELTA_ROWS:
            yield Case("gated_delta", str(DELTA), taken, DELTA.call_bytes(taken), cold_bytes=DELTA.state_bytes())


def step(contexts: Sequence[int], rows: Sequence[int]) -> Iterator[Case]:
    # A prompt longer than the shortest context takes the eager host longer than it is worth.
    if 1 in rows and CONTEXTS[0] in contexts:
        yield Case("step", HOST.name, 1, HOST.step_bytes(CONTEXTS[0]), CONTEXTS[0])
