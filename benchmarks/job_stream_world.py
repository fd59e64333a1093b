"""Compare policies of the job stream on any cluster, on the same arrivals.

    python -m benchmarks.job_stream_world [--quick] [--waiting 8] [--out FOLDER]

Four worlds: cluster and jobs of the training; unseen jobs; an unseen cluster; and both.
Loads are 0.5 to 1.5 of the cluster's capacity. Seeds are those of no training or
validation. Policies that plan ahead do not know the law. With ``--waiting`` jobs may
wait.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from scipy import stats
from tqdm import tqdm

from benchmarks.tables import cpu_name, report_name
from policies.by_name import make_stream_policy, stream_observes
from policies.stream.evaluation import StreamCase, play_stream
from policies.stream.worlds import HELD_OUT, TRAINED_ON, StreamWorld

__all__ = ["LOADS", "WORLDS", "Cell", "job_stream_world", "table"]

_KNOWN = TRAINED_ON[1].models
WORLDS = {
    "as trained": TRAINED_ON[1],
    "new jobs": StreamWorld(cluster="dgx-a100:4", models=HELD_OUT),
    "new cluster": StreamWorld(cluster="dgx-a100:6", models=_KNOWN),
    "new jobs and cluster": StreamWorld(cluster="dgx-a100:6", models=HELD_OUT),
}
LOADS = (0.5, 0.75, 1.0, 1.25, 1.5)
_CONSTANTS = tuple(f"constant_{2**power}" for power in range(6))
FIXED = ("para_max", "para_min", "random", "min_feasible", *_CONSTANTS)
POLICIES = (*FIXED, "rollout", "learned", "learned+lookahead")
#: First seed, apart from those of validation (from 5000 on) and of earlier tables.
_FIRST_SEED = 9400


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One policy in one world at one load.

    Attributes:
        world: Name of the world.
        load: Work offered over what the cluster can do.
        policy: Name.
        rates: Share of jobs blocked, of each seed.
        refused: Mean share turned away although a candidate was possible.
        late: Mean share late.
        throughput: Mean, in reference devices kept busy.
        utilisation: Mean.
        decision_s: Wall time of a decision.
    """

    world: str
    load: float
    policy: str
    rates: tuple[float, ...]
    refused: float
    late: float
    throughput: float
    utilisation: float
    decision_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    world: str
    load: float
    policy: str
    seeds: tuple[int, ...]
    intervals: float
    waiting: int
    folder: str | None


def _play(task: _Task) -> Cell:
    import torch

    torch.set_num_threads(1)
    world = replace(WORLDS[task.world], max_waiting=task.waiting)
    case = StreamCase(world=world, load=task.load, intervals=task.intervals)
    env = case.env(observe=stream_observes(task.policy))
    played = play_stream(
        lambda env: make_stream_policy(task.policy, env, folder=task.folder),
        env,
        task.seeds,
    )
    arrived = played.mean("arrived")
    return Cell(
        world=task.world,
        load=task.load,
        policy=task.policy,
        rates=played.blocking_rates,
        refused=played.mean("refused") / arrived,
        late=played.mean("late") / arrived,
        throughput=played.mean("throughput"),
        utilisation=played.mean("utilisation"),
        decision_s=played.decision_s,
    )


