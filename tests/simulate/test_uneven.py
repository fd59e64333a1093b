"""Closed forms of uneven stages against the engine."""

from __future__ import annotations

import numpy as np
import pytest

from planner.simulate import actions, closed_form_of_stages, makespan
from planner.simulate.closed_form import (
    breadth_first_makespan,
    one_by_one_makespan,
    steady_microbatch_seconds,
)
from planner.simulate.durations import FloatArray


def _stages(seed: int, count: int, *batch: int) -> FloatArray:
    return np.random.default_rng(seed).uniform(0.2, 3.0, (*batch, count))


@pytest.mark.parametrize("sends", [0.0, 0.05, 2.0])
@pytest.mark.parametrize(
    ("pp", "virtual", "many"), [(2, 1, 1), (2, 3, 5), (4, 2, 2), (4, 5, 16), (8, 2, 3)]
)
def test_breadth_first_is_exact(pp: int, virtual: int, many: int, sends: float) -> None:
    stages = pp * virtual
    forward, backward = _stages(1, stages, 7), _stages(2, stages, 7)
    there, back = (sends * _stages(seed, stages - 1, 7) for seed in (3, 4))
    table = actions("LoopedBFS", pp, virtual, many)
    exact = makespan(table, forward, backward, None, there, back)
    found = breadth_first_makespan(pp, many, forward, backward, there, back)
    np.testing.assert_allclose(found, exact, rtol=1e-12)


@pytest.mark.parametrize("sends", [0.0, 0.05, 0.3])
@pytest.mark.parametrize(
    ("pp", "many"), [(2, 2), (2, 9), (3, 7), (4, 4), (4, 5), (8, 9), (8, 64)]
)
def test_one_by_one_is_a_close_lower_bound(pp: int, many: int, sends: float) -> None:
    forward, backward = _stages(5, pp, 40), 2 * _stages(6, pp, 40)
    hops = sends * _stages(7, pp - 1, 40)
    exact = makespan(actions("1F1B", pp, 1, many), forward, backward, None, hops, hops)
    ratio = one_by_one_makespan(pp, many, forward, backward, 2 * hops) / exact
    assert ratio.max() <= 1 + 1e-12
    assert ratio.mean() > 0.96
    if pp == 2:
        np.testing.assert_allclose(ratio, 1.0, rtol=0.02)


@pytest.mark.parametrize(("pp", "many"), [(2, 2), (4, 4), (4, 33), (8, 64)])
def test_one_by_one_of_equal_stages_is_the_textbook(pp: int, many: int) -> None:
    ones, none = np.ones(pp), np.zeros(pp - 1)
    found = one_by_one_makespan(pp, many, ones, 2 * ones, none)
    assert found == pytest.approx(3 * (many + pp - 1))


def test_one_rank_waits_for_nobody() -> None:
    work = np.array([[3.0], [1.0]])
    found = one_by_one_makespan(1, 5, work, work, np.zeros((2, 0)))
    np.testing.assert_allclose(found, [30.0, 10.0])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("pp", "virtual", "many"), [(2, 2, 8), (4, 3, 12), (8, 4, 18)])
def test_equal_stages_go_round_at_the_pace_of_any(
    pp: int, virtual: int, many: int, split: bool
) -> None:
    ones = np.ones(pp * virtual)
    found = steady_microbatch_seconds(
        pp, virtual, many, ones, 2 * ones, ones, split_backward=split
    )
    assert found == pytest.approx(3 * virtual, rel=1e-12)


@pytest.mark.parametrize("split", [False, True])
def test_the_slowest_rank_is_a_lower_bound(split: bool) -> None:
    forward, backward = _stages(6, 12, 50), 2 * _stages(7, 12, 50)
    found = steady_microbatch_seconds(
        4, 3, 16, forward, backward, backward / 2, split_backward=split
    )
    slowest = (forward + backward).reshape(50, 3, 4).sum(axis=1).max(axis=1)
    assert (found >= slowest * (1 - 1e-12)).all()
    assert (found > slowest * 1.01).any()


@pytest.mark.parametrize(
    ("schedule", "split"), [("Interleaved1F1B", False), ("InterleavedZeroBubble", True)]
)
@pytest.mark.parametrize(("pp", "virtual"), [(4, 4), (4, 6), (8, 4)])
def test_what_a_round_more_takes(
    schedule: str, split: bool, pp: int, virtual: int
) -> None:
    """Much nearer than the work of the slowest rank, which is what it replaces."""
    forward = 1 + _stages(8, pp * virtual, 60)
    input_s, weight = forward * 1.1, forward * 0.9
    short, long = (
        makespan(actions(schedule, pp, virtual, rounds * pp), forward, input_s, weight)
        for rounds in (6, 14)
    )
    exact = (long - short) / (8 * pp)
    found = steady_microbatch_seconds(
        pp, virtual, 8 * pp, forward, input_s + weight, weight, split_backward=split
    )
    slowest = (3 * forward).reshape(60, virtual, pp).sum(axis=1).max(axis=1)
    error, before = (np.abs(x / exact - 1).mean() for x in (found, slowest))
    assert error < 0.02
    assert error < 0.6 * before


def test_many_candidates_as_one_by_one() -> None:
    forward, backward = _stages(9, 8, 3), _stages(10, 8, 3)
    for schedule in ("1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"):
        pp, virtual = (8, 1) if schedule == "1F1B" else (4, 2)
        times = (forward, backward, forward / 2, 0.1)
        together = closed_form_of_stages(schedule, pp, virtual, 16, *times)
        alone = [
            closed_form_of_stages(
                schedule, pp, virtual, 16, forward[i], backward[i], forward[i] / 2, 0.1
            )
            for i in range(3)
        ]
        np.testing.assert_allclose(together, alone, rtol=1e-12)
