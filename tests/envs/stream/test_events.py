"""Arrivals, ends, waiting and the horizon; what they are counted as."""

from __future__ import annotations

import numpy as np
import pytest

from envs.stream.decisions import OUTCOMES
from envs.stream.events import Rewards
from envs.stream.state import TOTALS, copy_state
from tests.envs.stream.conftest import Episode, MakeTables, job, leaf_spine

PLACED, REFUSED, NO_ROOM, LATE, WAITING = range(len(OUTCOMES))


def test_time_goes_by_as_jobs_take(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 80, steps=2), cluster=leaf_spine(hosts=2))
    episode = Episode(tables, [(0.0, 0, 1.0), (30.0, 0, 0.5)], horizon_s=200.0)
    assert episode.decide(episode.choice(2, 1)) == PLACED
    assert episode.now == 30.0
    assert episode.decide(episode.choice(2, 1)) == PLACED
    assert episode.over
    summary = episode.summary()
    assert (summary.met, summary.blocked, summary.unfinished) == (2, 0, 0)
    assert summary.mean_jct_s == pytest.approx(80.0)
    assert summary.mean_speedup == pytest.approx(2.0)
    assert summary.utilisation == pytest.approx(2 * 2 * 80 / (4 * 200))
    assert summary.throughput == pytest.approx(2 * 160 / 200)
    # Whole hosts were held: nothing that was free lay in a host with a job.
    assert summary.fragmentation == 0.0


def test_fragmentation_is_what_lies_free_beside_jobs(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 100), cluster=leaf_spine(hosts=2))
    episode = Episode(tables, [(0.0, 0, 1.0)], horizon_s=200.0)
    episode.decide(episode.choice(1, 1))
    # One device beside the job for 100 s, of 3 and then 4 that are free.
    expected = 100 / (3 * 100 + 4 * 100)
    assert episode.summary().fragmentation == pytest.approx(expected)


def test_causes_of_blocking_are_told_apart(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 800), cluster=leaf_spine(hosts=2))
    jobs = [(float(t), 0, beta) for t, beta in ((0, 1.0), (1, 1.0), (2, 0.1), (3, 1.0))]
    episode = Episode(tables, [*jobs, (4.0, 0, 1.0), (5.0, 0, 1.0)])
    assert episode.decide(0) == REFUSED
    # On one device it takes 800 s, which is in time; now all four are held.
    assert episode.decide(episode.choice(4, 2)) == PLACED
    # 80 s would take 10 devices.
    assert episode.decide(0) == LATE
    assert episode.decide(0) == NO_ROOM
    assert episode.decide(episode.choice(1, 1)) == NO_ROOM
    assert not episode.options.possible.any()
    episode.decide(0)
    summary = episode.summary()
    assert (summary.refused, summary.no_room, summary.late) == (1, 3, 1)
    assert summary.blocked == 5
    assert summary.met == 1
    assert summary.blocking_rate == pytest.approx(5 / 6)


def test_a_candidate_that_is_late_is_not_placed(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 80), cluster=leaf_spine(hosts=2))
    episode = Episode(tables, [(0.0, 0, 0.5), (0.0, 0, 0.5)])
    one, two = episode.choice(1, 1), episode.choice(2, 1)
    assert episode.options.possible[[one - 1, two - 1]].tolist() == [False, True]
    assert episode.decide(one) == LATE
    assert not episode.state.running.any()
    # A deadline that is just met is met.
    assert episode.decide(two) == PLACED
    assert episode.summary().met == 1


def test_models_that_do_not_fit_have_no_candidate(make_tables: MakeTables) -> None:
    tables = make_tables(job("big", 80), job("small", 8), least={"big": 4})
    episode = Episode(tables, [(0.0, 0, 1.0), (0.0, 1, 1.0)])
    possible = episode.options.possible
    assert (possible == (tables.degrees >= 4)).all()
    assert episode.decide(1) == NO_ROOM
    assert episode.options.possible.all()


def test_jobs_at_the_horizon_are_counted_apart(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 80), cluster=leaf_spine(hosts=2))
    jobs = [(0.0, 0, 1.0), (50.0, 0, 1.0), (100.0, 0, 1.0)]
    episode = Episode(tables, jobs, horizon_s=100.0)
    episode.decide(1)
    episode.decide(1)
    assert episode.over
    summary = episode.summary()
    assert (summary.arrived, summary.met, summary.unfinished) == (3, 1, 1)
    assert (summary.blocked, summary.undecided) == (0, 1)
    assert summary.throughput == pytest.approx((80 + 50) / 100)


