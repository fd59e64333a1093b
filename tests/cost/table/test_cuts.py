"""Balanced cuts against every cut there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.table.cuts import balanced_bounds


def bottleneck(seconds: np.ndarray, types: list[int], bounds: tuple[int, ...]) -> float:
    """Slowest stage of one cut. ``seconds`` has shape [T, units]."""
    pieces = itertools.pairwise(bounds)
    return max(
        float(seconds[kind, start:stop].sum())
        for kind, (start, stop) in zip(types, pieces, strict=True)
    )


def every_cut(units: int, stages: int) -> list[tuple[int, ...]]:
    inner = itertools.combinations(range(1, units), stages - 1)
    return [(0, *cut, units) for cut in inner]


@settings(deadline=None, max_examples=120)
@given(
    seconds=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    speed=st.sampled_from([1.0, 0.5, 3.0]),
    data=st.data(),
)
def test_no_cut_has_a_faster_slowest_stage(
    seconds: list[int], speed: float, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(seconds)))
    types = data.draw(st.lists(st.integers(0, 1), min_size=stages, max_size=stages))
    values = np.array([seconds, [s * speed for s in seconds]], dtype=float)
    bounds = balanced_bounds(
        values[:, None], np.array([0]), np.array([types]), np.array([stages])
    )[0]
    found = tuple(bounds.tolist())
    assert found in every_cut(len(seconds), stages)
    best = min(bottleneck(values, types, c) for c in every_cut(len(seconds), stages))
    assert bottleneck(values, types, found) <= best * (1 + 1e-6) + 1e-6


def test_of_cuts_with_one_slowest_stage_the_most_even_is_taken() -> None:
    # Filled up from the left, stages before a head of 3 units would be 3, 3, 3, 1, 1.
    seconds = np.array([[1.0] * 11 + [3.0]])
    bounds = balanced_bounds(
        seconds[:, None], np.array([0]), np.zeros((1, 6), int), np.array([6])
    )[0]
    assert sorted(np.diff(bounds).tolist()) == [1, 2, 2, 2, 2, 3]


def test_a_stage_on_a_device_of_twice_the_speed_gets_twice_the_units() -> None:
    seconds = np.array([[1.0] * 12, [2.0] * 12])
    bounds = balanced_bounds(
        seconds[:, None], np.array([0]), np.array([[0, 1, 0]]), np.array([3])
    )[0]
    # 12 units on speeds 1, 1/2, 1: 5, 2, 5 with a slowest stage of 5.
    assert np.diff(bounds).tolist() == [5, 2, 5]


def test_many_problems_at_once_are_padded_with_the_number_of_units() -> None:
    seconds = np.stack([np.ones((1, 6)), np.arange(6.0)[None]], axis=1)
    bounds = balanced_bounds(
        seconds,
        np.array([0, 1, 0]),
        np.zeros((3, 3), dtype=np.int64),
        np.array([3, 2, 1]),
    )
    assert bounds.tolist() == [[0, 2, 4, 6], [0, 4, 6, 6], [0, 6, 6, 6]]


@pytest.mark.parametrize("units", [1, 5])
def test_as_many_stages_as_units_give_one_each(units: int) -> None:
    bounds = balanced_bounds(
        np.ones((1, 1, units)),
        np.array([0]),
        np.zeros((1, units), dtype=np.int64),
        np.array([units]),
    )
    assert bounds[0].tolist() == list(range(units + 1))


@pytest.mark.parametrize("types", [[0, 0, 0, 0], [0, 1, 1, 0]], ids=["one", "two"])
def test_long_uneven_chains_are_cut_as_well_as_can_be(types: list[int]) -> None:
    random = np.random.default_rng(3)
    seconds = random.uniform(0.1, 1.0, 24)
    values = np.stack([seconds, 2 * seconds])
    found = balanced_bounds(
        values[:, None], np.array([0]), np.array([types]), np.array([4])
    )[0]
    best = min(bottleneck(values, types, cut) for cut in every_cut(24, 4))
    slowest = bottleneck(values, types, tuple(found.tolist()))
    assert slowest == pytest.approx(best, rel=1e-6)


def test_problems_on_one_and_on_several_types_are_cut_side_by_side() -> None:
    values = np.array([[1.0] * 12, [2.0] * 12])[:, None]
    types = np.array([[0, 1, 0], [1, 1, 1], [0, 0, 7]])
    bounds = balanced_bounds(values, np.zeros(3, int), types, np.array([3, 3, 2]))
    assert bounds.tolist() == [[0, 5, 7, 12], [0, 4, 8, 12], [0, 6, 12, 12]]
