"""The peers of a decode step. Each is imported only when it is asked for: one that is missing costs its own rows alone.

To add one: a function that takes a case and returns calls on as many copies of the cold operand as the case asks for,
with the right result of the first, and a line in PEERS. What a peer rounds further than BF16 its format's name says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING

import decode_plan as plan

if TYPE_CHECKING:
    from torch import Tensor

# Computes and returns rows.
Call = Callable[[], "Tensor"]


@dataclass(frozen=True)
class Bound:
    """Calls that differ in their copies of what is cold, and the first one's result in FP32 by plain arithmetic."""

    calls: Sequence[Call]
    expected: Tensor


@dataclass(frozen=True)
class Peer:
    name: str
    # What the cold operand is stored as, and what else is less than BF16.
    format: str
    # The packages that may hold it; the first one installed gives the version.
    packages: tuple[str, ...]
    cases: Callable[[Sequence[int], Sequence[int]], Iterator[plan.Case]]
    bind: Callable[[plan.Case], Bound]
    # The largest relative error (L2) that is still this format at work, not a broken call.
    error: float

    def label(self) -> str:
        """The name and the installed version."""
        for package in self.packages:
            try:
                return f"{self.name} {metadata.version(package)}"
            except metadata.PackageNotFoundError:
                continue
        return f"{self.name} (not installed)"


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    import torch

    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * scale


def attended(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention in FP32: queries `[rows, heads, dim]`, the last of which sees all keys `[ctx, kv_heads, dim]`."""
    import torch

    rows, heads, dim = queries.shape
    ctx, kv_heads, _ = keys.shape
    grouped = queries.float().view(rows, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("rhgd,chd->hgrc", grouped, keys.float()) * dim**-0.5
    last = torch.arange(ctx - rows, ctx, device=queries.device)
    hidden = torch.arange(ctx, device=queries.device) > last[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hgrc,chd->rhgd", weights, values.float()).reshape(rows, heads, dim)


def sdpa(case: plan.Case) -> Bound:
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    of = plan.ATTENTION
    queries = normal(1, of.heads, case.rows, of.head_dim)
    stores = [
        tuple(normal(1, of.kv_heads, case.ctx, of.head_dim) for _ in ("keys", "values")) for _ in range(case.copies())
    ]
    mask = None if case.rows == 1 else causal_lower_right(case.rows, case.ctx)

    def call(keys: Tensor, values: Tensor) -> Tensor:
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    keys, values = (store[0].transpose(0, 1) for store in stores[0])
    return Bound([partial(call, *store) for store in stores], attended(queries[0].transpose(0, 1), keys, values))


def xqa(case: plan.Case, *, fp8_queries: bool) -> Bound:
    import torch

    # The package has a function of its module's name.
    library = import_module("flashinfer.xqa")

    of, rows, pages = plan.ATTENTION, case.rows, -(-case.ctx // plan.PAGE)
    queries = normal(rows, of.heads, of.head_dim)
    shape = (pages, plan.PAGE, of.kv_heads, of.head_dim)
    stores = [
        tuple(normal(*shape, scale=0.5).to(torch.float8_e4m3fn) for _ in ("keys", "values"))
        for _ in range(case.copies())
    ]
    table = torch.arange(pages, device="cuda", dtype=torch.int32).view(1, -1)
    lengths = torch.full((1, 1), case.ctx, device="cuda", dtype=torch.int32).view(torch.uint32)
    scratch = torch.zeros(256 << 20, device="cuda", dtype=torch.uint8)
    semaphores = torch.zeros(1 << 20, device="cuda", dtype=torch.int32).view(torch.uint32)
    given = queries.view(1, 1, *([] if rows == 1 else [rows]), of.heads, of.head_dim)
    # Bit c of row r: whether it sees row c.
    bits = [[(1 << (row + 1)) - 1, 0] for row in range(rows)]
    mask = None if rows == 1 else torch.tensor([bits], dtype=torch.int32).to(torch.uint16).cuda()
    find = library.get_xqa_module

    def find_bf16(*key: object) -> SimpleNamespace:
        """The module, which on Hopper would round queries to E4M3, told not to."""
        module = find(*key)
        return SimpleNamespace(xqa=lambda _rounds, *rest: module.xqa(False, *rest))

    def call(keys: Tensor, values: Tensor) -> Tensor:
        out = torch.empty_like(given)
        library.get_xqa_module = find if fp8_queries else find_bf16
        try:
            library.xqa(
                given,
                keys,
                values,
                table,
                lengths,
                out,
                scratch,
                semaphores,
                of.kv_heads,
                plan.PAGE,
                q_seq_len=rows,
                mask=mask,
            )
        finally:
            library.get_xqa_module = find
        return out.view(rows, of.heads, of.head_dim)

    keys, values = (store.reshape(-1, of.kv_heads, of.head_dim)[: case.ctx] for store in stores[0])
    return Bound([partial(call, *store) for store in stores], attended(queries, keys, values))


def recurrent(case: plan.Case) -> Bound:
    import torch
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    of, rows = plan.DELTA, case.rows
    queries, keys = (normal(1, rows, of.key_heads, of.head_dim) for _ in ("queries", "keys"))
    values = normal(1, rows, of.value_heads, of.head_dim)
    decay = -torch.rand(1, rows, of.value_heads, device="cuda")
    beta = torch.rand(1, rows, of.value_heads, device="cuda")
    states = [torch.randn(1, of.value_heads, of.head_dim, of.head_dim, device="cuda") for _ in range(case.copies())]

    def call(state: Tensor) -> Tensor:
        out, _ = fused_recurrent_gated_delta_rule(
            queries,
            keys,
            values,
            g=decay,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0]

    expected = delta_rule(queries[0], keys[0], values[0], decay[0], beta[0], states[0][0])
    return Bound([partial(call, state) for state in states], expected)


def delta_rule(queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The gated delta rule row by row in FP32, over a state `[value_heads, key_dim, value_dim]`."""
    import torch

    shared = values.shape[1] // keys.shape[1]

    def unit(rows: Tensor) -> Tensor:
        rows = rows.float().repeat_interleave(shared, dim=1)
        return rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    out = []
    for q, k, v, g, b in zip(
        unit(queries) * queries.shape[-1] ** -0.5, unit(keys), values.float(), decay, beta, strict=True
    ):
        state = state * g.exp()[:, None, None]
        error = b[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * error[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(out)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("sdpa", "bf16_kv", ("torch",), partial(plan.attend, 2), sdpa, 0.01),
        Peer("xqa", "fp8_kv", ("flashinfer-python",), partial(plan.attend, 1), partial(xqa, fp8_queries=False), 0.02),
        Peer(
            "xqa_fp8_queries",
            "fp8_kv_fp8_queries",
            ("flashinfer-python",),
            partial(plan.attend, 1),
            partial(xqa, fp8_queries=True),
            0.1,
        ),
        Peer("fla", "fp32_state", ("fla-core",), lambda _contexts, rows: plan.delta(rows), recurrent, 0.01),
    )
}
