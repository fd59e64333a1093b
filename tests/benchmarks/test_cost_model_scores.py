"""Errors of step time and of memory, against arithmetic by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from benchmarks.cost_model_scores import (
    coverage,
    family_of,
    groups_of_plans,
    judged,
    memory_scores,
    rank_scores,
    regret,
    runs_of,
    spearman,
    time_scores,
)
from tests.benchmarks.predictions import memory, prediction


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


@pytest.mark.parametrize("seed", range(20))
def test_spearman_is_scipys_with_ties(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n = int(draw.integers(3, 30))
    one, other = (draw.integers(0, n, n).astype(float) for _ in range(2))
    one[:2], other[:2] = (0, 1), (1, 0)
    assert spearman(one, other) == pytest.approx(stats.spearmanr(one, other)[0])


def test_spearman_of_what_has_no_order() -> None:
    assert spearman(np.ones(5), np.arange(5.0)) == 0
    assert spearman(np.ones(1), np.ones(1)) == 0
    assert spearman(np.arange(5.0), np.arange(5.0) ** 3) == pytest.approx(1)
    assert spearman(np.arange(5.0), -np.arange(5.0)) == pytest.approx(-1)


def _random_groups(seed: int) -> dict[str, list[tuple[float, float]]]:
    draw = random.Random(seed)
    return {
        f"group {g}": [
            (draw.uniform(1, 9), draw.uniform(1, 9)) for _ in range(draw.randint(2, 12))
        ]
        for g in range(12)
    }


@pytest.mark.parametrize("seed", range(5))
def test_groups_against_brute_force(seed: int) -> None:
    groups = _random_groups(seed)
    rows = [
        prediction(f"{group} {i}", measured, predicted, group=group)
        for group, times in groups.items()
        for i, (measured, predicted) in enumerate(times)
    ]
    random.Random(seed).shuffle(rows)
    ranks, regrets, large = [], [], []
    for times in groups.values():
        if len(times) < 4:
            continue
        measured, predicted = zip(*times, strict=True)
        ranks.append(stats.spearmanr(measured, predicted)[0])
        picked = min(times, key=lambda pair: pair[1])[0]
        regrets.append(picked / min(measured) - 1)
        if len(times) >= 8:
            large.append(ranks[-1])
    by_rank, by_regret = rank_scores(rows), regret(rows)
    assert len(by_rank.groups) == len(ranks)
    assert by_rank.mean.value == pytest.approx(np.mean(ranks))
    assert by_rank.large == len(large)
    assert by_rank.smallest == pytest.approx(min(large))
    assert by_regret.mean.value == pytest.approx(np.mean(regrets))
    assert by_regret.worst == pytest.approx(max(regrets))
    [worst] = [g for g in by_regret.groups if g.group == by_regret.worst_group]
    assert worst.regret == by_regret.worst


def test_a_plan_measured_twice_is_one_plan() -> None:
    rows = [prediction(i, 1 + i, 1 + i) for i in range(4)]
    again = prediction(9, 2, 5, plan="plan 0")
    [group] = groups_of_plans([*rows, again])
    assert group.plans == 4
    # 1.5, 2, 3, 4 measured and 3, 2, 3, 4 predicted.
    assert group.correlation == pytest.approx(3 / (4.5 * 5) ** 0.5)
    assert group.regret == pytest.approx(2 / 1.5 - 1)
    assert groups_of_plans([*rows[:3], again]) == ()


def test_plans_of_equal_times_are_no_group() -> None:
    rows = [prediction(i, max(1, i), i + 1) for i in range(4)]
    assert groups_of_plans(rows) == ()
    assert len(groups_of_plans(rows, least=3)) == 1


def test_plans_that_share_the_first_place_are_picked_equally_often() -> None:
    rows = [prediction(i, 10 + i, 1 if i in (1, 3) else 2) for i in range(5)]
    assert regret(rows).mean.value == pytest.approx((11 + 13) / 2 / 10 - 1)


def test_plans_without_a_prediction_are_left_out() -> None:
    rows = [prediction(i, 10 + i, None if i == 0 else 20 - i) for i in range(5)]
    [group] = rank_scores(rows).groups
    assert group.plans == 4
    assert group.correlation == pytest.approx(-1)
    assert group.regret == pytest.approx(14 / 11 - 1)


def test_no_groups() -> None:
    assert rank_scores([]).groups == regret([]).groups == ()
    assert math.isnan(rank_scores([]).mean.value)
    assert math.isnan(rank_scores([prediction(1, 1, 1)]).smallest)
    assert math.isnan(regret([]).worst)


def test_releases_of_a_table_are_one_family() -> None:
    vendor = "NVIDIA Megatron-Bridge perf summary {} NeMo Container"
    assert family_of(vendor.format("26.02.01")) == family_of(vendor.format("25.09"))
    assert family_of("torchtitan benchmarks 2024-12") == "torchtitan benchmarks"
    assert family_of("2024") == "2024"
