"""Everything but the measuring itself: `python3 -m unittest discover benches/peers`, with no PyTorch and no GPU."""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import gpu
import libraries
import peers
import plan

W8A16 = plan.FORMATS["w8a16"]


class Dense:
    """Stands for a tensor: it has a shape and can be copied."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def clone(self) -> Dense:
        return Dense(*self.shape)


class FakeGpu:
    """Stands for a GPU on which a call takes as many microseconds as it has rows."""

    name = "NVIDIA Test"

    def __init__(self, error: float = 0.0) -> None:
        self.relative_error = error
        self.graphs: list[int] = []

    def uniform(self, rows: int, width: int) -> Dense:
        return Dense(rows, width)

    def error(self, y: Dense, x: Dense, weight: Dense) -> float:
        assert y.shape == (x.shape[0], weight.shape[0])
        return self.relative_error

    def microseconds(self, calls: Sequence[Callable[[], Dense]]) -> float:
        self.graphs.append(len(calls))
        shapes = {call().shape for call in calls}
        assert len(shapes) == 1
        return float(shapes.pop()[0])

    def release(self) -> None:
        pass

    def versions(self) -> dict[str, str]:
        return {"torch": "0"}


def works(format: str, rows: Sequence[int]) -> libraries.Bind:
    return lambda weight: lambda x: Dense(x.shape[0], weight.shape[0])


def fails_above_one(format: str, rows: Sequence[int]) -> libraries.Bind:
    def project(x: Dense) -> Dense:
        if x.shape[0] > 1:
            raise RuntimeError("one row\nat a time")
        return Dense(1, 1024)

    return lambda weight: project


def is_missing(format: str, rows: Sequence[int]) -> libraries.Bind:
    raise ModuleNotFoundError("No module named 'nope'")


def peer(bind: Callable[[str, Sequence[int]], libraries.Bind], *formats: str) -> libraries.Peer:
    return libraries.Peer("test", formats or ("w8a16",), ("no-such-distribution",), bind)


def measure(bind: Callable[[str, Sequence[int]], libraries.Bind], fake: FakeGpu, left: float = math.inf) -> list[dict]:
    return list(peers.measure(fake, peer(bind), W8A16, 1024, 5120, [1, 16], deadline=left))


class Plan(unittest.TestCase):
    def test_copies_are_more_than_any_l2_and_rotations_are_whole(self) -> None:
        for n, k, bits, copies, decode in [
            (17408, 5120, 8, 5, 65),  # 89.1 MB
            (1024, 5120, 4.5, 136, 136),  # 2.9 MB
            (248320, 5120, 16, 2, 64),  # 2.5 GB
        ]:
            weight_bytes = round(n * k * bits / 8)
            self.assertEqual(plan.copies(weight_bytes), copies)
            self.assertEqual(plan.calls(copies, 16), decode)
            self.assertEqual(plan.calls(copies, 2048), copies)

    def test_a_call_must_move_weights_scales_and_rows(self) -> None:
        self.assertEqual(W8A16.call_bytes(17408, 5120, 1), 89_128_960 + 69_632 + 45_056)
        self.assertEqual(plan.FORMATS["nvfp4_w4a16"].call_bytes(16, 32, 2), 256 + 32 + 192)
        self.assertEqual(plan.FORMATS["bf16"].weight_bytes(3, 5), 30)

    def test_a_prompt_does_not_pass_the_head(self) -> None:
        cells = {(n, k): rows for n, k, rows in plan.cells(plan.SHAPES, plan.ROWS)}
        self.assertEqual(len(cells), 6)
        self.assertEqual(cells[plan.HEAD], [1, 2, 4, 8, 16])
        self.assertEqual(cells[5120, 17408], [1, 2, 4, 8, 16, 2048])
        self.assertEqual(list(plan.cells([plan.HEAD], [2048])), [])

    def test_every_peer_has_known_formats(self) -> None:
        for known in libraries.PEERS.values():
            self.assertLessEqual(set(known.formats), set(plan.FORMATS))


class Measure(unittest.TestCase):
    def test_a_row_says_who_what_and_how_long(self) -> None:
        fake = FakeGpu()
        one, sixteen = measure(works, fake)
        self.assertEqual(
            one,
            {
                "peer": "test (not installed)",
                "format": "w8a16",
                "what": "project",
                "n": 1024,
                "k": 5120,
                "m": 1,
                "us": 1.0,
                "bytes": W8A16.call_bytes(1024, 5120, 1),
            },
        )
        self.assertEqual(sixteen["us"], 16.0)
        self.assertEqual(fake.graphs, [77, 77])

    def test_a_peer_that_cannot_be_loaded_fails_every_row(self) -> None:
        rows = measure(is_missing, FakeGpu())
        self.assertEqual([row["m"] for row in rows], [1, 16])
        for row in rows:
            self.assertEqual(row["problem"], "ModuleNotFoundError: No module named 'nope'")
            self.assertNotIn("us", row)

    def test_the_rest_goes_on_after_a_failure(self) -> None:
        one, sixteen = measure(fails_above_one, FakeGpu())
        self.assertEqual(one["us"], 1.0)
        self.assertEqual(sixteen["problem"], "RuntimeError: one row at a time")

    def test_a_wrong_result_is_not_timed(self) -> None:
        for error in (0.021, math.nan):
            fake = FakeGpu(error)
            for row in measure(works, fake):
                self.assertIn("the result is wrong", row["problem"])
            self.assertEqual(fake.graphs, [])

    def test_nothing_starts_after_the_deadline(self) -> None:
        for row in measure(works, FakeGpu(), left=0.0):
            self.assertIn("--seconds", row["problem"])


class CommandLine(unittest.TestCase):
    def test_what_is_asked_for_is_planned(self) -> None:
        args = peers.parse(["--peer", "humming", "--format", "w8a16", "--shape", "1024x5120", "--rows", "3"])
        self.assertEqual(
            peers.planned(args)["rows"],
            [{"peer": "humming", "format": "w8a16", "n": 1024, "k": 5120, "m": 3, "copies": 77, "calls": 77}],
        )
        everything = peers.planned(peers.parse([]))["rows"]
        self.assertEqual(len(everything), 5 * 35)

    def test_a_shape_is_two_numbers(self) -> None:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), self.assertRaises(SystemExit):
            peers.parse(["--shape", "5120"])
        self.assertIn("'5120' is not N x K, such as 17408x5120", said.getvalue())

    def test_the_file_has_every_row(self) -> None:
        two = {"good": peer(works, "w8a16", "bf16"), "bad": peer(is_missing)}
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(peers, "PEERS", two):
            out = Path(folder) / "peers.json"
            args = peers.parse(["--shape", "1024x5120", "--rows", "1", "--out", str(out)])
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                peers.run(args, FakeGpu())
            results = json.loads(out.read_text())
            self.assertEqual([path.name for path in Path(folder).iterdir()], ["peers.json"])
        self.assertEqual(results["gpu"], "NVIDIA Test")
        self.assertEqual([row["format"] for row in results["rows"]], ["w8a16", "bf16", "w8a16"])
        self.assertEqual(["us" in row for row in results["rows"]], [True, True, False])
        self.assertIn("bf16 1024 x 5120, M = 1: 1.00 us", said.getvalue())

    def test_without_a_gpu_it_says_so(self) -> None:
        said = io.StringIO()
        no_torch = mock.patch.dict("sys.modules", {"torch": None})
        with contextlib.redirect_stderr(said), no_torch, mock.patch("sys.argv", ["peers.py"]):
            self.assertEqual(peers.main(), 1)
        self.assertIn("PyTorch cannot be imported", said.getvalue())
        with no_torch, self.assertRaises(gpu.NoGpuError):
            gpu.Gpu()


if __name__ == "__main__":
    unittest.main()
