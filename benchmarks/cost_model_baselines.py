"""Baselines that a prediction must beat: one constant MFU, and the bubble alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.cost_model_scores import Prediction, family_of, runs_of
from planner.errors import CalibrationError
from planner.measurements.metrics import time_metric_named
from planner.measurements.points import Point

__all__ = ["Figure", "Fit", "bubble_only", "constant_mfu"]

#: Runs that a baseline's one constant comes from: the source's own, those of all other
#: families of sources, or those of all other devices.
Fit = Literal["fitted", "source", "device"]
#: A figure of a row; None where it is not known.
Figure = Callable[[Point], float | None]


def constant_mfu(
    predictions: Sequence[Prediction],
    points: Sequence[Point],
    *,
    flops_per_step: Figure,
    peak_flops_per_s: Figure,
    fit: Fit = "fitted",
) -> tuple[Prediction, ...]:
    """Predict by one constant MFU.

    t = flops / (n_gpus * peak * mfu), mfu being that of the least mean error over the
    runs of the fit

    Args:
        predictions: Predictions to replace; measured steps are taken from them.
        points: Their rows, in any order.
        flops_per_step: Model FLOPs of a whole step of a row.
        peak_flops_per_s: Peak of one device in the row's precision.
        fit: Where the MFU comes from.
    Raises:
        CalibrationError: If a prediction is of no point.
    """

    def ideal_s(point: Point) -> float:
        flops, peak = flops_per_step(point), peak_flops_per_s(point)
        return flops / (point.n_gpus * peak) if flops and peak else math.nan

    return _scaled(predictions, points, ideal_s, fit, "one constant MFU")


def bubble_only(
    predictions: Sequence[Prediction],
    points: Sequence[Point],
    *,
    flops_per_step: Figure,
    peak_flops_per_s: Figure,
    fit: Fit = "fitted",
) -> tuple[Prediction, ...]:
    """Predict by the pipeline's bubble alone, compute being divided perfectly.

    t = flops / (n_gpus * peak * efficiency) * (m + pp - 1) / m, m microbatches of a
    pipeline, the efficiency being that of the least mean error over the runs of the fit

    Args and errors: Those of constant_mfu.
    """

    def ideal_s(point: Point) -> float:
        flops, peak = flops_per_step(point), peak_flops_per_s(point)
        batch, size, pp = point.global_batch, point.microbatch, point.pp
        if not (flops and peak and batch and size and pp):
            return math.nan
        copies = max(1, point.n_gpus // ((point.tp or 1) * pp * (point.cp or 1)))
        m = batch / (copies * size)
        return flops / (point.n_gpus * peak) * (m + pp - 1) / m

    return _scaled(predictions, points, ideal_s, fit, "the bubble alone")


def _scaled(
    predictions: Sequence[Prediction],
    points: Sequence[Point],
    ideal_s: Callable[[Point], float],
    fit: Fit,
    what: str,
) -> tuple[Prediction, ...]:
    rows = {(point.source, point.point_id): point for point in points}
    for one in predictions:
        if (one.source, one.point_id) not in rows:
            raise CalibrationError(
                f"no point {one.point_id!r} of {one.source!r} among {len(points)}; "
                f"give the points that were predicted"
            )
    ideal = {key: ideal_s(point) for key, point in rows.items()}
    constants = _constants(predictions, ideal, fit)
    found = []
    for one in predictions:
        key = (one.source, one.point_id)
        step = ideal[key] / constants.get(_label(one, fit), math.nan)
        if math.isnan(step) or one.measured_step_s is None:
            found.append(replace(one, step_s=None, predicted=None, why=f"{what}: no"))
            continue
        ratio = step / one.measured_step_s
        metric = time_metric_named(one.metric)
        if metric is None or not metric.lasts:
            ratio = 1 / ratio
        found.append(
            replace(one, step_s=step, predicted=one.measured * ratio, why=what)
        )
    return tuple(found)


def _label(one: Prediction, fit: Fit) -> str:
    if fit == "fitted":
        return one.source
    return family_of(one.source) if fit == "source" else one.device


def _constants(
    predictions: Sequence[Prediction], ideal: dict[tuple[str, str], float], fit: Fit
) -> dict[str, float]:
    # Measured steps alone count, so gaps of the model play no part.
    known = {(p.source, p.point_id): p for p in predictions}
    runs = runs_of(predictions)
    labels = np.array([_label(known[r.source, r.point_id], fit) for r in runs], str)
    measured = np.array([run.measured_s for run in runs], dtype=float)
    shares: NDArray[np.float64] = (
        np.array([ideal[run.source, run.point_id] for run in runs], dtype=float)
        / measured
    )
    constants = {}
    for label in {_label(one, fit) for one in predictions}:
        own = labels == label
        used = shares[own if fit == "fitted" else ~own]
        used = used[~np.isnan(used)]
        if len(used):
            constants[label] = _best(used)
    return constants


def _best(shares: NDArray[np.float64]) -> float:
    # mean |share / c - 1| is least at the median of shares weighted by themselves.
    ordered = np.sort(shares)
    total = np.cumsum(ordered)
    return float(ordered[np.searchsorted(total, total[-1] / 2)])
