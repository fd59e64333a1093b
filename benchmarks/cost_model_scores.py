"""Predictions beside measurements: errors, order of plans, regret and memory.

Times are judged as seconds of a step, whatever the metric, and each run counts once. A
run is a (source, point_id); the figures of one run are one step seen several ways.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.intervals import Estimate, bootstrap
from planner.measurements.metrics import time_metric_named

__all__ = [
    "Coverage",
    "GroupOfPlans",
    "MemoryScores",
    "Prediction",
    "RankScores",
    "RegretScores",
    "Run",
    "TimeScores",
    "coverage",
    "family_of",
    "groups_of_plans",
    "judged",
    "memory_scores",
    "rank_scores",
    "regret",
    "runs_of",
    "spearman",
    "time_rank",
    "time_scores",
]

_PEAK = ("peak_mem_gb", "peak_mem_gib")
_FITS = ("feasible", "oom_or_failed")
_PARTS = ("mem_params_opt_gib", "mem_activations_gib")
#: Distinct plans that a group needs, and those from which one is held to a minimum.
_LEAST, _LARGE = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One measurement and what the cost model predicts of it.

    Attributes:
        point_id: Id of the row.
        source: Source of the row.
        group: Rows that can be compared; see ``group_of``.
        metric: Metric of the row; ``feasible`` for a run that ran out of memory.
        measured: Measured value, in units of the metric.
        predicted: Predicted value; None if there is none.
        why: Assumptions, or the reason why there is no prediction.
        step_s: Predicted seconds of a step; None for rows of memory, or if it cannot
            be.
        measured_step_s: The measured figure as seconds of a step; None likewise.
        plan: Text that says the plan, equal for equal plans.
        device: Name of the device type that the prediction is for.
        recipe: Name of the framework's constants.
        complete: Whether shape, machine and plan are all in the row.
        doubtful: Reason why the row is left out of scores; "" if it is not.
    """

    point_id: str
    source: str
    group: str
    metric: str
    measured: float
    predicted: float | None
    why: str
    step_s: float | None
    measured_step_s: float | None
    plan: str
    device: str
    recipe: str
    complete: bool
    doubtful: str


def family_of(source: str) -> str:
    """Return a source without words that hold digits: its family of releases.

    A vendor's table of this month repeats rows of the last; leaving out one of them
    would leave the same run in the fit.
    """
    kept = [word for word in source.split() if not re.search(r"\d", word)]
    return " ".join(kept) or source


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run's step.

    Attributes:
        point_id: Id of its rows; likewise source, group, plan and device.
        measured_s: Seconds of a step.
        step_s: Predicted seconds; None if there are none.
    """

    point_id: str
    source: str
    group: str
    plan: str
    device: str
    measured_s: float
    step_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeScores:
    """Errors of step time as fractions: 0.1 is 10 %.

    Attributes:
        runs: Number of runs that were scored.
        unpredicted: Runs of a time metric whose step was not predicted.
        mape: Mean absolute error; likewise median.
        bias: Mean signed error; positive where predictions are slower.
        worst: Largest absolute error; NaN without runs.
        worst_point: Whose it is.
    """

    runs: int
    unpredicted: int
    mape: Estimate
    median: Estimate
    bias: Estimate
    worst: float
    worst_point: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryScores:
    """Errors of memory and of what fits, as fractions.

    Attributes:
        peaks: Number of rows of peak memory that were scored.
        peak: Their mean absolute error.
        bias: Their mean signed error.
        worst: Their largest absolute error; NaN without rows.
        worst_point: Whose it is.
        parts: Rows of a part of memory (parameters, activations) that were scored.
        part: Their mean absolute error.
        ran_out: Runs that did not fit and whose fit was predicted.
        found: Share of them that was predicted infeasible.
        ran: Runs that fitted and whose fit was predicted.
        refused: Share of them that was predicted infeasible.
    """

    peaks: int
    peak: Estimate
    bias: Estimate
    worst: float
    worst_point: str
    parts: int
    part: Estimate
    ran_out: int
    found: Estimate
    ran: int
    refused: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Numbers of rows with and without a prediction.

    Attributes:
        complete: Rows that give shape, machine and plan.
        complete_predicted: Those of them that were predicted.
        others: Rows that do not.
        others_predicted: Likewise.
        doubtful: Rows that are left out of scores.
    """

    complete: int
    complete_predicted: int
    others: int
    others_predicted: int
    doubtful: int


