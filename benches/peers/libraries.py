"""The peers. Each is imported only when it is asked for, so one that is missing costs nothing but its own rows.

To add one: a function that takes a format's name and the row counts of the calls to come and returns how weights are
bound, and a line in PEERS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Takes rows `[M, K]` to rows `[M, N]`, both BF16.
Project = Callable[["Tensor"], "Tensor"]
# Takes dense BF16 weights `[N, K]` on the GPU, quantises and packs them as the peer does.
Bind = Callable[["Tensor"], Project]


@dataclass(frozen=True)
class Peer:
    name: str
    # The formats measured, by their names in plan.FORMATS.
    formats: tuple[str, ...]
    # The packages that may hold it; the first one installed gives the version.
    packages: tuple[str, ...]
    bind: Callable[[str, Sequence[int]], Bind]

    def label(self) -> str:
        """The name and the installed version."""
        for package in self.packages:
            try:
                return f"{self.name} {metadata.version(package)}"
            except metadata.PackageNotFoundError:
                continue
        return f"{self.name} (not installed)"


def cublas(format: str, rows: Sequence[int]) -> Bind:
    from torch.nn import functional

    assert format == "bf16"
    return lambda weight: lambda x: functional.linear(x, weight)


def humming(format: str, rows: Sequence[int]) -> Bind:
    import torch
    from humming.layer import HummingLayer, HummingMethod

    configs = {
        "w8a16": {"dtype": "int8"},
        "nvfp4_w4a16": {
            "dtype": "float4e2m1",
            "scale_dtype": "float8e4m3",
            "group_size": 16,
            "scale_2_type": "tensor",
        },
    }

    def bind(weight: Tensor) -> Project:
        n, k = weight.shape
        config = dict(configs[format])
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16)
        layer = layer.to(weight.device)
        layer.load_from_unquantized(weight)
        layer.transform()
        # Its own choice of kernels, one a range of M; the ranges that no call falls into are not compiled.
        ranges = HummingMethod.get_default_tuning_configs(layer)
        ranges = [(low, high, kernel) for low, high, kernel in ranges if any(low < m <= high for m in rows)]
        return partial(layer, tuning_config=ranges)

    return bind


def gemlite(format: str, rows: Sequence[int]) -> Bind:
    import torch
    from gemlite import helper

    # What its dot_scaled compiles to there is an assertion of the compiler's.
    if format == "nvfp4_w4a16" and torch.cuda.get_device_capability() < (10, 0):
        raise NotImplementedError("Triton multiplies by UE4M3 scales from compute capability 10.0 on")
    processor = {"w8a16": helper.A16W8_INT8, "nvfp4_w4a16": helper.A16W4_NVFP}[format]

    def bind(weight: Tensor) -> Project:
        n, k = weight.shape
        linear = torch.nn.Linear(k, n, bias=False, device="meta", dtype=weight.dtype)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        return processor(device=str(weight.device), dtype=torch.bfloat16).from_linear(linear)

    return bind


PEERS = {
    peer.name: peer
    for peer in (
        Peer("cublas", ("bf16",), ("nvidia-cublas", "nvidia-cublas-cu12", "torch"), cublas),
        Peer("humming", ("w8a16", "nvfp4_w4a16"), ("humming-kernels",), humming),
        Peer("gemlite", ("w8a16", "nvfp4_w4a16"), ("gemlite",), gemlite),
    )
}
