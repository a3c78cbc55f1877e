"""PyTorch's side of the protocol: random data, a graph over rotating copies, the median of its replays."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import plan

if TYPE_CHECKING:
    from torch import Tensor


class NoGpuError(Exception):
    """Nothing can be measured here."""


class Gpu:
    """The first CUDA device."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError as error:
            raise NoGpuError(f"PyTorch cannot be imported: {error}") from error
        if not torch.cuda.is_available():
            raise NoGpuError("PyTorch finds no CUDA device")
        self.torch = torch
        self.name: str = torch.cuda.get_device_name()
        torch.manual_seed(1)

    def uniform(self, rows: int, width: int) -> Tensor:
        """BF16 numbers between -1 and 1. Zeros and patterns run faster than real weights do."""
        return self.torch.empty(rows, width, dtype=self.torch.bfloat16, device="cuda").uniform_(-1, 1)

    def error(self, y: Tensor, x: Tensor, weight: Tensor) -> float:
        """The relative error (L2) of `y` against the dense product."""
        return self.relative(y, x @ weight.T)

    def relative(self, y: Tensor, expected: Tensor) -> float:
        """The relative error (L2) of `y`."""
        exact = expected.float()
        return float((y.float() - exact).norm() / exact.norm())

    def microseconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median microseconds of one of the calls, all of them replayed as one graph."""
        cuda = self.torch.cuda
        aside = cuda.Stream()
        aside.wait_stream(cuda.current_stream())
        with cuda.stream(aside):
            for call in calls:
                call()
        cuda.current_stream().wait_stream(aside)
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            for call in calls:
                call()
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(plan.REPLAYS):
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
        return statistics.median_high(times)

    def release(self) -> None:
        """Gives the memory of what is no longer referred to back to the device."""
        gc.collect()
        self.torch.cuda.empty_cache()

    def versions(self) -> dict[str, str]:
        import triton

        return {
            "torch": self.torch.__version__,
            "triton": triton.__version__,
            "cuda": self.torch.version.cuda,
        }
