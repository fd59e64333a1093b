"""Policies of the job stream on the same traces: blocking rates with intervals."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from tqdm import tqdm

from benchmarks.job_stream_replay import PLANNERS, replay_law, scaled_law
from envs.ramp.profiles import read_jobs
from envs.ramp.tables import ramp_tables
from planner.errors import StrategyError
from policies.baselines import best_constant

__all__ = [
    "BETA_BINS",
    "CHOSEN_ON",
    "Comparison",
    "Episode",
    "Estimate",
    "Row",
    "Task",
    "Work",
    "check_seeds",
    "compare",
    "degrees",
    "estimate",
    "gains",
    "missing",
    "rows_of",
    "tasks_of",
]

#: Seeds that the best constants are chosen on; never those that are reported.
CHOSEN_ON = range(5000, 5012)
#: Seeds that are no test, and of what they are.
_RESERVED = (
    (range(3), "the published traces, which settings were chosen on"),
    (range(5000, 6000), "validation"),
)
#: Policies that learn and are in the table where they are installed.
_LEARNED = ("learned", "learned+lookahead")
#: Names of policies that a decision costs little.
_CHEAP = ("para_", "min_", "constant_", "random")
#: Edges of the bins of beta that degrees are counted in.
BETA_BINS: NDArray[np.float64] = np.linspace(0.1, 1.0, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table.

    Attributes:
        label: What it is called.
        policy: Name to replay by; of best constants that of the one chosen.
        told: Whether it is told the law.
    """

    label: str
    policy: str
    told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One episode to replay; the arguments of ``replay_law``."""

    policy: str
    law: str
    seed: int
    load: float = 1.0
    told: bool = False


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Episode:
    """What came of a task.

    Attributes:
        summary: As ReplayResult has it.
        ms_per_decision: Wall time of the policy.
        chosen: Decisions by bin of beta and action. Shape [bins, actions].
    """

    summary: dict[str, float]
    ms_per_decision: float
    chosen: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: Of the seeds.
        half: Half the width of its 95 % interval, by Student's t.
    """

    mean: float
    half: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A policy on a law, over the same seeds as the best constant.

    Attributes:
        row: The policy.
        law: The law.
        blocking: Rate.
        against_best: Its difference to that of the best constant, seed by seed.
        relative: Mean of that difference over the best constant's mean rate.
        throughput_bytes_per_s: Mean.
        mean_jct_s: Mean over episodes with completed jobs; NaN without any.
        ms_per_decision: Wall time.
    """

    row: Row
    law: str
    blocking: Estimate
    against_best: Estimate
    relative: float
    throughput_bytes_per_s: float
    mean_jct_s: float
    ms_per_decision: float


def check_seeds(text: str) -> range:
    """Seeds from ``FIRST:COUNT``.

    Raises:
        StrategyError: If it is not that, there are fewer than two, or a seed is one
            that policies are trained or chosen on.
    """
    first, _, count = text.partition(":")
    if not (first.isdigit() and count.isdigit() and int(count) >= 2):
        raise StrategyError(
            f"seeds {text!r}; write FIRST:COUNT, with a COUNT of at least 2 for an "
            f"interval, for instance 9000:12"
        )
    seeds = range(int(first), int(first) + int(count))
    for taken, what in _RESERVED:
        if seeds.start < taken.stop and taken.start < seeds.stop:
            raise StrategyError(
                f"seeds {text} overlap {taken.start} to {taken.stop - 1}, which are "
                f"{what}; take others, for instance 9000:{len(seeds)}"
            )
    return seeds


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of values, at least 2."""
    count = len(values)
    spread = float(np.std(values, ddof=1)) / np.sqrt(count)
    quantile = float(stats.t.ppf(0.975, count - 1))
    return Estimate(mean=float(np.mean(values)), half=quantile * spread)


def _episode(task: Task, horizon_s: float) -> Episode:
    result = replay_law(
        task.policy,
        task.law,
        task.seed,
        load=task.load,
        told=task.told,
        horizon_s=horizon_s,
    )
    actions = [0, *degrees()]
    chosen = np.zeros((len(BETA_BINS) - 1, len(actions)), dtype=np.int64)
    for decision in result.decisions:
        # Edges are tenths and so are betas: count an edge to the bin below it.
        index = int(np.searchsorted(BETA_BINS, decision.beta - 1e-9)) - 1
        place = min(max(index, 0), len(chosen) - 1)
        chosen[place, actions.index(decision.degree)] += 1
    return Episode(
        summary=result.summary, ms_per_decision=result.ms_per_decision, chosen=chosen
    )


def degrees() -> list[int]:
    """Of the benchmark's cluster."""
    return list(read_jobs().degrees)


def _best(law: str, load: float, horizon_s: float) -> str:
    jobs = read_jobs()
    chosen = best_constant(
        jobs, scaled_law(law, load), CHOSEN_ON, ramp_tables(jobs), horizon_s
    )
    return f"constant_{chosen.degree}"


