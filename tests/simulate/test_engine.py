from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from planner.errors import StrategyError
from planner.simulate import actions, evaluate, makespan
from tests.simulate import reference
from tests.simulate.cases import legal

CASES = legal((1, 2, 3, 4, 6), (1, 2, 3), (1, 6, 12, 13))


def _random(case: tuple[str, int, int, int], batch: int) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(case[1:]))
    stages = case[1] * case[2]
    compute = [rng.uniform(0.2, 2.0, (batch, stages)) for _ in range(3)]
    sends = [rng.uniform(0.0, 0.8, (batch, stages - 1)) for _ in range(2)]
    return compute + sends


@pytest.mark.parametrize("case", CASES)
def test_makespan_is_that_of_a_plain_simulation(
    case: tuple[str, int, int, int],
) -> None:
    table, times = actions(*case), _random(case, 11)
    found = makespan(table, *times)
    for index in range(11):
        expected = reference.simulate(table, *(part[index] for part in times))
        assert found[index] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (4, 4), (4, 32), (16, 128)])
def test_fill_and_drain_take_pp_minus_one_turns(
    schedule: str, pp: int, microbatches: int
) -> None:
    table = actions(schedule, pp, 1, microbatches)
    assert makespan(table, 1.0, 2.0) == pytest.approx(3.0 * (microbatches + pp - 1))


@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_virtual_stages_divide_the_bubble(virtual: int) -> None:
    table = actions("Interleaved1F1B", 16, virtual, 128)
    found = makespan(table, 1.0 / virtual, 2.0 / virtual)
    assert found == pytest.approx(3.0 * (128 + 15 / virtual))


def test_zero_bubble_1p_fills_with_weight_gradients() -> None:
    table = actions("InterleavedZeroBubble", 16, 1, 128)
    assert makespan(table, 1.0, 1.0, 1.0) == pytest.approx(3.0 * 128 + 15.0)


def test_gpipe_waits_for_its_slowest_stage() -> None:
    forward, backward = np.array([1.0, 3.0, 2.0]), np.array([2.0, 1.0, 4.0])
    found = makespan(actions("GPipe", 3, 1, 10), forward, backward)
    assert found == pytest.approx(6.0 + 9 * 3.0 + 7.0 + 9 * 4.0)


def test_transfers_between_ranks_delay_and_those_within_do_not() -> None:
    looped = actions("GPipe", 3, 1, 1)
    assert makespan(looped, 1.0, 1.0, None, 0.5, 0.25) == pytest.approx(7.5)
    one_rank = actions("LoopedBFS", 1, 3, 1)
    assert makespan(one_rank, 1.0, 1.0, None, 0.5, 0.25) == pytest.approx(6.0)
    folded = actions("ZBVZeroBubble", 2, 2, 1)
    sends = np.array([0.0, 9.0, 0.0])
    assert makespan(folded, 1.0, 1.0, 0.0, sends, sends) == pytest.approx(8.0)


@pytest.mark.parametrize("case", CASES[::5])
def test_busy_time_and_end_of_backward(case: tuple[str, int, int, int]) -> None:
    table, times = actions(*case), _random(case, 3)
    found = evaluate(table, *times)
    work = case[3] * (times[0] + times[1] + times[2])
    for rank in range(table.pp):
        expected = work[:, table.rank_of_stage == rank].sum(axis=1)
        np.testing.assert_allclose(found.busy_s[:, rank], expected)
    np.testing.assert_allclose(found.backward_done_s.max(axis=1), found.makespan_s)
    assert (found.backward_done_s >= work * (1 - 1e-12)).all()
    bubble = 1 - found.busy_s / found.makespan_s[:, None]
    np.testing.assert_allclose(found.bubble_fraction, bubble)


def test_first_stage_ends_last_in_1f1b() -> None:
    found = evaluate(actions("1F1B", 4, 1, 8), 1.0, 2.0)
    np.testing.assert_allclose(found.backward_done_s, [33.0, 31.0, 29.0, 27.0])


def test_batch_keeps_its_shape_and_matches_single_candidates() -> None:
    table = actions("1F1B", 4, 1, 8)
    rng = np.random.default_rng(5)
    forward = rng.uniform(1, 2, (3, 7, 4))
    found = makespan(table, forward, 2 * forward)
    assert found.shape == (3, 7)
    for index in np.ndindex(3, 7):
        assert makespan(table, forward[index], 2 * forward[index]) == found[index]


def test_durations_broadcast() -> None:
    table = actions("1F1B", 4, 1, 8)
    forward = np.arange(1.0, 6.0)[:, None]
    with pytest.raises(StrategyError, match=r"forward_s has shape \[5, 1\]"):
        makespan(table, forward, 2.0)
    found = makespan(table, forward * np.ones(4), np.ones((2, 1, 4)))
    assert found.shape == (2, 5)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_durations_must_be_times(bad: float) -> None:
    with pytest.raises(StrategyError, match="backward_s has a value"):
        makespan(actions("1F1B", 2, 1, 4), 1.0, [1.0, bad])


def test_a_circle_of_waiting_ranks_is_an_error() -> None:
    table = actions("GPipe", 2, 1, 2)
    microbatch = table.microbatch.copy()
    kind = table.kind.copy()
    kind[table.offsets[1] :] = [1, 0, 0, 1]
    broken = dataclasses.replace(table, kind=kind, microbatch=microbatch)
    with pytest.raises(StrategyError, match="deadlocks"):
        makespan(broken, 1.0, 1.0)


def test_rendezvous_holds_the_sender_until_the_receiver_takes() -> None:
    table = actions("GPipe", 2, 1, 3)
    # Stage 0 would run its forwards at 0, 1, 2; stage 1 takes each one 0.5 after it
    # has ended the one before, and stage 0 goes on only then.
    forward, backward = np.array([1.0, 4.0]), np.array([1.0, 1.0])
    sends = np.array([0.5])
    free = makespan(table, forward, backward, None, sends, sends)
    held = makespan(table, forward, backward, None, sends, sends, rendezvous=True)
    assert free == pytest.approx(1.5 + 3 * 4 + 3 + 0.5 + 1)
    # Forwards of stage 1 start at 1.5, 6, 10.5 and end at 14.5; its backwards then end
    # at 15.5, 17 (0.5 to hand over), 18.5; the last hand-over and backward follow.
    assert held == pytest.approx(18.5 + 0.5 + 1)


@pytest.mark.parametrize("case", legal((2, 4), (1,), (8,)))
def test_rendezvous_is_never_faster(case: tuple[str, int, int, int]) -> None:
    table, times = actions(*case), _random(case, 4)
    waiting = makespan(table, *times, rendezvous=True)
    assert (waiting >= makespan(table, *times) - 1e-12).all()


def test_rendezvous_names_the_schedules_that_deadlock() -> None:
    with pytest.raises(StrategyError, match="use rendezvous=False"):
        makespan(actions("DualPipeV", 4, 2, 8), 1.0, 1.0, 1.0, rendezvous=True)
