#!/usr/bin/env python3
"""Times other libraries' projections on the shapes and by the protocol of our own benches.

Weights are random and cold: calls rotate among copies that together are several times any L2. Calls are replayed as one
CUDA graph and the median counts. The output is one JSON object whose rows `cargo xtask bench --peers` takes into
results/<gpu>.json. What a peer cannot do is a row with the reason, and the rest goes on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import plan
from gpu import Gpu, NoGpuError
from libraries import PEERS, Peer, Project

if TYPE_CHECKING:
    from torch import Tensor


def measure(
    gpu: Gpu, peer: Peer, format: plan.Format, n: int, k: int, rows: Sequence[int], deadline: float
) -> Iterator[dict[str, object]]:
    """The rows of one peer and format on one shape."""
    calls = [plan.Call(peer.label(), format, n, k, m) for m in rows]
    try:
        past(deadline)
        bind = peer.bind(format.name, rows)
        weight = gpu.uniform(n, k)
        # The first copy's dense weights are kept for the check; a peer may take the ones it is given apart.
        bound = [bind(weight.clone())]
        while len(bound) < plan.copies(format.weight_bytes(n, k)):
            bound.append(bind(gpu.uniform(n, k)))
    except Exception as error:  # A library may fail in any way: every row says how.
        yield from (call.failed(reason(error)) for call in calls)
        return
    for call in calls:
        try:
            past(deadline)
            us = time_call(gpu, call, bound, weight)
        except Exception as error:
            yield call.failed(reason(error))
        else:
            yield call.measured(us)


def time_call(gpu: Gpu, call: plan.Call, bound: Sequence[Project], weight: Tensor) -> float:
    """Microseconds of a call whose result is right: a broken one can be fast. `weight` is what `bound[0]` was given."""
    x = gpu.uniform(call.m, call.k)
    error = gpu.error(bound[0](x), x, weight)
    if not error <= call.format.error:
        raise ValueError(f"the result is wrong by {error:.3f}, of at most {call.format.error}")
    turns = range(plan.calls(len(bound), call.m))
    return gpu.microseconds([partial(bound[turn % len(bound)], x) for turn in turns])


def reason(error: Exception) -> str:
    """An exception in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."


def past(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("no time was left for it (--seconds)")


def shape(text: str) -> tuple[int, int]:
    try:
        n, k = (int(side) for side in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not N x K, such as 17408x5120") from None
    return n, k


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", choices=PEERS, help="one of them; may be repeated (all)")
    parser.add_argument("--format", action="append", choices=plan.FORMATS, help="may be repeated (all that a peer has)")
    parser.add_argument("--shape", action="append", type=shape, metavar="NxK", help="may be repeated (all)")
    parser.add_argument("--rows", action="append", type=int, metavar="M", help="rows of a call; may be repeated (all)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no row of a peer after so long; autotuners take long"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes (standard output)")
    parser.add_argument("--plan", action="store_true", help="measure nothing; print what would be, as JSON")
    args = parser.parse_args(arguments)
    args.peer = args.peer or list(PEERS)
    args.format = args.format or list(plan.FORMATS)
    args.shape = args.shape or list(plan.SHAPES)
    args.rows = args.rows or list(plan.ROWS)
    return args


def formats(peer: Peer, args: argparse.Namespace) -> list[plan.Format]:
    return [plan.FORMATS[name] for name in peer.formats if name in args.format]


def planned(args: argparse.Namespace) -> dict[str, object]:
    """The protocol, and every row with its weights' size."""
    rows = []
    for name in args.peer:
        for format in formats(PEERS[name], args):
            for n, k, taken in plan.cells(args.shape, args.rows):
                copies = plan.copies(format.weight_bytes(n, k))
                rows += [
                    {"peer": name, "format": format.name, "n": n, "k": k, "m": m}
                    | {"copies": copies, "calls": plan.calls(copies, m)}
                    for m in taken
                ]
    return {"rotate_bytes": plan.ROTATE_BYTES, "replays": plan.REPLAYS, "rows": rows}


def run(args: argparse.Namespace, gpu: Gpu) -> dict[str, object]:
    """Measures what is asked for. The file is written after every row, so an interrupted run leaves what it has."""
    results: dict[str, object] = {
        "gpu": gpu.name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": gpu.versions(),
        "rows": (rows := []),
    }
    print(f"{gpu.name}, {results['versions']}", file=sys.stderr)
    for peer in (PEERS[name] for name in args.peer):
        print(peer.label(), file=sys.stderr)
        deadline = time.monotonic() + args.seconds
        for format in formats(peer, args):
            for n, k, taken in plan.cells(args.shape, args.rows):
                for row in measure(gpu, peer, format, n, k, taken, deadline):
                    rows.append(row)
                    said = f"{row['us']:.2f} us" if "us" in row else row["problem"]
                    print(f"  {format.name} {n} x {k}, M = {row['m']}: {said}", file=sys.stderr, flush=True)
                    write(results, args.out)
                gpu.release()
    return results


def write(results: dict[str, object], path: Path | None) -> None:
    if path is not None:
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(results, indent=2) + "\n")
        beside.replace(path)


def main() -> int:
    args = parse()
    if args.plan:
        print(json.dumps(planned(args)))
        return 0
    try:
        gpu = Gpu()
    except NoGpuError as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 1
    results = run(args, gpu)
    if args.out is None:
        print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
