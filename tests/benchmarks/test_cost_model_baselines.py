"""Floors by closed forms: what a constant explains, they explain exactly."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.cost_model_baselines import bubble_only, constant_mfu
from benchmarks.cost_model_scores import Prediction, time_scores
from planner.errors import CalibrationError
from planner.measurements.points import Point
from tests.benchmarks.predictions import memory, prediction
from tests.measurements.rows import point

_PEAK = 100.0


def _flops(row: Point) -> float | None:
    return None if row.layers is None else 1e5 * row.layers


def _peak(row: Point) -> float | None:
    return None if row.gpu == "unknown" else _PEAK


def _run(number: int, step_s: float, **changes: object) -> tuple[Point, Prediction]:
    row = point(point_id=str(number), value=step_s, **changes)
    source = str(changes.get("source", "paper"))
    return row, prediction(
        number, step_s, None, source=source, device=str(changes.get("gpu", "A100"))
    )


def _mfu(row: Point, step_s: float) -> float:
    return 1e5 * (row.layers or 0) / (row.n_gpus * _PEAK * step_s)


def test_no_other_mfu_has_a_smaller_error() -> None:
    random = np.random.default_rng(3)
    for n in (1, 2, 5, 30):
        rows, given = zip(
            *(_run(i, s, layers=10 + i) for i, s in enumerate(random.uniform(1, 9, n))),
            strict=True,
        )
        found = constant_mfu(given, rows, flops_per_step=_flops, peak_flops_per_s=_peak)
        mfus = [_mfu(row, one.step_s) for row, one in zip(rows, found, strict=True)]
        assert mfus == pytest.approx([mfus[0]] * n)
        shares = np.array([_mfu(row, row.value) for row in rows])
        tried = np.linspace(shares.min(), shares.max(), 20001)[:, None]
        least = np.abs(shares / tried - 1).mean(axis=1).min()
        mape = time_scores(found).mape.value
        assert least * (1 - 1e-3) - 1e-9 <= mape <= least + 1e-9
        assert {one.why for one in found} == {"one constant MFU"}
        assert [one.predicted for one in found] == pytest.approx(
            [one.step_s for one in found]
        )


def test_what_is_left_out_has_no_part_in_its_own_mfu() -> None:
    """Two sources, two devices: each is predicted by the other's MFU."""
    fast, slow = _run(1, 1e3), _run(2, 4e3, source="blog", gpu="H100")
    rows, given = zip(fast, slow, strict=True)
    for fit in ("source", "device"):
        one, other = constant_mfu(
            given, rows, flops_per_step=_flops, peak_flops_per_s=_peak, fit=fit
        )
        assert one.step_s == pytest.approx(4e3)
        assert other.step_s == pytest.approx(1e3)
    fitted = constant_mfu(given, rows, flops_per_step=_flops, peak_flops_per_s=_peak)
    assert time_scores(fitted).mape.value == pytest.approx(0)


def test_releases_are_left_out_together() -> None:
    rows, given = zip(
        _run(1, 1e3, source="table 25.01"),
        _run(2, 1e3, source="table 25.02"),
        strict=True,
    )
    found = constant_mfu(
        given, rows, flops_per_step=_flops, peak_flops_per_s=_peak, fit="source"
    )
    assert [one.step_s for one in found] == [None, None]


def test_the_bubble_alone() -> None:
    """8 microbatches over 2 and 4 stages: 9/8 and 11/8 of the perfect time."""
    shapes = ({"pp": 2, "tp": 4}, {"pp": 4, "tp": 2})
    rows, given = zip(
        *(
            _run(i, 1e3 * bubble, **shape)
            for i, (shape, bubble) in enumerate(
                zip(shapes, (9 / 8, 11 / 8), strict=True)
            )
        ),
        strict=True,
    )
    found = bubble_only(given, rows, flops_per_step=_flops, peak_flops_per_s=_peak)
    assert [one.step_s for one in found] == pytest.approx([1125, 1375])
    flat = constant_mfu(given, rows, flops_per_step=_flops, peak_flops_per_s=_peak)
    assert flat[0].step_s == flat[1].step_s


def test_rates_turn_over() -> None:
    """A step predicted at half the time is a rate at twice the figure."""
    rows, given = zip(*(_run(i, s) for i, s in enumerate((1e3, 1e3, 2e3))), strict=True)
    rate = prediction(
        2, 50, None, metric="tokens_per_s_per_gpu", measured_step_s=2e3, device="A100"
    )
    found = constant_mfu(
        (*given[:2], rate), rows, flops_per_step=_flops, peak_flops_per_s=_peak
    )
    assert found[2].step_s == pytest.approx(1e3)
    assert found[2].predicted == pytest.approx(100)


def test_what_floors_cannot_say() -> None:
    rows = [
        point(point_id="1", value=1e3),
        point(point_id="2", layers=None, value=1e3),
        point(point_id="3", gpu="unknown", value=1e3),
        point(point_id="4", metric="peak_mem_gb", value=10),
        point(point_id="5", microbatch=None, value=1e3),
    ]
    given = [prediction(row.point_id, 1e3, 1e3) for row in rows]
    given[3] = memory(4, "peak_mem_gb", 10, 10)
    kwargs = {"flops_per_step": _flops, "peak_flops_per_s": _peak}
    known = [one.predicted is not None for one in constant_mfu(given, rows, **kwargs)]
    assert known == [True, False, False, False, True]
    known = [one.predicted is not None for one in bubble_only(given, rows, **kwargs)]
    assert known == [True, False, False, False, False]


def test_predictions_of_no_point_are_refused() -> None:
    with pytest.raises(CalibrationError, match="no point '2' of 'paper' among 1"):
        constant_mfu(
            [prediction(2, 1, 1)],
            [point()],
            flops_per_step=_flops,
            peak_flops_per_s=_peak,
        )
