"""Corrections by a few runs: they help, and leave alone what they say nothing of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from planner.calibration.parameters import Vector
from planner.calibration.refit import Refit, refit
from planner.cost.constants import Calibration
from planner.errors import CalibrationError
from planner.measurements.cases import prepare
from planner.measurements.catalogues import fitted_constants
from planner.measurements.points import Point
from tests.measurements.rows import DEVICE, small

VECTOR = Vector(devices=(DEVICE, "h100-80"), recipes=("megatron", "torch"))
PLANS: tuple[dict[str, object], ...] = (
    {"microbatch": 8, "zero": 3},
    {"tp": 2, "dp": 4, "microbatch": 8},
    {"pp": 2, "dp": 4, "microbatch": 4},
)


def _known() -> Calibration:
    """Not the starting values, and further from their bounds than those."""
    start = VECTOR.start()
    return VECTOR.calibration(start - 0.3 * np.where(start > 0, 1, -1), "known")


def _runs(slower: float, source: str = "", **row: object) -> list[Point]:
    """Runs of Meshwright that took so many times as long as the known constants say."""
    made = []
    for index, plan in enumerate(PLANS):
        point = small(point_id=str(index), recompute="none", **{**row, **plan})
        own = prepare(small(**{**row, **plan}, recompute="none", source="PyTorch"))
        seconds = own.step_s(_known()) * slower
        made.append(_with(point, source, seconds))
    return made


def _with(point: Point, source: str, seconds: float) -> Point:
    return replace(point, source=source, value=seconds)


def _refit(points: Sequence[Point], start: Calibration | None = None) -> Refit:
    return refit(points, start or _known(), name="ours")


@pytest.mark.parametrize("slower", [0.85, 1.25])
def test_a_constant_deviation_is_learned(slower: float) -> None:
    found = _refit(_runs(slower))
    assert found.error_before == pytest.approx(abs(1 / slower - 1), rel=1e-6)
    assert found.error_after < found.error_before / 2
    assert len(found.rows) == len(PLANS)
    assert {row.framework for row in found.rows} == {"torch"}
    assert {row.device for row in found.rows} == {DEVICE}
    assert found.moved
    assert {one.of for one in found.moved} <= {DEVICE, "torch"}


def test_what_agrees_moves_nothing() -> None:
    found = _refit(_runs(1.0))
    assert found.error_before == pytest.approx(0.0, abs=1e-9)
    assert found.moved == ()
    assert found.unusable == ()


def test_what_runs_say_nothing_of_stays() -> None:
    known = _known()
    found = _refit(_runs(1.3)).calibration
    assert found.name == "ours"
    assert found.devices["h100-80"] == known.devices["h100-80"]
    assert found.recipes["megatron"] == known.recipes["megatron"]
    assert found.default == known.default
    # float8 is in none of the runs.
    for constant in fitted_constants("device"):
        if "float8" in constant.name:
            was = getattr(known.devices[DEVICE], constant.name)
            now = getattr(found.devices[DEVICE], constant.name)
            assert now == pytest.approx(was, rel=1e-6)


def test_a_second_fit_to_the_same_runs_goes_on_from_the_first() -> None:
    runs = _runs(1.25)
    first = _refit(runs)
    second = _refit(runs, first.calibration)
    assert second.error_before == pytest.approx(first.error_after, rel=1e-3)
    assert second.error_after < 1.1 * first.error_after


def test_a_device_that_nothing_is_known_of() -> None:
    found = _refit(_runs(1.2, gpu="A100-40GB"))
    assert {row.device for row in found.rows} == {"a100-40"}
    assert "a100-40" in found.calibration.devices
    assert DEVICE in found.calibration.devices


def test_with_nothing_known_at_all() -> None:
    found = refit(_runs(1.25), None, name="ours")
    assert found.calibration.devices.keys() == {DEVICE}
    assert found.error_after < found.error_before


def test_rows_that_are_left_out_say_why() -> None:
    points = [
        *_runs(1.1),
        small(point_id="memory", metric="peak_mem_gb"),
        small(point_id="abacus", gpu="abacus"),
        small(point_id="doubt", flag="guessed"),
        small(point_id="plan", tp=None, dp=None),
        small(point_id="batch", microbatch=None),
    ]
    points.append(points[0])
    told: list[int] = []
    found = refit(points, _known(), name="ours", watch=told.append)
    reasons = dict(found.unusable)
    assert "peak_mem_gb" in reasons["memory"]
    assert "abacus" in reasons["abacus"]
    assert "guessed" in reasons["doubt"]
    assert reasons["plan"].startswith("tp is not given")
    assert reasons["batch"].startswith("microbatch is not given")
    assert "same run" in reasons["0"]
    assert len(found.rows) == len(PLANS)
    assert told == list(range(1, len(points) + 1))


@pytest.mark.parametrize("points", [[], [small(metric="peak_mem_gb")]])
def test_no_row_to_fit_to(points: list[Point]) -> None:
    with pytest.raises(CalibrationError, match=f"none of {len(points)} rows"):
        _refit(points)


def test_where_constants_come_from() -> None:
    found = _refit([*_runs(1.1), small(point_id="x", source="NeMo", value=0.1)])
    origin = found.origin("2026-01-02")
    assert origin.made == "2026-01-02"
    assert set(origin.rows["NeMo"]) == {"x"}
    ((own, ids),) = ((s, i) for s, i in origin.rows.items() if s != "NeMo")
    assert list(ids) == ["0", "1", "2"]
    mean = np.mean([abs(row.after) for row in found.rows if row.source == own])
    assert origin.errors[own] == pytest.approx(mean)
