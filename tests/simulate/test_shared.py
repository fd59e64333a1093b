from __future__ import annotations

import numpy as np
import pytest

from planner.errors import StrategyError
from planner.simulate import actions, evaluate, simulate_shared
from planner.simulate.event_loops import LANES, MAX_RANKS
from tests.simulate import reference
from tests.simulate.cases import legal

CASES = legal((1, 2, 3, 4, 6), (1, 2, 3), (1, 6, 12))


def _random(case: tuple[str, int, int, int], batch: int) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(case[1:]))
    stages = case[1] * case[2]
    compute = [rng.uniform(0.2, 2.0, (batch, stages)) for _ in range(3)]
    return compute + [rng.uniform(0.0, 0.8, (batch, stages - 1)) for _ in range(2)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("slots", [None, [64.0]])
def test_without_contention_it_is_the_static_engine(
    case: tuple[str, int, int, int], slots: list[float] | None
) -> None:
    table, times = actions(*case), _random(case, 3)
    found = simulate_shared(table, *times, slots_of_host=slots)
    expected = evaluate(table, *times)
    np.testing.assert_allclose(found.makespan_s, expected.makespan_s, rtol=1e-12)
    np.testing.assert_allclose(found.busy_s, expected.busy_s)
    np.testing.assert_allclose(
        found.backward_done_s, expected.backward_done_s, rtol=1e-12
    )


@pytest.mark.parametrize("case", CASES)
def test_shared_links_as_in_a_plain_simulation(
    case: tuple[str, int, int, int],
) -> None:
    table, times = actions(*case), _random(case, 4)
    rng = np.random.default_rng(1)
    links = rng.integers(-1, 3, (2, table.num_stages - 1))
    found = simulate_shared(
        table, *times, link_of_forward=links[0], link_of_backward=links[1]
    )
    for index in range(4):
        expected = reference.simulate(table, *(part[index] for part in times), *links)
        assert found.makespan_s[index] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_links_of_one_sender_as_in_a_plain_simulation(
    case: tuple[str, int, int, int],
) -> None:
    table, times = actions(*case), _random(case, 2)
    rank = table.rank_of_stage
    links = rank[:-1] * table.pp + rank[1:], rank[1:] * table.pp + rank[:-1]
    found = simulate_shared(
        table, *times, link_of_forward=links[0], link_of_backward=links[1]
    )
    # Cores that nobody waits for: the same by an event loop.
    looped = simulate_shared(
        table,
        *times,
        link_of_forward=links[0],
        link_of_backward=links[1],
        slots_of_host=[64.0],
    )
    np.testing.assert_allclose(
        found.backward_done_s, looped.backward_done_s, rtol=1e-12
    )
    for index in range(2):
        expected = reference.simulate(table, *(part[index] for part in times), *links)
        assert found.makespan_s[index] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", CASES[::2])
@pytest.mark.parametrize("batch", [1, LANES - 1, LANES, 2 * LANES + 3])
def test_candidates_side_by_side_as_alone(
    case: tuple[str, int, int, int], batch: int
) -> None:
    table, times = actions(*case), _random(case, batch)
    links = np.zeros(table.num_stages - 1, dtype=int)
    shared = {"link_of_forward": links, "link_of_backward": links}
    together = simulate_shared(table, *times, **shared)
    for index in range(batch):
        alone = simulate_shared(table, *(part[index] for part in times), **shared)
        assert together.makespan_s[index] == alone.makespan_s
        assert (together.backward_done_s[index] == alone.backward_done_s).all()


@pytest.mark.parametrize("case", CASES[::5])
def test_ties_go_to_the_lower_rank(case: tuple[str, int, int, int]) -> None:
    # With equal whole numbers many events coincide, and nothing is rounded.
    table = actions(*case)
    stages = table.num_stages
    ones = [np.ones(stages)] * 3 + [np.ones(stages - 1)] * 2
    links = np.zeros(stages - 1, dtype=int)
    found = simulate_shared(table, *ones, link_of_forward=links, link_of_backward=links)
    assert found.makespan_s == reference.simulate(table, *ones, links, links)


def test_more_ranks_than_events_can_name() -> None:
    table = actions("GPipe", MAX_RANKS + 1, 1, 1)
    with pytest.raises(StrategyError, match="pp=4097 is more than the 4096 ranks"):
        simulate_shared(table, 1.0, 1.0)


@pytest.mark.parametrize("case", CASES[::3])
def test_many_slots_keep_the_order_of_links(
    case: tuple[str, int, int, int],
) -> None:
    table, times = actions(*case), _random(case, 2)
    links = np.zeros(table.num_stages - 1, dtype=int)
    shared = {"link_of_forward": links, "link_of_backward": links}
    plain = simulate_shared(table, *times, **shared)
    slots = simulate_shared(table, *times, **shared, slots_of_host=[float(table.pp)])
    np.testing.assert_allclose(plain.makespan_s, slots.makespan_s, rtol=1e-12)


def test_transfers_on_one_link_queue() -> None:
    table = actions("GPipe", 2, 1, 3)
    # Forwards end at 1, 2, 3; each takes 4 on the link: 5, 9, 13; stage 1 computes 1.
    # Its gradients leave from 15 on and take 4 each, on the same link or on another.
    forward, backward = np.array([1.0, 1.0]), np.array([1.0, 1.0])
    sends = np.array([4.0])
    own = simulate_shared(table, forward, backward, None, sends, sends)
    assert own.makespan_s == pytest.approx(3 + 4 + 1 + 3 + 4 + 1)
    queued = simulate_shared(
        table,
        forward,
        backward,
        None,
        sends,
        sends,
        link_of_forward=[0],
        link_of_backward=[1],
    )
    assert queued.makespan_s == pytest.approx(13 + 1 + 1 + 3 * 4 + 1)


def test_one_core_for_two_ranks_halves_the_rate_while_both_compute() -> None:
    table = actions("GPipe", 2, 1, 2)
    found = simulate_shared(table, 1.0, 1.0, slots_of_host=[1.0])
    # F0 on rank 0 to 1; F1 there and F0 on rank 1 together to 3; F1 on rank 1 to 4;
    # B0 on rank 1 to 5; B1 there and B0 on rank 0 together to 7; B1 on rank 0 to 8.
    assert found.makespan_s == pytest.approx(8.0)
    assert found.busy_s.tolist() == [4.0, 4.0]
    assert found.backward_done_s.tolist() == [8.0, 7.0]


def test_hosts_slow_down_apart() -> None:
    table = actions("GPipe", 2, 1, 2)
    apart = simulate_shared(
        table, 1.0, 1.0, host_of_rank=[0, 1], slots_of_host=[1.0, 1.0]
    )
    assert apart.makespan_s == pytest.approx(6.0)
    partly = simulate_shared(table, 1.0, 1.0, slots_of_host=[1.5])
    assert 6.0 < partly.makespan_s < 8.0


@pytest.mark.parametrize("case", CASES[::4])
@pytest.mark.parametrize("slots", [1.0, 1.5, 2.0])
def test_slots_bound_the_work_that_is_done(
    case: tuple[str, int, int, int], slots: float
) -> None:
    table, times = actions(*case), _random(case, 2)
    found = simulate_shared(table, *times, slots_of_host=[slots])
    work = found.busy_s.sum(axis=1) / min(slots, table.pp)
    free = evaluate(table, *times).makespan_s
    assert (found.makespan_s >= np.maximum(work, free) * (1 - 1e-12)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"link_of_forward": [0]}, "link_of_forward has shape"),
        ({"link_of_forward": [0.0, 1.0, 2.0]}, "dtype float64"),
        ({"link_of_backward": [-2, 0, 0]}, "link_of_backward has -2"),
        ({"host_of_rank": [0, 1, 2, 3], "slots_of_host": [1.0]}, "names host 3"),
        ({"slots_of_host": [0.0]}, "more than 0"),
    ],
)
def test_sharing_must_fit(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        simulate_shared(actions("GPipe", 4, 1, 4), 1.0, 1.0, **arguments)


@pytest.mark.parametrize("slots", [None, [8.0]])
def test_a_latency_holds_no_link(slots: list[float] | None) -> None:
    """GPipe on two ranks, each transfer 3 s, of which 1 s is latency."""
    many, forward, backward, send, latency = 5, 0.5, 1.0, 3.0, 1.0
    table = actions("GPipe", 2, 1, many)
    found = simulate_shared(
        table,
        [forward] * 2,
        [backward] * 2,
        send_forward_s=send,
        send_backward_s=send,
        link_of_forward=[0],
        link_of_backward=[1],
        latency_s=latency,
        slots_of_host=slots,
    )
    # What is sent queues: each transfer ends 2 s after the one before.
    there = forward + send + (many - 1) * (send - latency) + forward
    back = backward + send + (many - 1) * (send - latency) + backward
    assert found.makespan_s == pytest.approx(there + back)


@pytest.mark.parametrize("latency", [-1.0, [0.1, 0.2]])
def test_a_latency_is_a_duration_of_each_boundary(latency: object) -> None:
    with pytest.raises(StrategyError, match="latency_s"):
        simulate_shared(actions("GPipe", 2, 1, 2), [1] * 2, [1] * 2, latency_s=latency)
