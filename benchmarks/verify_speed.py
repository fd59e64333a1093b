"""A dry run of a 405B-parameter model on 4,096 GPUs: time, memory, what was predicted.

    python -m benchmarks.verify_speed [--cluster dgx-b300:512] [--pp 16]
                                      [--schedule 1F1B] [--json]

Plans, then verifies the first, middle and last stage in one fresh process on one
thread, as ``meshwright verify`` does; imports count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from planner import plan
from planner.schema import Plan
from planner.schema.verification import RankVerification, Verification

__all__ = ["Figures", "verify_speed"]

TARGET_S, TARGET_BYTES = 120.0, 8e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one verification took.

    Attributes:
        wall_s: Of the whole process, imports included.
        cpu_s: Processor time of the same; differs where the machine is shared.
        peak_rss_bytes: Of the process.
        result: Ranks, and what was predicted of them.
    """

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    result: Verification


def _ranks(made: Plan) -> list[int]:
    mesh = made.strategy.mesh
    return [p * mesh.stride("pp") for p in sorted({0, mesh.pp // 2, mesh.pp - 1})]


def _child() -> None:
    """Verify the plan on stdin in this process."""
    from planner.cli.verify import verify_ranks

    text = sys.stdin.read()
    made = Plan.from_json(text)
    answer = verify_ranks(
        {
            "plan": text,
            "model": made.model.ref,
            "ranks": _ranks(made),
            "force": False,
            "every_microbatch": False,
        },
        lambda rank: print(f"rank {rank} is done", file=sys.stderr, flush=True),
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    took = {"cpu_s": used.ru_utime + used.ru_stime, "rss": used.ru_maxrss * 1024}
    print(json.dumps({"ranks": answer, **took}))


def verify_speed(made: Plan) -> Figures:
    """Verify a plan in a fresh process.

    Args:
        made: For a built-in model.
    """
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.verify_speed", "--child"],
        input=made.to_json(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wall = time.perf_counter() - started
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found = tuple(RankVerification.from_data(rank) for rank in answer["ranks"])
    return Figures(
        wall_s=wall,
        cpu_s=answer["cpu_s"],
        peak_rss_bytes=answer["rss"],
        result=Verification.of(made, found),
    )


def _print(made: Plan, figures: Figures) -> None:
    print(f"{made.model.name}, {made.cluster.name}: {made.strategy.label()}")
    for rank in figures.result.ranks:
        run = f"{rank.microbatches_run} of {rank.microbatches} microbatches run"
        print(f"rank {rank.rank:5d} {rank.failure or run}")
    print(f"wall {figures.wall_s:.1f} s, target {TARGET_S:.0f}")
    print(f"processor {figures.cpu_s:.1f} s")
    print(
        f"memory {figures.peak_rss_bytes / 1e9:.2f} GB, target {TARGET_BYTES / 1e9:.0f}"
    )
    print(f"{'':34s} {'predicted GB':>14s} {'found GB':>12s} {'ratio':>7s}")
    for each in figures.result.deviations:
        ratio = "" if each.ratio is None else f"{each.ratio:.4f}"
        pair = f"{each.predicted / 1e9:14.3f} {each.found / 1e9:12.3f}"
        print(f"{each.name:34s} {pair} {ratio:>7s}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3-405b")
    parser.add_argument("--cluster", default="dgx-b300:512")
    parser.add_argument("--global-batch", type=int, default=8192)
    parser.add_argument("--pp", type=int, default=16)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--plan", help="a plan file, instead of planning one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child()
        return
    if options.plan:
        made = Plan.load(options.plan)
    else:
        made = plan(
            options.model,
            options.cluster,
            global_batch=options.global_batch,
            pin={
                "pp": options.pp,
                "tp": 8,
                "cp": 1,
                "schedule": options.schedule,
            },
        )
    figures = verify_speed(made)
    if options.json:
        print(json.dumps({**asdict(figures), "result": figures.result.to_data()}))
    else:
        _print(made, figures)


if __name__ == "__main__":
    main()