def test_the_head_waits_and_is_asked_again(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 80), cluster=leaf_spine(hosts=2))
    jobs = [(0.0, 0, 1.0), (5.0, 0, 1.0), (6.0, 0, 1.0), (7.0, 0, 1.0)]
    episode = Episode(tables, jobs, max_waiting=2)
    episode.decide(episode.choice(4, 2))
    assert episode.now == 5.0
    assert episode.wait() == WAITING
    assert episode.now == 6.0
    assert episode.state.counts[0] == 2
    episode.wait()
    # Both places are taken: the fourth is turned away unasked.
    assert episode.now == 7.0
    assert episode.summary().no_room == 1
    episode.wait()
    assert episode.now == 20.0
    assert episode.state.waiting.arrived_s[0] == 5.0
    episode.decide(episode.choice(2, 1))
    assert (episode.now, episode.state.waiting.arrived_s[0]) == (20.0, 6.0)
    episode.decide(episode.choice(2, 1))
    assert episode.over
    summary = episode.summary()
    assert (summary.met, summary.blocked) == (3, 1)
    assert summary.mean_wait_s == pytest.approx((0 + 15 + 14) / 3)
    assert summary.mean_jct_s == pytest.approx((20 + 55 + 54) / 3)


def test_who_waits_too_long_is_given_up(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 80), job("long", 4000))
    # 16 s is what the second may take; 10 on all eight devices.
    jobs = [(0.0, 1, 1.0), (0.0, 0, 0.2), (20.0, 0, 1.0)]
    episode = Episode(tables, jobs, max_waiting=3)
    episode.decide(episode.choice(8, 4))
    assert episode.options.possible.sum() == 0
    episode.wait()
    assert episode.now == 20.0
    assert episode.state.waiting.arrived_s[0] == 20.0
    assert (episode.summary().late, episode.summary().slowed) == (1, 0)
    assert episode.state.totals[TOTALS.index("reward")] == 1 - 1


def test_rewards_of_work_are_by_its_size(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 80), job("b", 240))
    rewards = Rewards(accepted=0.0, blocked=-0.5, work=2.0, mean_work_s=160.0)
    jobs = [(0.0, 0, 1.0), (0.0, 1, 1.0), (1.0, 0, 1.0)]
    episode = Episode(tables, jobs, rewards=rewards)
    episode.decide(1)
    episode.decide(1)
    episode.decide(0)
    expected = 2.0 * (80 + 240) / 160 - 0.5
    assert episode.state.totals[TOTALS.index("reward")] == pytest.approx(expected)


@pytest.mark.parametrize("waiting", [0, 3])
def test_whatever_is_decided_the_books_balance(
    make_tables: MakeTables, waiting: int
) -> None:
    tables = make_tables(
        job("a", 80),
        job("b", 300),
        cluster=leaf_spine(per_host=4),
        share={"a": 0.9, "b": 0.4},
        spread=2,
        oversubscription=8.0,
    )
    generator = np.random.default_rng(3)
    times = np.sort(generator.uniform(0, 4000, 240))
    jobs = [
        (t, int(generator.integers(2)), float(generator.uniform(0.1, 1))) for t in times
    ]
    episode = Episode(tables, jobs, horizon_s=4000.0, max_waiting=waiting)
    shared = 0
    while not episode.over:
        state = episode.state
        held = np.array([(state.holder == s).sum() for s in range(len(state.holder))])
        degrees = tables.degrees[state.choice] * state.running
        assert (held == degrees).all()
        per_host = np.bincount(
            tables.host_of_device, weights=state.holder == -1, minlength=4
        )
        assert (per_host == state.free).all()
        assert (state.ends_s[state.running] >= episode.now - 1e-6).all()
        shared += int((state.stretch[state.running] > 1).sum())
        actions = 1 + len(tables.degrees) + (waiting > 0)
        before = copy_state(state)
        episode.decide(int(generator.integers(actions)))
        assert episode.now >= before.clock[0]
    assert shared > 10
    summary = episode.summary()
    counted = summary.met + summary.blocked + summary.unfinished + summary.undecided
    assert counted == summary.arrived == 240
    assert summary.undecided >= 0
    reward = summary.met + summary.unfinished - summary.blocked
    assert episode.state.totals[TOTALS.index("reward")] == pytest.approx(reward)
    busy = episode.state.totals[TOTALS.index("held_s")]
    free = episode.state.totals[TOTALS.index("free_s")]
    assert busy + free == pytest.approx(16 * 4000.0)
