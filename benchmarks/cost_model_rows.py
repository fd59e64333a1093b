"""Measurements that are prepared once, then predicted and fitted to many times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.cost_model_scores import Prediction
from benchmarks.publish_constants import fitted_places
from planner.calibration.fit import fit
from planner.calibration.rows import doubtful_reason, group_of
from planner.cost import Cost
from planner.cost.constants import Calibration
from planner.cost.kernels.low_precision import peak_flops_per_s
from planner.errors import MeshwrightError
from planner.measurements.cases import Case, prepare_all
from planner.measurements.metrics import (
    MEMORY_METRICS,
    TIME_METRICS,
    FlopCount,
    time_metric,
    time_metric_named,
)
from planner.measurements.points import Point
from planner.measurements.store import shipped

__all__ = ["Rows", "predict_cases", "predict_points"]


class Rows:
    """Rows with their models, machines and plans.

    Args:
        points: Rows as read.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._cases, self._failed = prepare_all(points)
        self._fits: dict[tuple[int, ...], Any] = {}

    def predict(self, places: Sequence[int], calibration: Any) -> list[Prediction]:
        """Predict rows under fitted constants."""
        return predict_cases(
            self._points, self._cases, self._failed, calibration, places
        )

    def fit(self, places: Sequence[int]) -> Any:
        """Fit constants to the runs among the rows; see fitted_places.

        The same rows are fitted to once: a source without a complete run leaves the fit
        to all rows as it is.
        """
        known = tuple(place for place in places if place in self._cases)
        if known not in self._fits:
            cases = [self._cases[place] for place in known]
            # Of all rows first: fits that leave some out take its derivatives.
            self._fits[known] = fit(cases, start=self._whole(known))
        return self._fits[known].calibration

    def _whole(self, known: tuple[int, ...]) -> Any:
        """Return the fit to all rows, unless it is that which is asked for."""
        every = tuple(p for p in fitted_places(self._points) if p in self._cases)
        if known == every or not set(known) <= set(every):
            return None
        self.fit(every)
        return self._fits[every]

    def shipped(self) -> Any:
        """Return the constants that a user has who fits nothing."""
        return shipped()

    def case(self, place: int) -> Case | None:
        """Return the case of a row; None where it says too little."""
        return self._cases.get(place)

    def device(self, place: int) -> str:
        """Return the device type, or the source's words where there is no case."""
        if place not in self._cases:
            return self._points[place].gpu
        return str(self._cases[place].device.name)

    def flops_per_step(self, place: int) -> float | None:
        """Return the model FLOPs of a step, without recomputation, attention causal."""
        batch = self._points[place].global_batch
        if place not in self._cases or batch is None:
            return None
        graph = self._cases[place].setting.graph
        return float(FlopCount(attention=0.5).of(graph, batch, "none"))

    def peak_flops_per_s(self, place: int) -> float | None:
        """Return the peak of one device in the dtype of the row's products."""
        if place not in self._cases:
            return None
        case = self._cases[place]
        return float(peak_flops_per_s(case.device, case.setting.precision.compute))


# -- Predictions -----------------------------------------------------------------

_GB, _GIB = 1e9, float(2**30)
_PEAKS = frozenset({"peak_mem_gb", "peak_mem_gib"})
_FITS = frozenset({"oom_or_failed", "feasible"})


def predict_points(
    points: Sequence[Point], calibration: Calibration
) -> list[Prediction]:
    """Predict every row that says enough.

    Args:
        points: Rows as read.
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
    """Predict rows that are prepared.

    Args:
        points: Rows as read.
        cases: Cases by place in ``points``.
        failed: Reasons why others have none.
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
    """Return the prediction, and whether the run fits; None where unknown."""
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
    """Return the row's metric, and what of it is assumed."""
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
        taken = (taken - memory.reserve) * (1 + case.setting.recipe.reserved)
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
    """Say if a row's GB are GiB, as Alpa's are (GB = 1 << 30, exp_intra_only.py)."""
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
