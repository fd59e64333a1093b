"""Rank correlation against scipy, regret against brute force."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from planner.calibration.judging.ranking import (
    groups_of_plans,
    rank_scores,
    regret,
    spearman,
)
from tests.calibration.rows import prediction


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
