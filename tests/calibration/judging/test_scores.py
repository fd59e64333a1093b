"""Errors of step time and of memory, against arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from planner.calibration.judging.scores import (
    coverage,
    judged,
    memory_scores,
    runs_of,
    time_scores,
)
from tests.calibration.rows import memory, prediction


def test_errors_of_step_time() -> None:
    found = time_scores(
        [prediction(1, 10, 11), prediction(2, 10, 7), prediction(3, 100, 102)]
    )
    assert found.runs == 3
    assert found.mape.value == pytest.approx((0.1 + 0.3 + 0.02) / 3)
    assert found.median.value == pytest.approx(0.1)
    assert found.bias.value == pytest.approx((0.1 - 0.3 + 0.02) / 3)
    assert found.worst == pytest.approx(0.3)
    assert found.worst_point == "paper, point 2"


def test_a_run_counts_once_and_by_seconds_of_its_step() -> None:
    """Tokens/s and TFLOP/s of one run: the first is nearer to what was measured."""
    rows = [
        prediction(1, 400, 500, metric="tflops_per_gpu", measured_step_s=10, step_s=8),
        prediction(
            1, 90, 100, metric="tokens_per_s_per_gpu", measured_step_s=10, step_s=9
        ),
        prediction(2, 10, 10),
    ]
    for order in (rows, rows[::-1]):
        found = time_scores(order)
        assert found.runs == 2
        assert found.mape.value == pytest.approx((0.1 + 0) / 2)


def test_a_figure_that_was_predicted_speaks_for_its_run() -> None:
    rows = [
        prediction(1, 10, None),
        prediction(1, 400, 500, metric="tflops_per_gpu", measured_step_s=10, step_s=8),
    ]
    [run] = runs_of(rows)
    assert run.step_s == 8
    assert time_scores(rows).unpredicted == 0


def test_points_of_two_sources_may_share_a_number() -> None:
    assert len(runs_of([prediction(1, 1, 1), prediction(1, 1, 1, source="other")])) == 2


def test_rows_that_are_left_out() -> None:
    rows = [
        prediction(1, 10, 11),
        prediction(2, 10, 99, doubtful="flag: seq inferred"),
        prediction(3, 10, 99, complete=False),
        prediction(4, 10, None),
        prediction(5, 10, 99, measured_step_s=None),
        memory(6, "peak_mem_gb", 10, 99),
    ]
    found = time_scores(rows)
    assert (found.runs, found.unpredicted) == (1, 2)
    assert found.mape.value == pytest.approx(0.1)
    assert time_scores(rows, complete=False).runs == 2
    assert [row.point_id for row in judged(rows)] == ["1", "4", "5", "6"]


def test_nothing_to_score() -> None:
    found = time_scores([])
    assert (found.runs, found.worst_point) == (0, "")
    assert math.isnan(found.mape.value)
    assert math.isnan(found.worst)
    of_memory = memory_scores([])
    assert (of_memory.peaks, of_memory.ran, of_memory.ran_out) == (0, 0, 0)
    assert math.isnan(of_memory.found.value)


def test_coverage_counts_doubtful_rows_too() -> None:
    rows = [
        prediction(1, 1, 1),
        prediction(2, 1, 1, doubtful="flag: x"),
        prediction(3, 1, None),
        prediction(4, 1, 1, complete=False),
        prediction(5, 1, None, complete=False),
        prediction(6, 1, None, complete=False),
        memory(6, "feasible", 1, 1),
        memory(7, "feasible", 0, 1),
    ]
    found = coverage(rows)
    assert (found.complete, found.complete_predicted) == (4, 3)
    assert (found.others, found.others_predicted) == (3, 1)
    assert found.doubtful == 1


def test_errors_of_memory() -> None:
    found = memory_scores(
        [
            memory(1, "peak_mem_gb", 40, 44),
            memory(2, "peak_mem_gib", 50, 40),
            memory(3, "mem_activations_gib", 10, 15),
            memory(4, "peak_mem_gib", 50, None),
            prediction(5, 1, 9),
        ]
    )
    assert (found.peaks, found.parts) == (2, 1)
    assert found.peak.value == pytest.approx(0.15)
    assert found.bias.value == pytest.approx(-0.05)
    assert found.worst == pytest.approx(0.2)
    assert found.worst_point == "paper, point 2"
    assert found.part.value == pytest.approx(0.5)


def test_shares_called_infeasible() -> None:
    """Both metrics say whether a run fitted, one with 1 and one with 0."""
    found = memory_scores(
        [
            memory(1, "feasible", 0, 0),
            memory(2, "feasible", 0, 1),
            memory(3, "oom_or_failed", 1, 1),
            memory(4, "oom_or_failed", 1, None),
            memory(5, "feasible", 1, 1),
            memory(6, "feasible", 1, 0),
            memory(7, "oom_or_failed", 0, 0),
            memory(7, "oom_or_failed", 0, 0),
            memory(8, "oom_or_failed", 0, 0),
        ]
    )
    assert (found.ran_out, found.ran) == (3, 4)
    assert found.found.value == pytest.approx(2 / 3)
    assert found.refused.value == pytest.approx(1 / 4)


def test_intervals_hold_the_score_and_narrow_with_runs() -> None:
    random = np.random.default_rng(0)
    widths = []
    for n in (20, 2000):
        factors = random.normal(1, 0.1, n)
        rows = [prediction(i, 10, 10 * factor) for i, factor in enumerate(factors)]
        mape = time_scores(rows).mape
        assert mape.low < mape.value < mape.high
        widths.append(mape.high - mape.low)
    assert widths[1] == pytest.approx(widths[0] / 10, rel=0.5)


def test_runs_are_resampled_within_their_source() -> None:
    """Sources of one error each: no resample of them differs from the sample."""
    rows = [
        prediction(i, 10, 10 * (1 + 0.1 * j), source=f"paper {j}")
        for j in range(3)
        for i in range(5)
    ]
    mape = time_scores(rows).mape
    assert mape.low == pytest.approx(0.1)
    assert mape.high == pytest.approx(0.1)
