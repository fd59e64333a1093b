"""Corrections of known constants by a handful of a user's own runs.

Published measurements have shown what devices and frameworks reach elsewhere. A few
runs show by how much this place differs: the fit to them is pulled to the known
constants, so that three runs move those that they determine and leave the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.calibration.fit import FitConfig, fit
from planner.calibration.parameters import Vector
from planner.calibration.rows import doubtful_reason
from planner.cost.constants import Calibration
from planner.errors import CalibrationError
from planner.measurements.cases import Case, prepare_all
from planner.measurements.catalogues import frameworks
from planner.measurements.metrics import time_metric_named
from planner.measurements.points import Point
from planner.measurements.store import Origin

__all__ = ["MovedConstant", "Refit", "RefitRow", "refit"]

#: Source of rows that name none: whoever calibrates runs Meshwright's plans.
_OWN = "own runs (PyTorch)"
#: Columns that make a plan; a fit to runs with a guessed one would learn the guess.
_PLAN = ("tp", "pp", "microbatch", "global_batch")
#: A user's own runs are trusted: no error is so large that it is taken for an outlier.
#: They are few, so that the pull is stronger than in fits to hundreds. With three runs
#: under constants that lie 0.6 logits off (normal), steps of other plans are off by 8 %
#: before and by 3 % after; noise of 3 % adds 0.1 %.
_CONFIG = FitConfig(
    prior=0.005,
    huber=0.5,
    order=0.7,
    iterations=20,
    tolerance=0.02,
    free_kernels=True,
)
#: Share of its range by which a constant must move to be reported.
_MOVED = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitRow:
    """One run that was fitted to.

    Attributes:
        point_id: Id of its row.
        source: Source of its row.
        device: Device type whose constants were used.
        framework: Framework whose constants were used.
        measured_s: Seconds of a step.
        before_s: Predicted seconds under the constants that were known.
        after_s: Predicted seconds under the fitted ones.
        assumed: Contradictions of its row, and assumptions where it states nothing.
        contradictions: The former alone.
    """

    point_id: str
    source: str
    device: str
    framework: str
    measured_s: float
    before_s: float
    after_s: float
    assumed: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()

    @property
    def before(self) -> float:
        """Error before, a share of what was measured; above 0 for too slow."""
        return self.before_s / self.measured_s - 1

    @property
    def after(self) -> float:
        """Error after, a share of what was measured."""
        return self.after_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedConstant:
    """A constant that the runs changed.

    Attributes:
        of: Device type or framework.
        name: Field of its constants.
        before: Value that was known.
        after: Value that was fitted.
    """

    of: str
    name: str
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """Corrected constants, and the runs that they come from.

    Attributes:
        calibration: Constants that were known, corrected by the runs.
        rows: Runs that were fitted to.
        unusable: Point id and reason of the rows that were not.
        moved: Constants that changed by more than half a per cent of their range.
    """

    calibration: Calibration
    rows: tuple[RefitRow, ...]
    unusable: tuple[tuple[str, str], ...] = ()
    moved: tuple[MovedConstant, ...] = field(default=())

    @property
    def error_before(self) -> float:
        """Mean absolute error of the steps before, a share."""
        return float(np.mean([abs(row.before) for row in self.rows]))

    @property
    def error_after(self) -> float:
        """Mean absolute error of the steps after, a share."""
        return float(np.mean([abs(row.after) for row in self.rows]))

    def origin(self, made: str) -> Origin:
        """Return the rows that the constants came from.

        Args:
            made: Date, ISO 8601.
        """
        sources = sorted({row.source for row in self.rows})
        of = {
            name: [row for row in self.rows if row.source == name] for name in sources
        }
        return Origin(
            rows={name: [row.point_id for row in of[name]] for name in sources},
            made=made,
            errors={
                name: float(np.mean([abs(row.after) for row in of[name]]))
                for name in sources
            },
        )


def refit(
    points: Sequence[Point],
    start: Calibration | None,
    *,
    name: str,
    watch: Callable[[int], None] | None = None,
) -> Refit:
    """Correct known constants by some runs.

    Args:
        points: Rows. One that names no source is taken for a run by torch's own means,
            as Meshwright's executors are.
        start: Constants that are known; None for those of GPUs in general.
        name: Name of the new constants.
        watch: Called with the number of rows that have been read.
    Raises:
        CalibrationError: If no row can be used; gives the reason of the first.
    """
    named = [point if point.source else replace(point, source=_OWN) for point in points]
    cases, failed = prepare_all(named, watch)
    unusable: list[tuple[str, str]] = []
    used: list[Case] = []
    seen: set[tuple[str, str]] = set()
    for place, point in enumerate(named):
        reason = failed.get(place) or _reason(point, seen)
        if reason:
            unusable.append((point.point_id, reason))
        else:
            used.append(cases[place])
            seen.add((point.source, point.point_id))
    if not used:
        first = "; ".join(f"{row}: {why}" for row, why in unusable[:1])
        raise CalibrationError(
            f"none of {len(points)} rows can be fitted to"
            f"{f' ({first})' if first else ''}; give steps of runs whose plan is known"
        )
    vector = _vector(used)
    known = start or vector.calibration(vector.start(), "start")
    found = fit(used, _CONFIG, towards=start, name=name).calibration
    merged = Calibration(
        name=name,
        devices={**known.devices, **found.devices},
        # A fit has constants of all frameworks; runs of one determine its own.
        recipes={
            **known.recipes,
            **{name: found.recipes[name] for name in vector.recipes},
        },
        default=known.default or found.default,
        surfaces=found.surfaces,
    )
    return Refit(
        calibration=merged,
        rows=tuple(_row(case, known, merged) for case in used),
        unusable=tuple(unusable),
        moved=tuple(_moved(vector, known, merged)),
    )


def _reason(point: Point, seen: set[tuple[str, str]]) -> str:
    """Return the reason why a run is not fitted to, or "" if it is."""
    if time_metric_named(point.metric) is None:
        return f"{point.metric} does not tell the time of a step"
    doubt = doubtful_reason(point)
    if doubt:
        return doubt
    missing = [name for name in _PLAN if getattr(point, name) is None]
    if missing:
        return f"{missing[0]} is not given; the plan needs {', '.join(_PLAN)}"
    if (point.source, point.point_id) in seen:
        return "another row of this point_id is the same run"
    return ""


def _vector(cases: Sequence[Case]) -> Vector:
    return Vector(
        devices=tuple(sorted({case.device.name for case in cases})),
        recipes=tuple(sorted({case.framework for case in cases})),
    )


def _row(case: Case, before: Calibration, after: Calibration) -> RefitRow:
    return RefitRow(
        point_id=case.point.point_id,
        source=case.point.source,
        device=case.device.name,
        framework=case.framework,
        measured_s=case.measured_step_s or float("nan"),
        before_s=case.step_s(before),
        after_s=case.step_s(after),
        assumed=case.why,
        contradictions=case.contradictions,
    )


def _moved(
    vector: Vector, before: Calibration, after: Calibration
) -> Iterator[MovedConstant]:
    for kind, of, constant in vector.columns():
        if kind == "device":
            old: object = before.devices.get(of, before.default)
            new: object = after.devices[of]
        else:
            old = before.recipes.get(of, frameworks()[of].recipe)
            new = after.recipes[of]
        # Some devices had no constants before, but for their datasheet.
        was = constant.start if old is None else float(getattr(old, constant.name))
        now = float(getattr(new, constant.name))
        if abs(now - was) > _MOVED * (constant.high - constant.low):
            yield MovedConstant(of=of, name=constant.name, before=was, after=now)
