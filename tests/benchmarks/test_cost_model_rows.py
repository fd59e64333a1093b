"""Rows that are prepared once: what reaches the cost model, and the floors' figures."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from benchmarks.cost_model_rows import Rows
from planner.calibration import fit
from tests.calibration.rows import point

_POINTS = [
    point(point_id="1", model="GPT", microbatch=2),
    point(point_id="2", model="GPT", microbatch=4, precision="fp16"),
    point(point_id="3", model="GPT", gpu="abacus"),
]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows(_POINTS)


def test_figures_of_the_floors(rows: Rows) -> None:
    """Within 2 % of 6 n + 6 layers hidden seq a token; a100 does 312 TFLOP/s."""
    layers, hidden, seq = 24, 1024, 2048
    count = 12 * layers * hidden**2 + 51200 * hidden
    flops = 32 * seq * (6 * count + 6 * layers * hidden * seq)
    for place in (0, 1):
        assert rows.flops_per_step(place) == pytest.approx(flops, rel=0.02)
        assert rows.peak_flops_per_s(place) == 312e12
        assert rows.device(place).startswith("a100")


def test_a_row_without_a_case_has_no_figures(rows: Rows) -> None:
    assert rows.flops_per_step(2) is None
    assert rows.peak_flops_per_s(2) is None
    assert rows.device(2) == "abacus"


def test_equal_fits_are_made_once(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(cases: Sequence[object], start: object) -> SimpleNamespace:
        made.append(len(cases))
        return SimpleNamespace(calibration=f"fit {len(made)}")

    monkeypatch.setattr(fit, "fit", counted)
    assert rows.fit([0, 1]) == "fit 1"
    # The third is no case, so these are the same runs.
    assert rows.fit([0, 1, 2]) == "fit 1"
    assert rows.fit([1]) == "fit 2"
    assert made == [2, 1]
