"""Fitting constants to measured steps: damped Gauss-Newton on logarithms.

The loss, over runs i of devices d and frameworks f, is

    sum_i w_i huber(log t_i(c) - log T_i)  +  (c - start)' C^-1 (c - start)

where t is the predicted and T the measured time of a step, c the logits of the
constants, and w makes a source of many runs count as much as the root of their number.
C lets a constant differ between devices (or frameworks) by ``spread``, and lie away
from its start on all of them by ``shared``: a deviation that many devices show is
expected of the others, too.
Runs of one group (same model, machines and batch) are also compared with their mean,
because a planner needs their order. A run depends on the constants of its own device
and framework alone, so that one evaluation of all runs gives the derivative for one
constant of every device at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.calibration.parameters import Vector, recipe_constants
from planner.calibration.rows import group_of
from planner.cost.constants import Calibration
from planner.errors import CalibrationError
from planner.measurements.cases import Case
from planner.measurements.catalogues import fitted_constants
from planner.measurements.kernels import measured_devices

__all__ = ["FitConfig", "FitResult", "fit"]

Array = NDArray[np.float64]
Times = Callable[[Calibration], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Settings of a fit.

    The published rows chose these, before kernels were taken from measured tables.

    Attributes:
        iterations: Most iterations.
        tolerance: A fit ends where no constant moves by more, in logits, or where the
            loss falls by less than a thousandth of this share.
        huber: Errors beyond this, as logarithms, count linearly.
        prior: Weight of the pull to the starting values.
        order: Weight of a run's deviation from its group, beside its own error.
        step: Step of the difference quotients, in logits.
        free_kernels: Whether runs decide of the speed of kernels that were measured by
            themselves; else of those of other devices alone.
    """

    iterations: int = 20
    tolerance: float = 0.1
    huber: float = 0.04
    prior: float = 0.0007
    order: float = 0.5
    step: float = 0.05
    free_kernels: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """Result of a fit.

    Attributes:
        calibration: The constants.
        vector: Names of the constants.
        places: Their logits. Shape [vector.size].
        loss: Loss after each iteration.
        slopes: Derivative of each run's error for the constants of its device, then of
            its framework, by source and point id. Shape [constants] each.
    """

    calibration: Calibration
    vector: Vector
    places: Array
    loss: tuple[float, ...] = ()
    slopes: Mapping[tuple[str, str], Array] = field(default_factory=dict)


def fit(
    cases: Sequence[Case],
    config: FitConfig | None = None,
    *,
    start: FitResult | None = None,
    towards: Calibration | None = None,
    name: str = "fit",
    watch: Callable[[int, float], None] | None = None,
) -> FitResult:
    """Fit constants of all devices and frameworks of some runs.

    Args:
        cases: Runs whose step was measured.
        config: Settings.
        start: An earlier fit to begin from; what it lacks begins anew. Its derivatives
            are taken as they were where it has those of all runs, which is what makes
            fits that leave out a source cheap: they end in the same place.
        towards: Constants that the fit is pulled to instead of the starting values,
            and begins at; those of few runs are corrections to what many have shown.
        name: Name of the calibration.
        watch: Called with each iteration and its loss.
    Raises:
        CalibrationError: If no run has a measured step.
    """
    how = config or FitConfig()
    runs = list(_runs(cases))
    if not runs:
        raise CalibrationError(
            f"none of {len(cases)} measurements is the time of a step that can be "
            f"predicted; give iter_time_s, tokens_per_s_per_gpu or tflops_per_gpu rows"
        )
    problem = _Problem.of(runs, how, towards)
    places = _begin(problem.vector, problem.centre, start)
    losses: list[float] = []
    damping = 1e-2
    slope = np.zeros((len(runs), problem.vector.size))
    errors = problem.errors(places)
    loss = problem.loss(errors, places)
    kept = problem.known_slope(start)
    for iteration in range(how.iterations):
        slope = problem.slope(errors, places) if kept is None else kept
        for _ in range(6):
            moved = places + problem.step(errors, slope, places, damping)
            tried = problem.errors(moved)
            better = problem.loss(tried, moved)
            if better < loss:
                break
            damping *= 6
        else:
            break
        far = float(np.abs(moved - places).max())
        gained = (loss - better) / loss
        places, errors, loss = moved, tried, better
        damping = max(damping / 4, 1e-5)
        losses.append(loss)
        if watch is not None:
            watch(iteration, loss)
        if far < how.tolerance or gained < how.tolerance / 1e3:
            break
    return FitResult(
        calibration=problem.vector.calibration(places, name),
        vector=problem.vector,
        places=places,
        loss=tuple(losses),
        slopes=problem.slopes(slope),
    )


