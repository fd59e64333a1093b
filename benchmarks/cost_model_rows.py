"""Measurements that are prepared once, then priced and fitted to many times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.calibration.judging.predictions import Prediction
from planner.calibration.points import Point
from planner.calibration.publish import fitted_places

__all__ = ["Rows", "fitted_places"]


class Rows:
    """Rows with their models, machines and plans.

    Args:
        points: As read.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        from planner.calibration.cases import prepare_all

        self._points = points
        self._cases, self._failed = prepare_all(points)
        self._fits: dict[tuple[int, ...], Any] = {}

    def predict(self, places: Sequence[int], calibration: Any) -> list[Prediction]:
        """Price rows under fitted constants."""
        from planner.calibration.predict import predict_cases

        return predict_cases(
            self._points, self._cases, self._failed, calibration, places
        )

    def fit(self, places: Sequence[int]) -> Any:
        """Constants of the runs among the rows; see fitted_places.

        The same rows are fitted to once: a source without a complete run leaves the fit
        to all rows as it is.
        """
        from planner.calibration.fit import fit

        known = tuple(place for place in places if place in self._cases)
        if known not in self._fits:
            cases = [self._cases[place] for place in known]
            # Of all rows first: fits that leave some out take its derivatives.
            self._fits[known] = fit(cases, start=self._whole(known))
        return self._fits[known].calibration

    def _whole(self, known: tuple[int, ...]) -> Any:
        """The fit to all rows, unless it is that which is asked for."""
        every = tuple(p for p in fitted_places(self._points) if p in self._cases)
        if known == every or not set(known) <= set(every):
            return None
        self.fit(every)
        return self._fits[every]

    def shipped(self) -> Any:
        """The constants that a user has who fits nothing."""
        from planner.calibration.store import shipped

        return shipped()

    def device(self, place: int) -> str:
        """Name of the device type, or the source's words where there is no case."""
        if place not in self._cases:
            return self._points[place].gpu
        return str(self._cases[place].device.name)

    def flops_per_step(self, place: int) -> float | None:
        """Model FLOPs of a step, for the floors: no recomputation, causal attention."""
        from planner.calibration.metrics import FlopCount

        batch = self._points[place].global_batch
        if place not in self._cases or batch is None:
            return None
        graph = self._cases[place].setting.graph
        return float(FlopCount(attention=0.5).of(graph, batch, "none"))

    def peak_flops_per_s(self, place: int) -> float | None:
        """Peak of one device in the dtype of the row's products."""
        from planner.cost.kernels.low_precision import peak_flops_per_s

        if place not in self._cases:
            return None
        case = self._cases[place]
        return float(peak_flops_per_s(case.device, case.setting.precision.compute))
