"""A dry run of a 405B-parameter model on 4,096 GPUs: time, memory, what was predicted.

    python -m benchmarks.verify_speed [--cluster dgx-b300:512] [--pp 16]
                                      [--schedule 1F1B] [--json]

Plans, then has ``meshwright verify`` verify the first, middle and last stage; imports
count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from planner import plan
from planner.schema import Plan
from planner.schema.verification import RankVerification, Verification

__all__ = ["Figures", "verify_speed"]

TARGET_S, TARGET_BYTES = 120.0, 8e9
_SAMPLED_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Time and memory of one verification.

    Attributes:
        wall_s: Of the whole command, imports included.
        cpu_s: Processor time of all its processes.
        peak_rss_bytes: Of all of them together, as sampled.
        result: Ranks, and what was predicted of them.
    """

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    result: Verification


def _held(process: psutil.Process) -> int:
    """Resident bytes of a process and all below it; shared pages count for each."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
    return total


def verify_speed(made: Plan) -> Figures:
    """Verify a plan as the command does.

    Args:
        made: For a built-in model.
    """
    command = [sys.executable, "-m", "planner.cli.main", "verify", "plan.json"]
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder) / "plan.json")
        answer = Path(folder) / "answer.json"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        with answer.open("w") as out:
            verifying = subprocess.Popen([*command, "--json"], cwd=folder, stdout=out)
        peak, watched = 0, psutil.Process(verifying.pid)
        while verifying.poll() is None:
            peak = max(peak, _held(watched))
            time.sleep(_SAMPLED_S)
        wall = time.perf_counter() - started
        text = answer.read_text()
    if verifying.returncode:
        raise SystemExit(verifying.returncode)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = [RankVerification.from_data(rank) for rank in json.loads(text)["ranks"]]
    return Figures(
        wall_s=wall,
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        peak_rss_bytes=peak,
        result=Verification.of(made, tuple(found)),
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
    options = parser.parse_args()
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
