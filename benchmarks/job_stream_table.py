"""Policies of the job stream on the same traces: blocking rates with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from benchmarks.job_stream_replay import PLANNERS
from benchmarks.job_stream_work import Task, Work, degrees
from planner.errors import StrategyError

__all__ = [
    "Comparison",
    "Estimate",
    "Row",
    "check_seeds",
    "compare",
    "estimate",
    "gains",
    "missing",
    "rows_of",
    "tasks_of",
]

#: Seeds that are no test, and of what they are.
_RESERVED = (
    (range(3), "the published traces, which settings were chosen on"),
    (range(5000, 6000), "validation"),
)
#: Policies that learn and are in the table where they are installed.
_LEARNED = ("learned", "learned+lookahead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table.

    Attributes:
        label: Name in the table.
        policy: Name of the policy; for the best constant, of the one chosen.
        told: Whether it knows the law.
    """

    label: str
    policy: str
    told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: Mean over the seeds.
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
    """Read seeds written ``FIRST:COUNT``.

    Raises:
        StrategyError: If they are written otherwise, there are fewer than two, or one
            is a seed that policies are trained or chosen on.
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
    """Return the policies of the table that are not installed."""
    there = _installed()
    return [name for name in _LEARNED if name not in there]


def _installed() -> list[str]:
    known = [name for name in _LEARNED if name in PLANNERS]
    if known:
        # Imported here because it takes seconds.
        from policies.saved import shipped_folder

        if not (shipped_folder("job_stream") / "config.json").is_file():
            return []
    return known


def tasks_of(
    rows: Sequence[Row], law: str, seeds: range, load: float = 1.0
) -> list[Task]:
    """List the episodes to replay for rows of a law's table."""
    return [_task(row, law, seed, load) for row in rows for seed in seeds]


def compare(
    work: Work, rows: Sequence[Row], law: str, seeds: range, load: float = 1.0
) -> list[Comparison]:
    """Compare policies on one law, after their tasks have been run."""

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
