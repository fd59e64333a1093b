"""Orders drawn by scores and by moves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planner.split import Groups, best_along, group, standard_orders
from policies.split.moves import sample_moves
from policies.split.orders import sample_orders
from tests.split.cases import document, task_of


def small(seed: int) -> Groups:
    """A graph of five groups."""
    return group(task_of(document(np.random.default_rng(seed), nodes=5)))


def all_orders(groups: Groups) -> list[tuple[int, ...]]:
    """Every order of the groups, by trying all."""
    pairs = [
        (at, int(after))
        for at in range(len(groups))
        for after in groups.after[groups.after_start[at] : groups.after_start[at + 1]]
    ]
    return [
        order
        for order in itertools.permutations(range(len(groups)))
        if all(order.index(u) < order.index(v) for u, v in pairs)
    ]


def log_probability(groups: Groups, scores: np.ndarray, order: np.ndarray) -> float:
    """The definition, read aloud."""
    total, placed = 0.0, set()
    for at in order.tolist():
        ready = [
            g
            for g in range(len(groups))
            if g not in placed
            and placed.issuperset(
                groups.before[groups.before_start[g] : groups.before_start[g + 1]]
            )
        ]
        assert at in ready
        total += scores[at] - np.log(np.exp(scores[ready]).sum())
        placed.add(at)
    return float(total)


def test_orders_put_producers_first_and_go_by_the_seed(pool: list[Groups]) -> None:
    for groups in pool:
        scores = np.random.default_rng(1).normal(size=(6, len(groups)))
        orders, _ = sample_orders(groups, scores, np.random.default_rng(2))
        again, _ = sample_orders(groups, scores, np.random.default_rng(2))
        np.testing.assert_array_equal(orders, again)
        for order in orders:
            groups.checked(order)


def test_orders_are_as_likely_as_their_scores_say() -> None:
    groups = small(0)
    scores = np.random.default_rng(3).normal(size=len(groups))
    draws = 20_000
    orders, _ = sample_orders(
        groups, np.repeat(scores[None], draws, axis=0), np.random.default_rng(4)
    )
    expected = all_orders(groups)
    assert len(expected) > 3
    for order in expected:
        seen = float((orders == np.array(order)).all(axis=1).mean())
        chance = np.exp(log_probability(groups, scores, np.array(order)))
        assert seen == pytest.approx(chance, abs=0.015)


def test_slopes_are_those_of_the_log_probability() -> None:
    groups, step = small(1), 1e-5
    scores = np.random.default_rng(5).normal(size=len(groups))
    orders, slopes = sample_orders(
        groups, np.repeat(scores[None], 4, axis=0), np.random.default_rng(6)
    )
    for order, slope in zip(orders, slopes, strict=True):
        for at in range(len(groups)):
            up, down = scores.copy(), scores.copy()
            up[at] += step
            down[at] -= step
            rise = log_probability(groups, up, order)
            rise -= log_probability(groups, down, order)
            assert slope[at] == pytest.approx(rise / (2 * step), abs=1e-6)


def test_moves_give_orders_and_may_reach_every_one() -> None:
    groups = small(2)
    order = np.array(all_orders(groups)[0])
    even = np.zeros((len(groups), 2))
    found = {tuple(order)}
    for seed in range(300):
        rng = np.random.default_rng(seed)
        order = sample_moves(groups, order, even, 1, rng)[0][0]
        found.add(tuple(groups.checked(order).tolist()))
    assert found == set(all_orders(groups))


def test_moves_are_of_the_groups_that_score_high(pool: list[Groups]) -> None:
    for groups in pool:
        order = next(iter(standard_orders(groups)))
        scores = np.zeros((len(groups), 2))
        scores[4, 1] = 50.0
        orders, taken = sample_moves(groups, order, scores, 5, np.random.default_rng(0))
        assert (taken.sum(axis=(1, 2)) == taken[:, 4, 1]).all()
        before = np.flatnonzero(order == 4)[0]
        for moved in orders:
            groups.checked(moved)
            assert np.flatnonzero(moved == 4)[0] >= before
            np.testing.assert_array_equal(
                moved[:before], order[:before]
            )  # what stands before it stays
            assert best_along(groups, moved) is not None or groups.task.cpus == 0