def job_stream_world(
    seeds: Sequence[int],
    intervals: float,
    *,
    policies: Sequence[str] = POLICIES,
    worlds: Sequence[str] = tuple(WORLDS),
    loads: Sequence[float] = LOADS,
    waiting: int = 0,
    folder: str | None = None,
    workers: int = 1,
    watch: Callable[[Cell], None] = lambda _: None,
) -> list[Cell]:
    """Play every policy in every world at every load, on the same arrivals.

    Args:
        seeds: Seeds of the arrivals.
        intervals: Length of an episode in mean times between arrivals.
        policies: Names.
        worlds: Names.
        loads: Work offered over what the cluster can do.
        waiting: Places in the queue.
        folder: Folder of weights; by default those that ship.
        workers: Number of processes.
        watch: Called after each cell.
    """
    tasks = [
        _Task(
            world=world,
            load=load,
            policy=policy,
            seeds=tuple(seeds),
            intervals=intervals,
            waiting=waiting,
            folder=folder,
        )
        for policy in reversed(policies)
        for world in worlds
        for load in loads
    ]
    cells = []
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for cell in pool.map(_play, tasks):
            cells.append(cell)
            watch(cell)
    return cells


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    found = np.array(values)
    if len(found) < 2:
        return float(found.mean()), float("nan")
    half = stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5
    return float(found.mean()), float(half)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: blocking rates of each world, then learned against the best others."""
    worlds = list(dict.fromkeys(cell.world for cell in cells))
    loads = sorted({cell.load for cell in cells})
    policies = [p for p in POLICIES if any(cell.policy == p for cell in cells)]
    found = {(c.world, c.load, c.policy): c for c in cells}
    lines = []
    for world in worlds:
        chosen = WORLDS[world]
        lines += [
            f"### {world}: {chosen.cluster}, {len(chosen.models)} jobs",
            "",
            f"| blocked at load | {' | '.join(f'{load:g}' for load in loads)} "
            f"| late | used | ms a decision |",
            "|---" * (len(loads) + 4) + "|",
        ]
        middle = loads[len(loads) // 2]
        for policy in policies:
            rates = [np.mean(found[world, load, policy].rates) for load in loads]
            one = found[world, middle, policy]
            lines.append(
                f"| {policy} | {' | '.join(f'{rate:.4f}' for rate in rates)} "
                f"| {one.late:.4f} | {one.utilisation:.3f} "
                f"| {1e3 * one.decision_s:.2f} |"
            )
        lines += ["", f"`late`, `used` and times at load {middle:g}.", ""]
    return "\n".join(lines + _against(found, worlds, loads, policies))


def _against(
    found: dict[tuple[str, float, str], Cell],
    worlds: Sequence[str],
    loads: Sequence[float],
    policies: Sequence[str],
) -> list[str]:
    """Differences to the best fixed policy of each world and load, seed by seed."""
    planning = [p for p in policies if p not in FIXED]
    lines = [
        "### Against the best fixed policy of each world and load",
        "",
        "Difference of blocking rates in points with its 95 % interval, seed by seed; "
        "in brackets relative to the best fixed policy.",
        "",
        f"| world | load | best fixed | {' | '.join(planning)} |",
        "|---" * (3 + len(planning)) + "|",
    ]
    for world in worlds:
        for load in loads:
            best = min(
                (p for p in policies if p in FIXED),
                key=lambda p, w=world, at=load: np.mean(found[w, at, p].rates),
            )
            base = np.array(found[world, load, best].rates)
            parts = []
            for policy in planning:
                mean, half = _interval(found[world, load, policy].rates - base)
                share = f"{100 * mean / base.mean():+.0f} %" if base.mean() else "-"
                parts.append(f"{100 * mean:+.2f} ± {100 * half:.2f} ({share})")
            lines.append(
                f"| {world} | {load:g} | {best} {base.mean():.4f} "
                f"| {' | '.join(parts)} |"
            )
    return [*lines, ""]


def main() -> None:
    """Print the table, or the cells as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--intervals", type=float, default=500.0)
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--worlds", nargs="+", default=WORLDS, choices=WORLDS)
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS)
    parser.add_argument("--waiting", type=int, default=0, help="jobs that may wait")
    parser.add_argument("--weights", help="folder of a policy, instead of the shipped")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="2 seeds, 2 loads, 200")
    parser.add_argument("--out", type=Path, help="folder for the table as a file")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.intervals, given.loads = 2, 200.0, (0.75, 1.25)
    count = len(given.policies) * len(given.worlds) * len(given.loads)
    with tqdm(total=count, file=sys.stderr, disable=None) as bar:
        cells = job_stream_world(
            range(_FIRST_SEED, _FIRST_SEED + given.seeds),
            given.intervals,
            policies=given.policies,
            worlds=tuple(given.worlds),
            loads=given.loads,
            waiting=given.waiting,
            folder=given.weights,
            workers=given.workers,
            watch=lambda _: bar.update(1) and None,
        )
    if given.json:
        print(json.dumps([asdict(cell) for cell in cells]))
        return
    text = table(cells)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        name = "job_stream_world_waiting" if given.waiting else "job_stream_world"
        (given.out / report_name(name)).write_text(_about(given) + text)
    print(text)


def _about(given: argparse.Namespace) -> str:
    """Return the heading of the file: machine, seeds and settings."""
    today = datetime.date.today().isoformat()
    last = _FIRST_SEED + given.seeds - 1
    waiting = f"up to {given.waiting} jobs wait" if given.waiting else "no job waits"
    return (
        f"# Policies of the job stream on any cluster\n\n{cpu_name()}, {today}, "
        f"{given.workers} processes. Seeds {_FIRST_SEED} to {last}, Poisson arrivals, "
        f"{given.intervals:g} mean intervals an episode, deadlines uniform from 0.1 to "
        f"1 of the time on one device, {waiting}. Planners are not told the law.\n\n"
    )


if __name__ == "__main__":
    main()