def _runs(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield the first row of each run whose step was measured."""
    seen = set()
    for case in cases:
        key = (case.point.source, case.point.point_id)
        if case.measured_step_s is not None and key not in seen:
            seen.add(key)
            yield case


def _centre(vector: Vector, towards: Calibration | None) -> Array:
    """Return the logits that the fit is pulled to. Shape [vector.size]."""
    places = vector.start()
    if towards is None:
        return places
    for index, (kind, of, constant) in enumerate(vector.columns()):
        known = (
            towards.recipes.get(of)
            if kind == "recipe"
            else towards.devices.get(of, towards.default)
        )
        if known is not None:
            places[index] = constant.to_logit(getattr(known, constant.name))
    return places


def _begin(vector: Vector, centre: Array, start: FitResult | None) -> Array:
    places = centre.copy()
    if start is None:
        return places
    known = {
        (kind, of, constant.name): place
        for (kind, of, constant), place in zip(
            start.vector.columns(), start.places, strict=True
        )
    }
    for index, (kind, of, constant) in enumerate(vector.columns()):
        places[index] = known.get((kind, of, constant.name), places[index])
    return places


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """Runs and their weights.

    Attributes:
        mixing: Rows of errors and of deviations from groups. Shape [rows, runs].
        uses: Place in the vector of each run's constants. Shape [runs, constants].
        centre: Logits that the fit is pulled to. Shape [vector.size].
    """

    cases: Sequence[Case]
    vector: Vector
    measured: Array
    mixing: Array
    uses: NDArray[np.int64]
    centre: Array
    config: FitConfig

    @classmethod
    def of(
        cls, cases: Sequence[Case], config: FitConfig, towards: Calibration | None
    ) -> _Problem:
        """Return the problem of runs whose step was measured."""
        devices = tuple(sorted({case.device.name for case in cases}))
        recipes = tuple(sorted({case.framework for case in cases}))
        many = len(fitted_constants("device"))
        few = len(recipe_constants(recipes[0]))
        uses = np.array(
            [
                [
                    *(devices.index(case.device.name) * many + np.arange(many)),
                    *(
                        len(devices) * many
                        + recipes.index(case.framework) * few
                        + np.arange(few)
                    ),
                ]
                for case in cases
            ]
        )
        vector = Vector(devices=devices, recipes=recipes)
        return cls(
            cases=cases,
            vector=vector,
            measured=np.log([case.measured_step_s or np.nan for case in cases]),
            mixing=_mixing(cases, config.order),
            uses=uses,
            centre=_centre(vector, towards),
            config=config,
        )

    def errors(self, places: Array) -> Array:
        """Return the logarithms of predicted over measured. Shape [runs]."""
        calibration = self.vector.calibration(places, "trial")
        found = [case.step_s(calibration) for case in self.cases]
        return np.asarray(np.log(found) - self.measured)

    def slope(self, errors: Array, places: Array) -> Array:
        """Return the derivative of every error. Shape [runs, vector.size]."""
        slope = np.zeros((len(errors), self.vector.size))
        rows = np.arange(len(errors))
        for column in range(self.uses.shape[1]):
            moved = places.copy()
            moved[np.unique(self.uses[:, column])] += self.config.step
            change = (self.errors(moved) - errors) / self.config.step
            slope[rows, self.uses[:, column]] = change
        slope[:, self.held] = 0.0
        return slope

    @cached_property
    def held(self) -> NDArray[np.bool_]:
        """Constants that stay where they begin. Shape [vector.size]."""
        measured = () if self.config.free_kernels else measured_devices()
        return np.array(
            [
                constant.name == "kernel_speed" and of in measured
                for _, of, constant in self.vector.columns()
            ]
        )

    def known_slope(self, start: FitResult | None) -> Array | None:
        """Return the same from an earlier fit, if that has it of every run."""
        keys = [(case.point.source, case.point.point_id) for case in self.cases]
        if start is None or not all(key in start.slopes for key in keys):
            return None
        slope = np.zeros((len(keys), self.vector.size))
        for row, key in enumerate(keys):
            slope[row, self.uses[row]] = start.slopes[key]
        return slope

    def slopes(self, slope: Array) -> dict[tuple[str, str], Array]:
        """Return the derivatives of every run, for the constants that it uses."""
        return {
            (case.point.source, case.point.point_id): slope[row, self.uses[row]]
            for row, case in enumerate(self.cases)
        }

    def step(self, errors: Array, slope: Array, places: Array, damping: float) -> Array:
        """Return the step from here. Shape [vector.size]."""
        rows, derivative = self.mixing @ errors, self.mixing @ slope
        weight = np.minimum(1.0, self.config.huber / np.maximum(np.abs(rows), 1e-12))
        pull = self.config.prior * self.vector.precision()
        away = places - self.centre
        normal = derivative.T @ (weight[:, None] * derivative) + pull
        normal += damping * np.eye(len(places))
        gradient = derivative.T @ (weight * rows) + pull @ away
        return np.clip(-np.linalg.solve(normal, gradient), -1.0, 1.0)

    def loss(self, errors: Array, places: Array) -> float:
        """Return the loss."""
        rows, width = np.abs(self.mixing @ errors), self.config.huber
        cost = np.where(rows < width, rows**2 / 2, width * (rows - width / 2)).sum()
        away = places - self.centre
        pulled = away @ self.vector.precision() @ away
        return float(cost + self.config.prior / 2 * pulled)


def _mixing(cases: Sequence[Case], order: float) -> Array:
    """Return weights of errors, then of deviations from the mean of a group."""
    sources = [case.point.source for case in cases]
    weight = np.array([sources.count(source) ** -0.25 for source in sources])
    own = np.diag(weight)
    groups: dict[str, list[int]] = {}
    for index, case in enumerate(cases):
        groups.setdefault(group_of(case.point), []).append(index)
    rows = []
    for members in groups.values():
        if len(members) < 2:
            continue
        for one in members:
            row = np.zeros(len(cases))
            row[members] -= order * weight[one] / len(members)
            row[one] += order * weight[one]
            rows.append(row)
    return np.vstack([own, *rows]) if rows else own
