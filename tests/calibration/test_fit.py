"""Fits to times that known constants made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from planner.calibration.fit import FitConfig, fit
from planner.calibration.parameters import Vector
from planner.cost.constants import Calibration
from planner.errors import CalibrationError
from planner.measurements.cases import Case, prepare
from planner.measurements.catalogues import fitted_constants
from tests.measurements.rows import DEVICE, FRAMEWORK, small

VECTOR = Vector(devices=(DEVICE,), recipes=(FRAMEWORK,))
#: Hardly pulled, and followed to the end.
FREE = FitConfig(
    free_kernels=True, prior=1e-5, iterations=30, tolerance=1e-4, huber=10.0
)
#: Data parallelism, tensor parallelism, pipelines, small and large microbatches.
PLANS: tuple[dict[str, object], ...] = (
    {"microbatch": 1, "zero": 1},
    {"microbatch": 8, "zero": 1, "recompute": "none"},
    {"microbatch": 2, "zero": 3, "recompute": "none"},
    {"tp": 2, "microbatch": 4, "recompute": "none"},
    {"tp": 4, "microbatch": 8},
    {"pp": 2, "microbatch": 2},
    {"pp": 4, "microbatch": 4, "recompute": "none"},
    {"tp": 2, "pp": 2, "microbatch": 1, "n_gpus": 16},
    {"microbatch": 4, "n_gpus": 32, "zero": 1, "recompute": "none"},
)


@cache
def _prepared() -> tuple[Case, ...]:
    return tuple(
        prepare(small(dp=None, point_id=str(i), global_batch=128, **plan))
        for i, plan in enumerate(PLANS)
    )


def _made_up() -> Calibration:
    """Constants that are not the starting ones, up and down, away from the bounds."""
    start = VECTOR.start()
    return VECTOR.calibration(start - 0.5 * np.where(start > 0, 1, -1), "made up")


def _measured(cases: Sequence[Case], truth: Calibration) -> list[Case]:
    """Cases whose rows hold the seconds of these constants, as if measured."""
    return [
        replace(case, point=replace(case.point, value=case.step_s(truth)))
        for case in cases
    ]


def _errors(cases: Sequence[Case], calibration: Calibration) -> np.ndarray:
    found = [case.step_s(calibration) / (case.measured_step_s or 1) for case in cases]
    return np.abs(np.array(found) - 1)


def test_times_of_known_constants_are_found_again() -> None:
    cases = _measured(_prepared(), _made_up())
    start = VECTOR.calibration(VECTOR.start(), "start")
    assert _errors(cases, start).max() > 0.05
    found = fit(cases, FREE)
    assert _errors(cases, found.calibration).max() < 0.01
    assert list(found.loss) == sorted(found.loss, reverse=True)
    assert found.vector == VECTOR


def test_constants_stay_within_their_bounds() -> None:
    """Steps a hundred times too short for anything: no constant leaves its range."""
    cases = [
        replace(c, point=replace(c.point, value=c.step_s(_made_up()) / 100))
        for c in _prepared()[:3]
    ]
    found = fit(cases, FREE).calibration
    for constants, of in (
        (fitted_constants("device"), found.devices[DEVICE]),
        (fitted_constants("recipe"), found.recipes[FRAMEWORK]),
    ):
        for constant in constants:
            value = getattr(of, constant.name)
            assert constant.low <= value <= constant.high


def test_without_a_pull_elsewhere_a_strong_one_keeps_the_start() -> None:
    cases = _measured(_prepared()[:3], _made_up())
    found = fit(cases, FitConfig(prior=1e6))
    assert found.places == pytest.approx(VECTOR.start(), abs=1e-2)


def test_a_strong_pull_to_known_constants_keeps_them() -> None:
    cases, known = _measured(_prepared()[:3], _made_up()), _made_up()
    found = fit(_prepared()[:3], FitConfig(prior=1e6), towards=known).calibration
    for constant in fitted_constants("device"):
        kept = getattr(known.devices[DEVICE], constant.name)
        assert getattr(found.devices[DEVICE], constant.name) == pytest.approx(
            kept, rel=1e-2
        )
    for constant in fitted_constants("recipe"):
        kept = getattr(known.recipes[FRAMEWORK], constant.name)
        assert getattr(found.recipes[FRAMEWORK], constant.name) == pytest.approx(
            kept, rel=1e-2
        )
    # What is right already is left as it is, however weak the pull.
    again = fit(cases, towards=known).calibration
    assert _errors(cases, again).max() < 1e-3


def test_a_device_that_is_not_known_begins_at_the_default() -> None:
    known = _made_up()
    assert known.default is not None
    elsewhere = replace(known, devices={}, recipes={})
    found = fit(_prepared()[:1], FitConfig(prior=1e6), towards=elsewhere).calibration
    for constant in fitted_constants("device"):
        assert getattr(found.devices[DEVICE], constant.name) == pytest.approx(
            getattr(known.default, constant.name), rel=1e-2
        )


def test_a_fit_that_begins_at_another_ends_in_the_same_place() -> None:
    cases = _measured(_prepared(), _made_up())
    how = replace(FREE, prior=0.02)
    whole = fit(cases, how)
    alone, after = fit(cases[:6], how), fit(cases[:6], how, start=whole)
    assert _times(cases, after.calibration) == pytest.approx(
        _times(cases, alone.calibration), rel=0.02
    )


def _times(cases: Sequence[Case], calibration: Calibration) -> list[float]:
    return [case.step_s(calibration) for case in cases]


def test_figures_of_one_run_count_once() -> None:
    cases = _measured(_prepared()[:3], _made_up())
    once, twice = fit(cases), fit([*cases, cases[0]])
    assert once.places == pytest.approx(twice.places, rel=1e-12)


def test_memory_alone_cannot_be_fitted_to() -> None:
    case = prepare(small(metric="peak_mem_gb", value=20.0))
    with pytest.raises(CalibrationError, match="none of 1 measurements"):
        fit([case])


def test_the_watcher_hears_of_every_iteration() -> None:
    told: list[tuple[int, float]] = []
    cases = _measured(_prepared()[:3], _made_up())
    found = fit(cases, watch=lambda index, loss: told.append((index, loss)))
    assert told == list(enumerate(found.loss))
