"""Matching, tour and search against trying everything on small networks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planner.errors import ClusterError
from planner.search.dtfm import Communication, memetic_search, place
from planner.search.dtfm.cost import (
    EXACT_GROUPS,
    bottleneck_matching,
    open_tour,
    seconds_of,
)


def symmetric(rng: np.random.Generator, size: int) -> np.ndarray:
    weights = rng.random((size, size))
    return weights + weights.T


def network(seed: int, size: int, groups: int) -> Communication:
    rng = np.random.default_rng(seed)
    return Communication.between(
        symmetric(rng, size) * 1e9,
        symmetric(rng, size) * 1e-2,
        dp_bytes=6e8,
        pp_bytes=5e8,
        groups=groups,
    )


def shortest(weights: np.ndarray) -> float:
    count = len(weights)
    return min(
        sum(weights[a, b] for a, b in itertools.pairwise(path))
        for path in itertools.permutations(range(count))
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_the_matching_is_the_best_of_all(size: int) -> None:
    rng = np.random.default_rng(size)
    for repeated in [False, True] * 20:
        weights = rng.random((size, size))
        if repeated:
            weights = np.round(weights * 3)
        best = min(
            max(weights[row, column] for row, column in enumerate(columns))
            for columns in itertools.permutations(range(size))
        )
        found, column = bottleneck_matching(weights)
        assert found == best
        assert sorted(column.tolist()) == list(range(size))
        assert weights[np.arange(size), column].max() == best


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_the_tour_is_the_shortest_of_all(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(5):
        weights = symmetric(rng, size)
        found, path = open_tour(weights)
        assert found == pytest.approx(shortest(weights))
        assert sorted(path.tolist()) == list(range(size))
        assert sum(
            weights[a, b] for a, b in itertools.pairwise(path.tolist())
        ) == pytest.approx(found)


def test_a_long_tour_is_found_too() -> None:
    """On a line the shortest tour is known, however many groups there are."""
    rng = np.random.default_rng(0)
    places = rng.permutation(EXACT_GROUPS + 18).astype(float)
    found, path = open_tour(np.abs(places[:, None] - places[None, :]))
    assert found == len(places) - 1
    assert sorted(path.tolist()) == list(range(len(places)))


def every_division(count: int, groups: int) -> set[tuple[int, ...]]:
    slots = np.repeat(np.arange(groups), count // groups).tolist()
    return set(itertools.permutations(slots))


@pytest.mark.parametrize(("size", "groups"), [(4, 2), (6, 3), (8, 2), (6, 1), (4, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_search_finds_the_best_of_all(size: int, groups: int, seed: int) -> None:
    made = network(seed, size, groups)
    best = min(
        seconds_of(made.dp_s, made.pp_s, np.array(division), groups)
        for division in every_division(size, groups)
    )
    found = memetic_search(made, population=20, offspring=400, seed=seed)
    assert found.best.seconds == pytest.approx(best, rel=1e-9)


def test_seconds_are_those_of_the_definition() -> None:
    made = network(3, 6, 2)
    group = np.array([0, 1, 0, 1, 1, 0])
    one, other = np.flatnonzero(group == 0), np.flatnonzero(group == 1)
    slowest = max(
        made.dp_s[np.ix_(part, part)].sum(axis=1).max() for part in (one, other)
    )
    apart = min(
        max(made.pp_s[a, b] for a, b in zip(one, mates, strict=True))
        for mates in itertools.permutations(other)
    )
    found = place(made, group)
    assert found.dp_s == pytest.approx(slowest)
    assert found.pp_s == pytest.approx(apart)
    assert found.seconds == seconds_of(made.dp_s, made.pp_s, group, 2)
    assert sorted(found.grid.reshape(-1).tolist()) == list(range(6))
    assert made.pp_s[found.grid[0], found.grid[1]].max() == pytest.approx(apart)


def test_the_formula_of_a_link() -> None:
    bandwidth = np.array([[0, 1e9], [3e9, 0]])
    latency = np.array([[0, 1e-3], [3e-3, 0]])
    made = Communication.between(
        bandwidth, latency, dp_bytes=4e8, pp_bytes=1e8, groups=1
    )
    # Means of both ways: 2 GB/s and 2 ms; two members hold half the gradients each.
    assert made.dp_s[0, 1] == pytest.approx(2 * (2e-3 + 2e8 / 2e9))
    assert made.pp_s[1, 0] == pytest.approx(2 * (2e-3 + 1e8 / 2e9))
    assert made.dp_s[0, 0] == made.pp_s[1, 1] == 0.0


def test_the_same_seed_finds_the_same() -> None:
    made = network(5, 12, 3)
    first, second = (
        memetic_search(made, population=6, offspring=30, seed=4) for _ in range(2)
    )
    assert np.array_equal(first.best.grid, second.best.grid)
    assert np.array_equal(first.population, second.population)
    other = memetic_search(made, population=6, offspring=30, seed=5)
    assert not np.array_equal(first.population, other.population)


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ClusterError, match="groups=4 does not divide 6 devices"):
        network(0, 6, 4)
    with pytest.raises(ClusterError, match=r"groups of \[4, 2\] devices"):
        place(network(0, 6, 2), np.array([0, 0, 0, 0, 1, 1]))
