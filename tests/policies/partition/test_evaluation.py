"""Pairs of scores, summed up."""

from __future__ import annotations

import math

import pytest

from policies.partition.evaluation import Pair, compare, summarise
from policies.partition.partitioner import LearnedPartitioner


def _pair(kind: str, score: float, *others: float) -> Pair:
    named = {f"other{at}": other for at, other in enumerate(others)}
    return Pair(world="w", kind=kind, score=score, others=named)


def test_ratios_are_to_the_best_of_the_others() -> None:
    nothing = math.inf
    mixed, sites = summarise(
        [
            _pair("mixed", 1.0, 2.0, 4.0),
            _pair("mixed", 2.0, 4.0, 1.0),
            _pair("mixed", 3.0, 3.0, nothing),
            _pair("sites", nothing, 1.0),
            _pair("sites", 1.0, nothing),
        ]
    )
    assert mixed.ratio == pytest.approx(1.0)
    half = 1.96 * math.log(2) / math.sqrt(3)
    assert mixed.low == pytest.approx(math.exp(-half))
    assert mixed.high == pytest.approx(math.exp(half))
    assert (mixed.worlds, mixed.wins, mixed.losses) == (3, 1, 1)
    assert sites.ratio is None
    assert sites.low is None
    assert (sites.worlds, sites.wins, sites.losses) == (2, 1, 1)


def test_there_is_somebody_to_compare_with() -> None:
    with pytest.raises(ValueError, match="nobody to compare with"):
        compare([], LearnedPartitioner(), [], budget_s=1.0)
