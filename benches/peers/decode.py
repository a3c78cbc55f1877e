#!/usr/bin/env python3
"""Times what other libraries have of a decode step: attention over a long context, the gated delta rule, a whole step.

The protocol is that of peers.py: random data, copies that no L2 holds, one CUDA graph, the median of its replays, and a
result that is checked before it is timed. A whole step is `generate` of transformers on random weights of the 27B
host's shape, as it comes, without a graph. The JSON is what peers.py writes, and goes the same way into
results/<gpu>.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import decode_plan as plan
import plan as protocol
from decode_libraries import PEERS, Peer
from gpu import Gpu, NoGpuError
from peers import past, reason, write

STEP = "transformers"


def measure(gpu: Gpu, peer: Peer, cases: Sequence[plan.Case], deadline: float) -> Iterator[dict[str, object]]:
    """The rows of one peer."""
    for case in cases:
        row = {"peer": peer.label(), "format": peer.format, **case.dims()}
        try:
            past(deadline)
            us = time_case(gpu, peer, case)
        except Exception as error:  # A library may fail in any way: the row says how.
            yield row | {"problem": reason(error)}
        else:
            yield row | {"us": us, "bytes": case.bytes}
        gpu.release()


def time_case(gpu: Gpu, peer: Peer, case: plan.Case) -> float:
    bound = peer.bind(case)
    error = gpu.relative(bound.calls[0](), bound.expected)
    if not error <= peer.error:
        raise ValueError(f"the result is wrong by {error:.3f}, of at most {peer.error}")
    turns = range(protocol.calls(len(bound.calls), case.rows))
    return gpu.microseconds([bound.calls[turn % len(bound.calls)] for turn in turns])


def measure_step(gpu: Gpu, cases: Sequence[plan.Case], deadline: float) -> Iterator[dict[str, object]]:
    """A token of transformers' generate: the time of many less that of one, over their difference."""
    for case in cases:
        row: dict[str, object] = {"peer": STEP, "format": "bf16", **case.dims()}
        try:
            import transformers

            row["peer"] = f"{STEP} {transformers.__version__}"
            past(deadline)
            us = token_microseconds(gpu, case)
        except Exception as error:
            yield row | {"problem": reason(error)}
        else:
            yield row | {"us": us, "bytes": case.bytes, "tok_s": 1e6 / us}
        gpu.release()


def token_microseconds(gpu: Gpu, case: plan.Case) -> float:
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch = gpu.torch
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**plan.HOST.config()), dtype=torch.bfloat16).eval()
    prompt = torch.randint(plan.HOST.vocab, (1, case.ctx), device="cuda")

    def seconds(tokens: int) -> float:
        torch.cuda.synchronize()
        start = time.monotonic()
        model.generate(prompt, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)
        torch.cuda.synchronize()
        return time.monotonic() - start

    seconds(2)
    runs = [seconds(1 + plan.TOKENS) - seconds(1) for _ in range(3)]
    return statistics.median(runs) / plan.TOKENS * 1e6


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", choices=[*PEERS, STEP], help="one of them; may be repeated (all)")
    parser.add_argument("--ctx", action="append", type=int, metavar="POSITIONS", help="may be repeated (all)")
    parser.add_argument("--rows", action="append", type=int, metavar="M", help="rows of a call; may be repeated (all)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row of a peer after so long")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes (standard output)")
    parser.add_argument("--plan", action="store_true", help="measure nothing; print what would be, as JSON")
    args = parser.parse_args(arguments)
    args.peer = args.peer or [*PEERS, STEP]
    args.ctx = args.ctx or list(plan.CONTEXTS)
    args.rows = args.rows or list(plan.ROWS)
    return args


def cases_of(peer: str, args: argparse.Namespace) -> list[plan.Case]:
    return list(plan.step(args.ctx, args.rows) if peer == STEP else PEERS[peer].cases(args.ctx, args.rows))


def planned(args: argparse.Namespace) -> list[dict[str, object]]:
    return [
        {"peer": peer, **case.dims(), "bytes": case.bytes, "cold_bytes": case.cold_bytes}
        for peer in args.peer
        for case in cases_of(peer, args)
    ]


def run(args: argparse.Namespace, gpu: Gpu) -> dict[str, object]:
    """Measures what is asked for. The file is written after every row, so an interrupted run leaves what it has."""
    results: dict[str, object] = {
        "gpu": gpu.name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": gpu.versions(),
        "rows": (rows := []),
    }
    print(f"{gpu.name}, {results['versions']}", file=sys.stderr)
    for name in args.peer:
        deadline, cases = time.monotonic() + args.seconds, cases_of(name, args)
        measured = measure_step(gpu, cases, deadline) if name == STEP else measure(gpu, PEERS[name], cases, deadline)
        for case, row in zip(cases, measured, strict=True):
            rows.append(row)
            said = f"{row['us']:.2f} us" if "us" in row else row["problem"]
            print(f"{row['peer']} {row['format']}, {case}: {said}", file=sys.stderr, flush=True)
            write(results, args.out)
    return results


def main() -> int:
    args = parse()
    if args.plan:
        print(json.dumps(planned(args)))
        return 0
    try:
        gpu = Gpu()
    except NoGpuError as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return 1
    results = run(args, gpu)
    if args.out is None:
        print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
