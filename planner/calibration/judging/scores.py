"""How far predictions are from measurements: error, order, regret, memory.

Times are judged as seconds of a step, whatever the metric, and each run counts once. A
run is a (source, point_id); the figures of one run are one step seen several ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.calibration.judging.intervals import Estimate, bootstrap
from planner.calibration.judging.predictions import Prediction
from planner.calibration.metric_names import time_rank

__all__ = [
    "Coverage",
    "MemoryScores",
    "Run",
    "TimeScores",
    "coverage",
    "judged",
    "memory_scores",
    "runs_of",
    "time_scores",
]

_PEAK = ("peak_mem_gb", "peak_mem_gib")
_FITS = ("feasible", "oom_or_failed")
_PARTS = ("mem_params_opt_gib", "mem_activations_gib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run's step.

    Attributes:
        point_id: Of its rows; likewise source, group, plan and device.
        measured_s: Seconds of a step.
        step_s: Predicted; None if it cannot be.
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
        runs: That were scored.
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
        peaks: Rows of peak memory that were scored.
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
    """How many rows there is a prediction for.

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
    """The rows that scores look at: not doubtful and, if asked for, complete."""
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


def runs_of(
    predictions: Sequence[Prediction], *, complete: bool = True
) -> tuple[Run, ...]:
    """Runs whose step was measured, each once.

    Of a run's figures the first that was predicted speaks: seconds of a step, samples
    per second, tokens per second, MFU, FLOP/s, days; else the first measured.

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
    """Errors of step time; intervals resample runs within their source.

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
    """Errors of memory; shares of runs called infeasible, of those that ran and not.

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
