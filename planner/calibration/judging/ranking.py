"""Whether predictions put plans in the right order, and what picking by them costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.calibration.judging.intervals import Estimate, bootstrap
from planner.calibration.judging.predictions import Prediction
from planner.calibration.judging.scores import runs_of

__all__ = [
    "GroupOfPlans",
    "RankScores",
    "RegretScores",
    "groups_of_plans",
    "rank_scores",
    "regret",
    "spearman",
]

#: Distinct plans that a group needs, and those from which one is held to a minimum.
_LEAST, _LARGE = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOfPlans:
    """Plans of one model on one machine at one batch.

    Attributes:
        group: See ``group_of``.
        source: Who measured it.
        plans: How many.
        correlation: Spearman's, of predicted and measured time; 0 where all
            predictions are equal, which puts nothing in order.
        regret: Measured time of the plan that is predicted fastest over that of the
            fastest, less 1; the mean over plans that share the first place.
    """

    group: str
    source: str
    plans: int
    correlation: float
    regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankScores:
    """Order within groups.

    Attributes:
        groups: Of at least 4 plans.
        mean: Of their correlations; the interval resamples groups.
        large: How many have at least 8 plans.
        smallest: Smallest correlation of those; NaN without any.
        smallest_group: Whose it is.
    """

    groups: tuple[GroupOfPlans, ...]
    mean: Estimate
    large: int
    smallest: float
    smallest_group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretScores:
    """Cost of picking by predictions, as fractions.

    Attributes:
        groups: Of at least 4 plans.
        mean: Of their regrets; the interval resamples groups.
        worst: Largest; NaN without any.
        worst_group: Whose it is.
    """

    groups: tuple[GroupOfPlans, ...]
    mean: Estimate
    worst: float
    worst_group: str


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    # Those that are equal share the mean of their places.
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return last[place]


def spearman(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Rank correlation: Pearson's of the ranks, equal values sharing their mean rank.

    Args:
        one: Shape [n].
        other: Shape [n].
    Returns:
        -1 to 1; 0 where all values of one side are equal.
    Source: Spearman 1904, "The Proof and Measurement of Association".
    """
    if len(one) < 2:
        return 0.0
    a, b = (_ranks(np.asarray(side, dtype=float)) for side in (one, other))
    a, b = a - a.mean(), b - b.mean()
    spread = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / spread if spread else 0.0


def groups_of_plans(
    predictions: Sequence[Prediction], *, least: int = _LEAST, complete: bool = True
) -> tuple[GroupOfPlans, ...]:
    """Groups that have at least so many plans of different measured times.

    A plan that was measured several times counts once, by its mean times.
    """
    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    sources = {}
    for run in runs_of(predictions, complete=complete):
        if run.step_s is not None:
            found[run.group][run.plan].append((run.measured_s, run.step_s))
            sources[run.group] = run.source
    scored = []
    for group, plans in found.items():
        times = np.array([np.mean(times, axis=0) for times in plans.values()])
        measured, predicted = times[:, 0], times[:, 1]
        if len(np.unique(measured)) < least:
            continue
        first = predicted == predicted.min()
        scored.append(
            GroupOfPlans(
                group=group,
                source=sources[group],
                plans=len(times),
                correlation=spearman(predicted, measured),
                regret=float(measured[first].mean() / measured.min() - 1),
            )
        )
    return tuple(scored)


def rank_scores(
    predictions: Sequence[Prediction], *, complete: bool = True
) -> RankScores:
    """Rank correlation of predicted and measured step time within groups."""
    groups = groups_of_plans(predictions, complete=complete)
    large = [group for group in groups if group.plans >= _LARGE]
    least = min(large, key=lambda group: group.correlation, default=None)
    return RankScores(
        groups=groups,
        mean=bootstrap(np.array([g.correlation for g in groups], dtype=float), np.mean),
        large=len(large),
        smallest=math.nan if least is None else least.correlation,
        smallest_group="" if least is None else least.group,
    )


def regret(predictions: Sequence[Prediction], *, complete: bool = True) -> RegretScores:
    """How much slower the plan predicted fastest is than the fastest, within groups."""
    groups = groups_of_plans(predictions, complete=complete)
    worst = max(groups, key=lambda group: group.regret, default=None)
    return RegretScores(
        groups=groups,
        mean=bootstrap(np.array([g.regret for g in groups], dtype=float), np.mean),
        worst=math.nan if worst is None else worst.regret,
        worst_group="" if worst is None else worst.group,
    )