def judged(
    predictions: Sequence[Prediction], *, complete: bool = True
) -> tuple[Prediction, ...]:
    """Return the rows that scores look at: not doubtful and, if asked for, complete."""
    return tuple(
        p for p in predictions if not p.doubtful and (p.complete or not complete)
    )


def coverage(predictions: Sequence[Prediction]) -> Coverage:
    """Count the rows that were predicted, doubtful ones included.

    A prediction of ``feasible`` beside others of its run is no row of its own.
    """
    others = {(p.source, p.point_id) for p in predictions if p.metric != "feasible"}
    rows = [
        p
        for p in predictions
        if p.metric != "feasible" or (p.source, p.point_id) not in others
    ]
    whole = [p for p in rows if p.complete]
    rest = [p for p in rows if not p.complete]
    return Coverage(
        complete=len(whole),
        complete_predicted=sum(p.predicted is not None for p in whole),
        others=len(rest),
        others_predicted=sum(p.predicted is not None for p in rest),
        doubtful=sum(bool(p.doubtful) for p in rows),
    )


def time_rank(name: str) -> int | None:
    """Return the rank among a run's figures; None where no run is judged by it."""
    found = time_metric_named(name)
    return None if found is None else found.rank


def runs_of(
    predictions: Sequence[Prediction], *, complete: bool = True
) -> tuple[Run, ...]:
    """Return the runs whose step was measured, each once.

    Among a run's figures the first that was predicted speaks: seconds of a step,
    samples per second, tokens per second, MFU, FLOP/s, days; else the first measured.

    Args:
        predictions: Of any metrics; those without a measured step are passed over.
        complete: Whether rows that lack a part of the plan are left out.
    """
    chosen: dict[tuple[str, str], tuple[tuple[bool, int], Prediction]] = {}
    for one in judged(predictions, complete=complete):
        rank = time_rank(one.metric)
        if rank is None or not one.measured_step_s:
            continue
        order = (one.step_s is None, rank)
        key = (one.source, one.point_id)
        if key not in chosen or order < chosen[key][0]:
            chosen[key] = (order, one)
    return tuple(
        Run(
            point_id=one.point_id,
            source=one.source,
            group=one.group,
            plan=one.plan,
            device=one.device,
            measured_s=one.measured_step_s or math.nan,
            step_s=one.step_s,
        )
        for _, one in chosen.values()
    )


def _strata(sources: Sequence[str]) -> NDArray[np.int64]:
    return np.unique(np.array(sources, dtype=str), return_inverse=True)[1].astype(
        np.int64
    )


def _worst(
    errors: NDArray[np.float64], rows: Sequence[Run] | Sequence[Prediction]
) -> tuple[float, str]:
    if not rows:
        return math.nan, ""
    at = int(np.argmax(np.abs(errors)))
    return float(abs(errors[at])), f"{rows[at].source}, point {rows[at].point_id}"


def _relative(
    predicted: Sequence[float | None], measured: Sequence[float]
) -> NDArray[np.float64]:
    errors: NDArray[np.float64] = np.array(predicted, dtype=float)
    errors /= np.array(measured, dtype=float)
    errors -= 1
    return errors


