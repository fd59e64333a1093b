"""The sample of meshes that is offered where there are too many."""

from __future__ import annotations

import numpy as np
import pytest

from envs.partition.problem import subset, thinned, with_rows
from planner.search.device_order.subsets import Choices, DeviceSubset
from planner.space import expand_meshes
from tests.search.device_order.made import mixed_hosts, prepared


def _choices(*many: int) -> Choices:
    subset = DeviceSubset(
        count=1, usable=np.ones(1, dtype=bool), sequences=np.zeros((1, 1), np.int64)
    )
    total = sum(many)
    return Choices(
        subsets=(subset,) * len(many),
        mesh=np.arange(6 * total).reshape(total, 6),
        subset=np.repeat(np.arange(len(many)), many),
    )


@pytest.mark.parametrize("most", [3, 10, 50, 110])
def test_every_subset_keeps_its_share(most: int) -> None:
    choices = _choices(100, 4, 10)
    kept = thinned(choices, np.arange(114), most)
    assert len(kept) == len(set(kept.tolist())) == most
    assert (np.diff(kept) > 0).all()
    per = np.bincount(choices.subset[kept], minlength=3)
    # What a small subset does not need goes to the others.
    fair = {3: [1, 1, 1], 10: [4, 3, 3], 50: [36, 4, 10], 110: [96, 4, 10]}
    assert per.tolist() == fair[most]


def test_both_ends_of_a_subset_are_kept() -> None:
    kept = thinned(_choices(100), np.arange(100), 12)
    assert kept[0] == 0
    assert kept[-1] == 99
    gaps = np.diff(kept)
    assert gaps.max() - gaps.min() <= 1


def test_few_are_kept_as_they_are() -> None:
    choices = _choices(5, 5)
    among = np.array([1, 4, 7])
    assert thinned(choices, among, 3).tolist() == [1, 4, 7]
    assert set(thinned(choices, among, 2).tolist()) <= {1, 4, 7}
    # More subsets than room: the first ones.
    assert choices.subset[thinned(_choices(3, 3, 3), np.arange(9), 2)].tolist() == [
        0,
        0,
    ]


def test_a_subset_keeps_subsets_and_their_numbers() -> None:
    choices = _choices(3, 4)
    some = subset(choices, np.array([2, 5]))
    assert some.subsets == choices.subsets
    assert some.subset.tolist() == [0, 1]
    assert (some.mesh == choices.mesh[[2, 5]]).all()


def test_meshes_without_a_legal_row_are_told_apart() -> None:
    request, _, choices = prepared(mixed_hosts(), devices="any")
    kept = set(with_rows(request, choices).tolist())
    for at in range(len(choices)):
        rows = expand_meshes(choices.mesh[[at]], request.facts, request.pins)
        assert (at in kept) == (len(rows) > 0)
    assert 0 < len(kept) < len(choices)
    assert len(with_rows(request, subset(choices, np.zeros(0, np.int64)))) == 0
