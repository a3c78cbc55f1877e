"""What decode.py does without PyTorch and without a GPU."""

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

import decode
import decode_libraries as libraries
import decode_plan as plan


class FakeGpu:
    """Stands for a GPU on which a call takes as many microseconds as it returns."""

    name = "NVIDIA Test"

    def __init__(self, error: float = 0.0) -> None:
        self.error = error
        self.graphs: list[int] = []

    def relative(self, y: float, expected: float) -> float:
        assert y == expected
        return self.error

    def microseconds(self, calls: Sequence[Callable[[], float]]) -> float:
        self.graphs.append(len(calls))
        return max(call() for call in calls)

    def release(self) -> None:
        pass

    def versions(self) -> dict[str, str]:
        return {"torch": "0"}


def works(case: plan.Case) -> libraries.Bound:
    return libraries.Bound([lambda: float(case.rows)] * case.copies(), float(case.rows))


def fails_above_one(case: plan.Case) -> libraries.Bound:
    if case.rows > 1:
        raise RuntimeError("one row\nat a time")
    return works(case)


def peer(bind: Callable[[plan.Case], libraries.Bound]) -> libraries.Peer:
    return libraries.Peer(
        "test", "fp8_kv", ("no-such-distribution",), lambda ctx, rows: plan.attend(1, ctx, rows), bind, 0.1
    )


def measure(bind: Callable[[plan.Case], libraries.Bound], fake: FakeGpu, left: float = math.inf) -> list[dict]:
    return list(decode.measure(fake, peer(bind), list(plan.attend(1, [4096], [1, 7])), left))


class Plan(unittest.TestCase):
    def test_attention_must_read_keys_and_values(self) -> None:
        (case,) = plan.attend(1, [4096], [7])
        self.assertEqual(case.bytes, 4096 * 2048 + 7 * 2 * 24 * 256 * 2)
        self.assertEqual(case.copies(), 48)
        (dense,) = plan.attend(2, [131072], [1])
        self.assertEqual(dense.cold_bytes, 536_870_912)
        self.assertEqual(dense.copies(), 2)

    def test_the_delta_rule_must_read_and_write_its_state(self) -> None:
        one, four, seven = plan.delta([1, 4, 7, 16])
        self.assertEqual(one.bytes, 2 * 48 * 128 * 128 * 4 + 128 * 128 * 2 + 96 * 4)
        self.assertEqual((four.rows, seven.rows), (4, 7))
        self.assertEqual(seven.bytes - one.bytes, 6 * (128 * 128 * 2 + 96 * 4))
        self.assertIsNone(one.ctx)

    def test_a_step_must_read_all_weights(self) -> None:
        (case,) = plan.step(plan.CONTEXTS, plan.ROWS)
        full, delta = 5120 * (2 * 6144 + 2 * 1024 + 6144), 5120 * (10240 + 6144 + 96 + 6144)
        weights = 16 * full + 48 * delta + 64 * 3 * 17408 * 5120 + 248320 * 5120
        self.assertEqual(plan.HOST.weights(), weights)
        self.assertEqual(case.bytes, 2 * weights + 16 * 4096 * 4096 + 48 * 2 * 48 * 128 * 128 * 4)
        self.assertEqual(list(plan.step([32768], [1])), [])

    def test_every_fourth_layer_has_full_attention(self) -> None:
        layers = plan.HOST.config()["layer_types"]
        self.assertEqual(layers[:4], ["linear_attention"] * 3 + ["full_attention"])
        self.assertEqual((len(layers), layers.count("full_attention")), (64, 16))


class Measure(unittest.TestCase):
    def test_a_row_says_who_what_and_how_long(self) -> None:
        fake = FakeGpu()
        one, seven = measure(works, fake)
        expected = {"peer": "test (not installed)", "format": "fp8_kv", "what": "attention", "shape": "24/4/256"}
        self.assertEqual(one, expected | {"ctx": 4096, "rows": 1, "us": 1.0, "bytes": 4096 * 2048 + 24_576})
        self.assertEqual(seven["us"], 7.0)
        self.assertEqual(fake.graphs, [96, 96])

    def test_the_rest_goes_on_after_a_failure(self) -> None:
        one, seven = measure(fails_above_one, FakeGpu())
        self.assertEqual(one["us"], 1.0)
        self.assertEqual(seven["problem"], "RuntimeError: one row at a time")

    def test_a_wrong_result_is_not_timed(self) -> None:
        for error in (0.11, math.nan):
            fake = FakeGpu(error)
            for row in measure(works, fake):
                self.assertIn("the result is wrong", row["problem"])
            self.assertEqual(fake.graphs, [])

    def test_nothing_starts_after_the_deadline(self) -> None:
        for row in measure(works, FakeGpu(), left=0.0):
            self.assertIn("--seconds", row["problem"])

    def test_a_host_that_cannot_be_loaded_fails_its_row(self) -> None:
        with mock.patch.dict("sys.modules", {"transformers": None}):
            (row,) = decode.measure_step(FakeGpu(), list(plan.step(plan.CONTEXTS, [1])), math.inf)
        self.assertEqual((row["peer"], row["what"], row["shape"], row["ctx"]), ("transformers", "step", "27b", 4096))
        self.assertIn("transformers", row["problem"])


class CommandLine(unittest.TestCase):
    def test_what_is_asked_for_is_planned(self) -> None:
        rows = decode.planned(decode.parse(["--peer", "xqa", "--ctx", "4096", "--rows", "7"]))
        self.assertEqual([(row["peer"], row["ctx"], row["rows"]) for row in rows], [("xqa", 4096, 7)])
        everything = decode.planned(decode.parse([]))
        self.assertEqual(len(everything), 3 * 12 + 3 + 1)

    def test_the_file_has_every_row(self) -> None:
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(decode, "PEERS", {"good": peer(works)}):
            out = Path(folder) / "peers.json"
            args = decode.parse(["--ctx", "4096", "--rows", "1", "--out", str(out)])
            said = io.StringIO()
            with contextlib.redirect_stderr(said), mock.patch.dict("sys.modules", {"transformers": None}):
                decode.run(args, FakeGpu())
            results = json.loads(out.read_text())
        self.assertEqual([row["what"] for row in results["rows"]], ["attention", "step"])
        self.assertEqual(["us" in row for row in results["rows"]], [True, False])
        self.assertIn("attention 24/4/256 at 4096, 1 row: 1.00 us", said.getvalue())


if __name__ == "__main__":
    unittest.main()