def time_scores(
    predictions: Sequence[Prediction], *, complete: bool = True
) -> TimeScores:
    """Score step times; intervals resample runs within their source.

    error = predicted / measured - 1, over runs
    """
    runs = runs_of(predictions, complete=complete)
    known = [run for run in runs if run.step_s is not None]
    # A rate of a row that is not understood cannot even be turned into a step.
    timed = {
        (one.source, one.point_id)
        for one in judged(predictions, complete=complete)
        if time_rank(one.metric) is not None
    }
    errors = _relative([r.step_s for r in known], [r.measured_s for r in known])
    strata = _strata([run.source for run in known])
    worst, whose = _worst(errors, known)
    return TimeScores(
        runs=len(known),
        unpredicted=len(timed) - len(known),
        mape=bootstrap(np.abs(errors), np.mean, strata=strata),
        median=bootstrap(np.abs(errors), np.median, strata=strata),
        bias=bootstrap(errors, np.mean, strata=strata),
        worst=worst,
        worst_point=whose,
    )


def memory_scores(
    predictions: Sequence[Prediction], *, complete: bool = True
) -> MemoryScores:
    """Score memory, and runs called infeasible among those that ran and did not.

    A row of ``feasible`` says whether it ran by its measured value, one of
    ``oom_or_failed`` by the opposite, and the prediction likewise; each run counts
    once. Intervals resample rows within their source.
    """
    rows = [
        p for p in judged(predictions, complete=complete) if p.predicted is not None
    ]
    peaks = [p for p in rows if p.metric in _PEAK and p.measured > 0]
    parts = [p for p in rows if p.metric in _PARTS and p.measured > 0]
    errors, of_parts = (
        _relative([p.predicted for p in some], [p.measured for p in some])
        for some in (peaks, parts)
    )
    fits = list({(p.source, p.point_id): p for p in rows if p.metric in _FITS}.values())
    flipped = np.array([p.metric == "oom_or_failed" for p in fits], dtype=bool)
    ran = (np.array([p.measured for p in fits]) > 0.5) != flipped
    refused = (np.array([p.predicted for p in fits], dtype=float) > 0.5) == flipped
    strata = _strata([p.source for p in fits])
    worst, whose = _worst(errors, peaks)
    own = _strata([p.source for p in peaks])
    return MemoryScores(
        peaks=len(peaks),
        peak=bootstrap(np.abs(errors), np.mean, strata=own),
        bias=bootstrap(errors, np.mean, strata=own),
        worst=worst,
        worst_point=whose,
        parts=len(parts),
        part=bootstrap(
            np.abs(of_parts), np.mean, strata=_strata([p.source for p in parts])
        ),
        ran_out=int(np.sum(~ran)),
        found=bootstrap(refused[~ran].astype(float), np.mean, strata=strata[~ran]),
        ran=int(np.sum(ran)),
        refused=bootstrap(refused[ran].astype(float), np.mean, strata=strata[ran]),
    )


# -- Order of plans --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOfPlans:
    """Plans of one model on one machine at one batch.

    Attributes:
        group: Rows that can be compared; see ``group_of``.
        source: Source of the rows.
        plans: Number of plans.
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
    """Rank correlations within groups.

    Attributes:
        groups: Groups of at least 4 plans.
        mean: Mean of their correlations; the interval resamples groups.
        large: Number of groups that have at least 8 plans.
        smallest: Smallest correlation of those; NaN without any.
        smallest_group: Group of that correlation.
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
        groups: Groups of at least 4 plans.
        mean: Mean of their regrets; the interval resamples groups.
        worst: Largest regret; NaN without any.
        worst_group: Group of that regret.
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
    """Return the rank correlation: Pearson's of ranks, equal values sharing theirs.

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
    """Return the groups that have at least so many plans of different measured times.

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
    """Score the rank correlation of predicted and measured step time within groups."""
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
    """Score how much slower the plan predicted fastest is than the fastest."""
    groups = groups_of_plans(predictions, complete=complete)
    worst = max(groups, key=lambda group: group.regret, default=None)
    return RegretScores(
        groups=groups,
        mean=bootstrap(np.array([g.regret for g in groups], dtype=float), np.mean),
        worst=math.nan if worst is None else worst.regret,
        worst_group="" if worst is None else worst.group,
    )
