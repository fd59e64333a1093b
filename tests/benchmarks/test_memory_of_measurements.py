"""Peak memory of published measurements against what the cost model says of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cost_model_rows import predict_points
from benchmarks.cost_model_scores import Prediction
from planner.cost.constants import Calibration
from planner.measurements.points import Point, read_points

POINTS = Path(os.environ.get("MESHWRIGHT_DATA", ""), "measured", "points.csv")
pytestmark = pytest.mark.skipif(
    not POINTS.is_file(), reason="MESHWRIGHT_DATA does not hold measured/points.csv"
)
PEAKS = ("peak_mem_gb", "peak_mem_gib")
FIGURE_1 = ("mem_params_opt_gib", "mem_activations_gib")


def measured(source: str, *metrics: str, gpus: int = 1 << 20) -> list[Point]:
    return [
        point
        for point in read_points(POINTS)
        if source in point.source
        and point.metric in metrics
        and point.n_gpus <= gpus
        and point.model != "wresnet"
    ]


def predicted(points: Sequence[Point]) -> list[Prediction]:
    # Memory depends on no fitted constant.
    return predict_points(points, Calibration(name="none"))


def error(found: Sequence[Prediction]) -> float:
    rows = [row for row in found if row.metric != "feasible"]
    shares = [abs(row.predicted / row.measured - 1) for row in rows if row.predicted]
    assert len(shares) >= 0.95 * len(rows)
    return float(np.mean(shares))


def test_a_shallow_model_on_few_gpus() -> None:
    rows = measured("intra_ablation", *PEAKS, gpus=2)
    found = predicted([row for row in rows if row.model == "gpt"])
    assert error(found) < 0.1
    assert all(row.predicted == 1.0 for row in found if row.metric == "feasible")


@pytest.mark.parametrize("metric", FIGURE_1)
@pytest.mark.slow
def test_formulas_of_korthikanti(metric: str) -> None:
    assert error(predicted(measured("Korthikanti", metric))) < 0.1


@cache
def peaks() -> list[Prediction]:
    return predicted(measured("", *PEAKS, "oom_or_failed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "most"),
    [
        ("", 0.12),
        ("torchtitan benchmarks", 0.12),
        ("WhiteFiber", 0.12),
        ("intra_ablation", 0.1),
        ("results_e2e", 0.16),
    ],
)
def test_peaks_of_every_source(source: str, most: float) -> None:
    assert error([row for row in peaks() if source in row.source]) < most


@pytest.mark.slow
def test_what_ran_fits_and_what_ran_out_does_not() -> None:
    fits = [row for row in peaks() if row.metric == "feasible"]
    known = [(row.measured, row.predicted) for row in fits if row.predicted is not None]
    ran = [said for truth, said in known if truth == 1.0]
    failed = [said for truth, said in known if truth == 0.0]
    assert len(ran) > 70
    assert len(failed) >= 9
    assert np.mean(ran) >= 0.95
    assert 1 - np.mean(failed) >= 0.8
