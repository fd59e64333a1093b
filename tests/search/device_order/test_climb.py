"""Small changes of arrangements, and where a series of them leads."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.schema.cluster import DeviceType
from planner.search.device_order.climb import (
    Limits,
    best_of,
    climb,
    joined,
    random_neighbours,
)
from planner.search.device_order.pricer import OrderPricer, Priced
from tests.cost.made import device, hosts
from tests.search.device_order.made import far_sites, mixed_hosts, opened


def _start(pricer: OrderPricer) -> Priced:
    layouts = pricer.layouts
    return pricer.price(np.arange(len(layouts)), layouts.sequence)


@pytest.mark.parametrize("seed", range(4))
def test_neighbours_are_permutations_of_the_usable_groups(seed: int) -> None:
    rng = np.random.default_rng(seed)
    many = int(rng.integers(1, 9))
    usable = rng.random((5, many)) < 0.6
    usable[np.arange(5), rng.integers(many, size=5)] = True
    layout = rng.integers(5, size=200)
    sequence = np.full((200, many), -1, dtype=np.int64)
    for row, at in enumerate(layout):
        members = rng.permutation(np.flatnonzero(usable[at]))
        sequence[row, : len(members)] = members
    kept = sequence.copy(), layout.copy()
    others = set()
    for _ in range(5):
        changed, groups = random_neighbours(layout, sequence, usable, rng)
        for at, row in zip(changed, groups, strict=True):
            members = np.flatnonzero(usable[at]).tolist()
            assert sorted(row[: len(members)].tolist()) == members
            assert (row[len(members) :] == -1).all()
        others |= set(changed[changed != layout].tolist())
        # What they are changed from stays as it is.
        assert (sequence == kept[0]).all()
        assert (layout == kept[1]).all()
        layout, sequence = changed, groups
        kept = sequence.copy(), layout.copy()
    assert len(others) > 1


def test_a_change_of_layout_keeps_the_order_of_what_stays() -> None:
    usable = np.array([[True] * 6, [True, False, True, True, False, True]])
    rng = np.random.default_rng(0)
    whole = np.tile(rng.permutation(6), (400, 1))
    layout, sequence = random_neighbours(np.zeros(400, np.int64), whole, usable, rng)
    moved = sequence[layout == 1]
    stays = [g for g in whole[0].tolist() if usable[1, g]]
    assert len(moved)
    assert (moved[:, :4] == stays).all()


def test_every_change_of_three_groups_is_made() -> None:
    rng = np.random.default_rng(0)
    usable = np.ones((1, 3), dtype=bool)
    start = np.tile(np.arange(3), (500, 1))
    _, sequence = random_neighbours(np.zeros(500, np.int64), start, usable, rng)
    met = set(map(tuple, sequence.tolist()))
    assert met == set(itertools.permutations(range(3)))


@pytest.mark.parametrize("cluster", [mixed_hosts(), far_sites(8, 3)])
def test_climbing_never_gets_worse_and_is_the_same_again(cluster: Cluster) -> None:
    pricer, _ = opened(cluster)
    start = _start(pricer)
    scores = []
    for rounds in (1, 5, 25):
        ends = [
            climb(pricer, start, np.random.default_rng(3), Limits(rounds=rounds))
            for _ in range(2)
        ]
        for name in ("layout", "sequence", "row", "score"):
            assert (getattr(ends[0], name) == getattr(ends[1], name)).all()
        found = ends[0]
        assert (np.diff(found.score) >= 0).all()
        again = pricer.price(found.layout, found.sequence)
        assert again.score == pytest.approx(found.score, rel=1e-12)
        scores.append(float(found.score[0]))
    assert scores[0] <= start.score.min()
    # The same draws go on where the shorter climb ended.
    assert scores == sorted(scores, reverse=True)


def _slow() -> DeviceType:
    peaks = {"float32": 2e13, "bfloat16": 4e13}
    return device("slow", memory_bytes=40e9, peak_flops_per_s=peaks)


#: A cluster of five groups, a request, and whether a plain order is the best of all.
SMALL: tuple[tuple[Cluster, dict[str, Any], bool], ...] = (
    (
        hosts((1, 1, _slow()), (1, 2, device()), (1, 2, _slow()), (2, 1, device())),
        {"objective": "throughput"},
        False,
    ),
    (
        hosts((1, 2, _slow()), (1, 3, device()), (1, 1, device()), (1, 2, _slow())),
        {"objective": "throughput_per_device"},
        True,
    ),
    (
        far_sites(5, 2, seed=1),
        {"units": 9, "global_batch": 24, "devices": "any"},
        False,
    ),
)


@pytest.mark.parametrize(("cluster", "changes", "plain"), SMALL)
def test_it_finds_the_best_of_all_arrangements(
    cluster: Cluster, changes: dict[str, Any], plain: bool
) -> None:
    pricer, _ = opened(cluster, **changes)
    layouts = pricer.layouts
    layout, sequence = [], []
    for at, usable in enumerate(layouts.usable):
        members = np.flatnonzero(usable)
        for permuted in itertools.permutations(members.tolist()):
            layout.append(at)
            sequence.append([*permuted, *[-1] * (len(usable) - len(members))])
    every = pricer.price(np.array(layout), np.array(sequence))
    start = _start(pricer)
    # Few groups: it ends by itself.
    found = climb(pricer, start, np.random.default_rng(0), Limits())
    assert found.score[0] == pytest.approx(every.score.min(), rel=1e-12)
    assert (every.score.min() > 0.999 * start.score.min()) == plain


def test_a_lone_group_can_only_change_its_layout() -> None:
    pricer, _ = opened(hosts((1, 8, device())))
    start = _start(pricer)
    found = climb(pricer, start, np.random.default_rng(0), Limits(rounds=3))
    assert found.score[0] == start.score.min()
    assert (found.sequence == 0).all()


def test_time_that_is_up_leaves_the_best_as_it_was() -> None:
    pricer, _ = opened(mixed_hosts())
    start = _start(pricer)
    before = pricer.model.evaluations["analytic"]
    found = climb(pricer, start, np.random.default_rng(0), Limits(until=0.0))
    assert pricer.model.evaluations["analytic"] == before
    assert found.score[0] == start.score.min()


def test_the_best_are_different_and_share_layouts_fairly() -> None:
    score = np.array([3.0, 1.0, 1.0, 2.0, np.inf, 1.5])
    priced = Priced(
        layout=np.array([0, 1, 1, 1, 0, 1]),
        sequence=np.zeros((6, 1), dtype=np.int64),
        row=np.arange(6),
        score=score,
    )
    assert best_of(priced, 10).row.tolist() == [1, 5, 3, 0]
    assert best_of(priced, 2).row.tolist() == [1, 5]
    assert best_of(priced, 10, of_layout=2).row.tolist() == [1, 5, 0]
    both = joined([priced[:2], priced[2:]])
    assert (both.score == score).all()
    nothing = best_of(priced[4:5], 3)
    assert len(nothing) == 0


def test_nothing_to_begin_with_gives_nothing() -> None:
    pricer, _ = opened(mixed_hosts())
    nothing = _start(pricer)[:0]
    found = climb(pricer, nothing, np.random.default_rng(0), Limits(rounds=5))
    assert len(found) == 0
