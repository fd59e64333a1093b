"""Ratios of two partitioners on the same worlds, with intervals, wins and losses.

A ratio is of the objective's value, so that below 1 is better. Only answers in time
count. Where one of two has none, the ratio is 2 or 1/2; where both have none, the
world is left out. Intervals are of the mean logarithm, by resampling worlds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.intervals import Estimate, bootstrap
from benchmarks.partitioner_solvers import ABLATIONS, Answer
from benchmarks.partitioner_worlds import Record

__all__ = [
    "TIE",
    "Comparison",
    "best_of",
    "common_solvers",
    "compare",
    "log_ratio",
    "mean_ratio",
    "value_of",
]

#: What no answer counts as against one, at least: it is no better than the worst answer
#: that anybody gave for that world.
_MISS = 2.0
#: Values that are closer than this are a tie.
TIE = 1e-3

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A solver against another on the same worlds.

    Attributes:
        ratio: Geometric mean of its values over the other's.
        wins: Worlds where it is better by more than 0.1 %.
        ties: Worlds where neither is.
        losses: Worlds where the other is.
        ratios: Of all worlds, the least first.
    """

    ratio: Estimate
    wins: int
    ties: int
    losses: int
    ratios: tuple[float, ...]

    @property
    def worst(self) -> float:
        """Largest ratio; NaN without worlds."""
        return self.ratios[-1] if self.ratios else math.nan

    @property
    def near_worst(self) -> float:
        """Least ratio that 99 % of the worlds do not exceed; NaN without worlds."""
        last = math.ceil(0.99 * len(self.ratios)) - 1
        return self.ratios[last] if self.ratios else math.nan


def value_of(answer: Answer | None) -> float | None:
    """The objective's value; None if the answer came late or not at all."""
    return None if answer is None or answer.late else answer.score


def best_of(record: Record, names: Sequence[str]) -> float | None:
    """Least value that any of these solvers has for a world; None if none has one."""
    found = [value_of(record.answers.get(name)) for name in names]
    return min((value for value in found if value is not None), default=None)


def log_ratio(
    mine: float | None, other: float | None, worst: float | None = None
) -> float:
    """Logarithm of mine over the other; NaN if there is neither.

    Args:
        mine: None for no answer in time.
        other: Likewise.
        worst: Worst answer of anybody, which no answer is no better than.
    """
    if mine is None and other is None:
        return math.nan
    if mine is not None and other is not None:
        return math.log(mine / other)
    known = mine if mine is not None else other
    missed = math.log(max(_MISS, (worst or 0.0) / (known or math.inf)))
    return missed if mine is None else -missed


def mean_ratio(logs: Array) -> Estimate:
    """Geometric mean of ratios with its interval.

    Args:
        logs: Logarithms. Shape [worlds].
    """
    mean = bootstrap(logs, np.mean)
    ends = (math.exp(end) for end in (mean.value, mean.low, mean.high))
    value, low, high = ends
    return Estimate(value=value, low=low, high=high)


def compare(
    mine: Sequence[float | None],
    other: Sequence[float | None],
    worst: Sequence[float | None] | None = None,
) -> Comparison:
    """Values of two solvers, world by world; None for no answer in time.

    Args:
        mine: Of one solver.
        other: Of the other.
        worst: Worst answers of anybody; not known if None.
    """
    ends = [None] * len(mine) if worst is None else worst
    logs = np.array([log_ratio(*row) for row in zip(mine, other, ends, strict=True)])
    logs = logs[~np.isnan(logs)]
    edge = math.log1p(TIE)
    wins, losses = int((logs < -edge).sum()), int((logs > edge).sum())
    return Comparison(
        ratio=mean_ratio(logs),
        wins=wins,
        ties=len(logs) - wins - losses,
        losses=losses,
        ratios=tuple(sorted(np.exp(logs).tolist())),
    )


def common_solvers(records: Sequence[Record]) -> list[str]:
    """That answered every one of the records, in order, no ablations."""
    first = list(records[0].answers) if records else []
    return [
        name
        for name in sorted(first, key=_place)
        if name not in ABLATIONS and all(name in r.answers for r in records)
    ]


def _place(name: str) -> tuple[bool, bool, str]:
    return name != "learned", name != "auto", name
