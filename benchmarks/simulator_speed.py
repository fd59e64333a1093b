"""Schedules simulated per second on one core: static order, shared links, closed form.

python -m benchmarks.simulator_speed
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from planner.schema.schedules import schedule_names

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from planner.simulate import (
    actions,
    closed_form_makespan,
    makespan,
    simulate_shared,
)

__all__ = ["Rate", "simulator_speed"]

PP, MICROBATCHES = 16, 128
STATIC = (
    ("1F1B", 1, 50_000),
    ("GPipe", 1, None),
    ("Interleaved1F1B", 2, 20_000),
    ("Interleaved1F1B", 4, None),
    ("LoopedBFS", 2, None),
    ("InterleavedZeroBubble", 2, None),
    ("ZBVZeroBubble", 2, None),
    ("DualPipeV", 2, None),
)
SHARED = (
    ("1F1B", 1, 5_000),
    ("Interleaved1F1B", 2, 5_000),
    ("Interleaved1F1B", 4, None),
    ("InterleavedZeroBubble", 2, None),
    ("ZBVZeroBubble", 2, None),
    ("DualPipeV", 2, None),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One line of the table.

    Attributes:
        name: What was evaluated.
        per_s: Candidates per second of processor time, best of several runs.
        first_s: The first call: compiling the code (or loading it) and the schedule.
        target_per_s: What is asked for; None if nothing is.
    """

    name: str
    per_s: float
    first_s: float
    target_per_s: float | None


def _rate(
    name: str,
    run: Callable[[int], object],
    batch: int,
    target: float | None,
    repeats: int = 15,
) -> Rate:
    start = time.perf_counter()
    run(1)
    first = time.perf_counter() - start
    best = np.inf
    for _ in range(repeats):
        start = time.process_time()
        run(batch)
        best = min(best, time.process_time() - start)
    return Rate(name=name, per_s=batch / best, first_s=first, target_per_s=target)


def _durations(stages: int, batch: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    compute = [rng.uniform(0.5, 1.5, (batch, stages)) for _ in range(3)]
    return compute + [rng.uniform(0, 0.1, (batch, stages - 1)) for _ in range(2)]


def _static(schedule: str, virtual: int, target: float | None) -> Rate:
    times = _durations(PP * virtual, 1000)

    def run(count: int) -> object:
        table = actions(schedule, PP, virtual, MICROBATCHES)
        return makespan(table, *(part[:count] for part in times))

    return _rate(f"static, {schedule} v={virtual}", run, 1000, target)


def _shared(schedule: str, virtual: int, target: float | None) -> Rate:
    """Both directions of each boundary between neighbouring ranks share a link."""
    times = _durations(PP * virtual, 200)
    links = np.arange(PP * virtual - 1) % PP

    def run(count: int) -> object:
        table = actions(schedule, PP, virtual, MICROBATCHES)
        return simulate_shared(
            table,
            *(part[:count] for part in times),
            link_of_forward=links,
            link_of_backward=links,
        )

    return _rate(f"shared links, {schedule} v={virtual}", run, 200, target)


def _closed() -> Rate:
    rng = np.random.default_rng(0)
    count = 1_000_000
    code = rng.integers(0, len(schedule_names()), count)
    virtual = np.where(np.isin(code, [0, 1]), 1, 2)
    pp = 2 ** rng.integers(1, 5, count)
    microbatches = pp * 2 ** rng.integers(1, 5, count)
    times = rng.uniform(0.1, 1.0, (5, count))

    def run(number: int) -> object:
        rows = slice(None) if number > 1 else slice(0, 50_000)
        return closed_form_makespan(
            code[rows], pp[rows], virtual[rows], microbatches[rows], *times[:, rows]
        )

    return _rate("closed form, all schedules mixed", run, count, 1_000_000, repeats=3)


def simulator_speed() -> list[Rate]:
    """All figures, 16 ranks x 128 microbatches, uneven stages, with transfers."""
    rates = [_static(*case) for case in STATIC]
    rates += [_shared(*case) for case in SHARED]
    return [*rates, _closed()]


def main() -> None:
    print(f"{'one core':42s} {'per s':>12s} {'target':>10s} {'first call s':>13s}")
    for rate in simulator_speed():
        target = "" if rate.target_per_s is None else f"{rate.target_per_s:,.0f}"
        print(f"{rate.name:42s} {rate.per_s:12,.0f} {target:>10s} {rate.first_s:13.3f}")


if __name__ == "__main__":
    main()
