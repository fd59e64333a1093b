"""Published rows beside what the cost model says of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.calibration.cases import Case, prepare_all
from planner.calibration.judging.groups import doubtful_reason, group_of
from planner.calibration.judging.predictions import Prediction
from planner.calibration.metric_names import (
    MEMORY_METRICS,
    TIME_METRICS,
    time_metric_named,
)
from planner.calibration.metrics import time_metric
from planner.calibration.points import Point
from planner.cost import Cost
from planner.cost.constants import Calibration
from planner.errors import MeshwrightError

__all__ = ["predict_cases", "predict_points"]

_GB, _GIB = 1e9, float(2**30)
_PEAKS = frozenset({"peak_mem_gb", "peak_mem_gib"})
_FITS = frozenset({"oom_or_failed", "feasible"})


def predict_points(
    points: Sequence[Point], calibration: Calibration
) -> list[Prediction]:
    """Predict every row that says enough.

    Args:
        points: As read.
        calibration: Fitted constants.
    Returns:
        One a row, in order, ``predicted`` None where ``why`` says why; behind a row of
        peak memory, which fitted, one of metric ``feasible``.
    """
    cases, failed = prepare_all(points)
    return predict_cases(points, cases, failed, calibration)


def predict_cases(
    points: Sequence[Point],
    cases: Mapping[int, Case],
    failed: Mapping[int, str],
    calibration: Calibration,
    only: Iterable[int] | None = None,
) -> list[Prediction]:
    """The same of rows that are prepared.

    Args:
        points: As read.
        cases: By place in ``points``.
        failed: Why others have none.
        calibration: Fitted constants.
        only: Places to predict; all if None.
    """
    found: list[Prediction] = []
    for place in range(len(points)) if only is None else only:
        point, case = points[place], cases.get(place)
        one, fits = _predict(point, case, failed.get(place, ""), calibration)
        found.append(one)
        if point.metric in _PEAKS and fits is not None:
            found.append(
                replace(one, metric="feasible", measured=1.0, predicted=float(fits))
            )
    return found


def _predict(
    point: Point, case: Case | None, why: str, calibration: Calibration
) -> tuple[Prediction, bool | None]:
    """The row's prediction, and whether the run fits; None where that is not known."""
    cost: Cost | None = None
    if case is not None:
        try:
            cost = case.cost(calibration)
        except MeshwrightError as error:
            why = str(error)
        else:
            why = "; ".join(case.why)
    predicted = None
    metric, measured = point.metric, point.value
    if metric in _FITS:
        measured = 1.0 - point.value if metric == "oom_or_failed" else point.value
        metric = "feasible"
    if case is not None and cost is not None:
        predicted, more = _figure(point, case, cost)
        why = "; ".join(part for part in (why, more) if part)
    timed = time_metric_named(point.metric) is not None
    fits = None
    if cost is not None:
        fits = bool((cost.memory.total <= cost.limit_bytes).all())
    made = Prediction(
        point_id=point.point_id,
        source=point.source,
        group=group_of(point),
        metric=metric,
        measured=measured,
        predicted=predicted,
        why=why,
        step_s=cost.step_time_s if cost is not None and timed else None,
        measured_step_s=case.measured_step_s if case is not None else None,
        plan=_plan(case),
        device=case.device.name if case is not None else "",
        recipe=case.framework if case is not None else "",
        complete=point.complete,
        doubtful=doubtful_reason(point),
    )
    return made, fits


def _figure(point: Point, case: Case, cost: Cost) -> tuple[float | None, str]:
    """The row's metric, and what of it is assumed."""
    if time_metric_named(point.metric) is not None:
        return (
            time_metric(
                cost.step_time_s,
                point,
                case.setting.graph,
                case.strategy,
                case.device,
            ),
            "",
        )
    memory = cost.memory
    taken = memory.total
    if "nvidia-smi" not in point.notes.lower():
        # What allocators count: a context and communicators are beside it.
        taken = taken - memory.reserve
    if point.metric in _FITS:
        fits = bool((memory.total <= cost.limit_bytes).all())
        return float(fits), ""
    first = {
        "peak_mem_gb": (taken, _GIB if _counts_in_gib(point) else _GB),
        "peak_mem_gib": (taken, _GIB),
        "mem_params_opt_gib": (
            memory.parameters + memory.gradients + memory.optimizer,
            _GIB,
        ),
        "mem_activations_gib": (memory.activations, _GIB),
    }
    if point.metric not in first:
        known = ", ".join(sorted({**TIME_METRICS, **MEMORY_METRICS}))
        return (
            None,
            f"metric {point.metric!r} is not predicted; those that are: {known}",
        )
    size, unit = first[point.metric]
    return float(np.max(size) / unit), ""


def _counts_in_gib(point: Point) -> bool:
    """Alpa's scripts divide by ``GB = 1 << 30`` (benchmark/alpa/exp_intra_only.py)."""
    return "alpa" in point.source.lower()


def _plan(case: Case | None) -> str:
    if case is None:
        return ""
    strategy, mesh = case.strategy, case.strategy.mesh
    return (
        f"dp{mesh.data_parallel} tp{mesh.tp} pp{mesh.pp}x{strategy.virtual_stages} "
        f"cp{mesh.cp} ep{mesh.ep} zero{strategy.zero_stage} {strategy.schedule} "
        f"mb{strategy.microbatch_size} {strategy.stages[0].recompute}"
        f"{' sp' if strategy.sharding.sequence_parallel else ''}"
    )