class Work:
    """Replays episodes on all cores, each of them once.

    Args:
        horizon_s: When episodes end.
        processes: To run, 1 is this one; as many as there are cores by default.

    Raises:
        StrategyError: If either is not a positive number.
    """

    def __init__(self, horizon_s: float = 1e6, processes: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0))
        self._processes = cores if processes is None else processes
        if self._processes < 1 or not 0.0 < horizon_s < np.inf:
            raise StrategyError(
                f"processes={processes}, horizon_s={horizon_s}; give at least 1 "
                f"process and a positive number of seconds"
            )
        self.horizon_s = horizon_s
        self._done: dict[Task, Episode] = {}
        self._best: dict[tuple[str, float], str] = {}

    def best(self, law: str, load: float = 1.0) -> str:
        """The constant that blocks least on the seeds of CHOSEN_ON."""
        key = (law, load)
        if key not in self._best:
            self._best[key] = _best(law, load, self.horizon_s)
        return self._best[key]

    def run(self, tasks: Iterable[Task], name: str) -> None:
        """Replay those that have not been, with a progress bar."""
        todo = [task for task in dict.fromkeys(tasks) if task not in self._done]
        # The dear ones first, so that no core is left with one at the end.
        todo.sort(key=lambda task: task.policy.startswith(_CHEAP))
        call = partial(_episode, horizon_s=self.horizon_s)
        bar = tqdm(total=len(todo), desc=name, disable=None)
        if self._processes == 1:
            for task in todo:
                self._done[task] = call(task)
                bar.update()
            return
        # Forked processes inherit locks of threads that they do not have.
        with ProcessPoolExecutor(
            self._processes, mp_context=get_context("spawn")
        ) as pool:
            pending = {pool.submit(call, task): task for task in todo}
            for future in as_completed(pending):
                self._done[pending[future]] = future.result()
                bar.update()

    def __getitem__(self, task: Task) -> Episode:
        """Of a task that was run."""
        return self._done[task]


def rows_of(best: str) -> list[Row]:
    """Lines of a law's table.

    Args:
        best: Name of its best constant.
    """
    fixed = ["para_max", "para_min", "min_feasible", "random"]
    fixed += [f"constant_{degree}" for degree in degrees()]
    return [
        *(Row(label=name, policy=name) for name in fixed),
        Row(label="best constant", policy=best),
        Row(label="rollout, law told", policy="rollout", told=True),
        Row(label="rollout", policy="rollout"),
        *(Row(label=name, policy=name) for name in _installed()),
    ]


def missing() -> list[str]:
    """Policies of the table that are not installed."""
    there = _installed()
    return [name for name in _LEARNED if name not in there]


def _installed() -> list[str]:
    known = [name for name in _LEARNED if name in PLANNERS]
    if known:
        # Takes seconds, and tells where the weights are.
        from policies.saved import shipped_folder

        if not (shipped_folder() / "config.json").is_file():
            return []
    return known


def tasks_of(
    rows: Sequence[Row], law: str, seeds: range, load: float = 1.0
) -> list[Task]:
    """What has to be run for rows of a law's table."""
    return [_task(row, law, seed, load) for row in rows for seed in seeds]


def compare(
    work: Work, rows: Sequence[Row], law: str, seeds: range, load: float = 1.0
) -> list[Comparison]:
    """Policies on one law, whose tasks and the best constant's have been run."""

    def rates(row: Row) -> NDArray[np.float64]:
        found = (_task(row, law, seed, load) for seed in seeds)
        return np.array([work[task].summary["blocking_rate"] for task in found])

    best = rates(Row(label="", policy=work.best(law, load)))
    made = []
    for row in rows:
        mine = rates(row)
        done = [work[_task(row, law, seed, load)] for seed in seeds]
        jct_s = np.array([one.summary["mean_jct_s"] for one in done])
        known = jct_s[~np.isnan(jct_s)]
        throughput = [one.summary["throughput_bytes_per_s"] for one in done]
        made.append(
            Comparison(
                row=row,
                law=law,
                blocking=estimate(mine.tolist()),
                against_best=estimate((mine - best).tolist()),
                relative=float((mine - best).mean() / max(best.mean(), 1e-12)),
                throughput_bytes_per_s=float(np.mean(throughput)),
                mean_jct_s=float(known.mean()) if len(known) else float("nan"),
                ms_per_decision=float(np.mean([one.ms_per_decision for one in done])),
            )
        )
    return made


def _task(row: Row, law: str, seed: int, load: float) -> Task:
    return Task(policy=row.policy, law=law, seed=seed, load=load, told=row.told)


def gains(compared: Sequence[Comparison]) -> dict[str, float]:
    """Relative difference to the best constant by label, mean over the laws."""
    by_label: dict[str, list[float]] = {}
    for one in compared:
        by_label.setdefault(one.row.label, []).append(one.relative)
    return {label: float(np.mean(values)) for label, values in by_label.items()}
