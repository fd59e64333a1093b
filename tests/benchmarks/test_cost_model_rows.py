"""Rows that are prepared once: predictions, fits, and figures of the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import pytest

from benchmarks import cost_model_rows
from benchmarks.cost_model_rows import Rows, predict_cases, predict_points
from planner.calibration.parameters import Vector
from planner.cost import Cost
from planner.cost.constants import Calibration
from planner.measurements.cases import prepare
from tests.measurements.rows import DEVICE, FRAMEWORK, point, small

_POINTS = [
    point(point_id="1", model="GPT", microbatch=2),
    point(point_id="2", model="GPT", microbatch=4, precision="fp16"),
    point(point_id="3", model="GPT", gpu="abacus"),
]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows(_POINTS)


def test_figures_of_the_baselines(rows: Rows) -> None:
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

    monkeypatch.setattr(cost_model_rows, "fit", counted)
    assert rows.fit([0, 1]) == "fit 1"
    # The third is no case, so these are the same runs.
    assert rows.fit([0, 1, 2]) == "fit 1"
    assert rows.fit([1]) == "fit 2"
    assert made == [2, 1]


VECTOR = Vector(devices=(DEVICE,), recipes=(FRAMEWORK,))
CALIBRATION: Calibration = VECTOR.calibration(VECTOR.start(), "test")


@cache
def _cost() -> Cost:
    return prepare(small()).cost(CALIBRATION)


def test_a_step_in_the_row_s_units() -> None:
    rows = [
        small(point_id="1", value=2.0),
        small(point_id="2", metric="samples_per_s", value=32.0),
    ]
    seconds, rate = predict_points(rows, CALIBRATION)
    step = _cost().step_time_s
    assert seconds.predicted == pytest.approx(step)
    assert rate.predicted == pytest.approx(64 / step)
    assert seconds.step_s == rate.step_s == pytest.approx(step)
    assert seconds.measured_step_s == rate.measured_step_s == pytest.approx(2.0)
    assert (seconds.measured, rate.measured) == (2.0, 32.0)
    assert seconds.group == rate.group
    assert (seconds.device, seconds.recipe) == (DEVICE, FRAMEWORK)
    assert seconds.complete
    assert seconds.doubtful == ""


def test_peaks_say_also_that_the_run_fitted() -> None:
    rows = [
        small(metric="peak_mem_gb", value=20.0),
        small(metric="peak_mem_gib", value=20.0),
    ]
    found = predict_points(rows, CALIBRATION)
    assert [one.metric for one in found] == [
        "peak_mem_gb",
        "feasible",
        "peak_mem_gib",
        "feasible",
    ]
    memory = _cost().memory
    # What the allocator gave out, without the context that it knows nothing of.
    peak = float((memory.total - memory.reserve).max())
    assert found[0].predicted == pytest.approx(peak / 1e9)
    assert found[2].predicted == pytest.approx(peak / 2**30)
    assert (found[1].measured, found[1].predicted) == (1.0, 1.0)
    assert found[0].step_s is None
    assert found[0].measured_step_s is None


def test_what_nvidia_smi_shows_includes_the_context() -> None:
    row = small(metric="peak_mem_gb", value=20.0, notes="mem = max NVIDIA-SMI use")
    memory = _cost().memory
    peak = predict_points([row], CALIBRATION)[0].predicted
    assert peak == pytest.approx(float(memory.total.max()) / 1e9)
    assert memory.reserve.max() > 1e9


def test_parts_of_memory() -> None:
    rows = [
        small(metric="mem_params_opt_gib", value=1.0),
        small(metric="mem_activations_gib", value=1.0),
    ]
    states, activations = predict_points(rows, CALIBRATION)
    memory = _cost().memory
    kept = memory.parameters + memory.gradients + memory.optimizer
    assert states.predicted == pytest.approx(kept.max() / 2**30)
    assert activations.predicted == pytest.approx(memory.activations.max() / 2**30)


@pytest.mark.parametrize(
    ("metric", "value", "measured"),
    [
        ("oom_or_failed", 1.0, 0.0),
        ("oom_or_failed", 0.0, 1.0),
        ("feasible", 0.0, 0.0),
        ("feasible", 1.0, 1.0),
    ],
)
def test_what_fits_is_one_metric(metric: str, value: float, measured: float) -> None:
    (found,) = predict_points([small(metric=metric, value=value)], CALIBRATION)
    assert found.metric == "feasible"
    assert found.measured == measured
    assert found.predicted == 1.0


def test_what_cannot_fit_is_called_so() -> None:
    row = small(
        metric="oom_or_failed",
        value=1.0,
        gpu="T4",
        microbatch=64,
        global_batch=512,
        recompute="none",
    )
    (found,) = predict_points([row], CALIBRATION)
    assert (found.measured, found.predicted) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"gpu": "abacus"}, "abacus"),
        ({"tp": 3}, "tp=3"),
        ({"layers": None, "hidden": None, "model": "unheard-of"}, "unheard-of"),
        ({"metric": "joules"}, "'joules' is not predicted"),
    ],
)
def test_what_cannot_be_predicted_has_a_reason(
    row: dict[str, object], words: str
) -> None:
    (found,) = predict_points([small(**row)], CALIBRATION)
    assert found.predicted is None
    assert words in found.why


def test_reasons_and_assumptions_are_told() -> None:
    (found,) = predict_points([small(zero=None, source="a blog")], CALIBRATION)
    assert found.predicted is not None
    assert "framework not named" in found.why


def test_plans_are_equal_where_they_are() -> None:
    rows = [
        small(),
        small(value=9.0, metric="tflops_per_gpu"),
        small(microbatch=2),
        small(tp=2, dp=4),
    ]
    plans = [one.plan for one in predict_points(rows, CALIBRATION)]
    assert plans[0] == plans[1]
    assert len(set(plans)) == 3
    assert "dp8 tp1 pp1x1" in plans[0]


def test_places_are_kept() -> None:
    rows = [small(point_id=str(i), value=1.0 + i) for i in range(4)]
    cases = {i: prepare(row) for i, row in enumerate(rows)}
    found = predict_cases(rows, cases, {}, CALIBRATION, only=[2, 0])
    assert [one.point_id for one in found] == ["2", "0"]
