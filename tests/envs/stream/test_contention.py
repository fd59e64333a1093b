"""Jobs that share links, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from envs.stream.contention import refresh, step_seconds
from envs.stream.decisions import OUTCOMES
from envs.stream.prices import STRETCHES
from planner.errors import UnknownNameError
from tests.envs.stream.conftest import Episode, MakeTables, job, leaf_spine

PLACED = OUTCOMES.index("placed")


def test_one_job_alone_takes_what_the_planner_says(make_tables: MakeTables) -> None:
    # However little the links carry, the price holds for a job alone.
    tables = make_tables(job("talk", 80), share={"talk": 1.0}, oversubscription=50.0)
    episode = Episode(tables, [(0.0, 0, 1.0)])
    assert episode.decide(episode.choice(2, 2)) == PLACED
    assert episode.over
    assert episode.summary().mean_jct_s == pytest.approx(40.0)
    assert episode.summary().mean_slowdown == pytest.approx(1.0)


def test_two_equal_jobs_on_one_uplink_take_turns(make_tables: MakeTables) -> None:
    # Two devices of 10 B/s behind each host's uplink, which carries 10: two jobs of one
    # device a host that do nothing but talk go at half their speed.
    tables = make_tables(
        job("talk", 80), share={"talk": 1.0}, oversubscription=2.0, spread=3
    )
    episode = Episode(tables, [(0.0, 0, 1.0), (10.0, 0, 1.0), (11.0, 0, 1.0)])
    both = episode.choice(2, 2)
    episode.decide(both)
    # 10 s alone, then 30 s of work at half speed.
    assert episode.options.stretch[both - 1] == pytest.approx(2.0)
    assert episode.options.jct_s[both - 1] == pytest.approx(80.0)
    episode.decide(both)
    ends = np.sort(episode.state.ends_s[episode.state.running])
    assert ends.tolist() == pytest.approx([10 + 60, 10 + 80])
    episode.decide(0)
    assert episode.over
    # The second had 10 s of work left when the first went.
    assert episode.summary().mean_jct_s == pytest.approx((70 + (80 - 10)) / 2)
    assert episode.summary().mean_slowdown == pytest.approx((70 / 40 + 70 / 40) / 2)


def test_a_link_that_carries_all_slows_nobody_down(make_tables: MakeTables) -> None:
    tables = make_tables(job("talk", 80), share={"talk": 1.0}, oversubscription=1.0)
    episode = Episode(tables, [(0.0, 0, 1.0), (0.0, 0, 1.0)])
    for _ in range(2):
        episode.decide(episode.choice(2, 2))
    assert episode.summary().mean_slowdown == pytest.approx(1.0)


def test_what_is_asked_is_devices_times_duty(make_tables: MakeTables) -> None:
    # Half of a step is talk: two jobs together ask 2 x 1 x 0.5 x 10 of 20 / 4.
    tables = make_tables(job("half", 80), share={"half": 0.5}, oversubscription=4.0)
    episode = Episode(tables, [(0.0, 0, 1.0), (0.0, 0, 1.0)])
    episode.decide(episode.choice(2, 2))
    choice = episode.choice(2, 2) - 1
    assert episode.state.load[1, :2].tolist() == [5.0, 5.0]
    assert episode.options.stretch[choice] == pytest.approx(2.0)
    assert episode.options.jct_s[choice] == pytest.approx(20 + 20 * 2)


def test_levels_are_shared_apart(make_tables: MakeTables) -> None:
    # Three leaves of two hosts; the first job takes a device of each host of a leaf.
    tables = make_tables(
        job("talk", 64),
        cluster=leaf_spine(hosts=6),
        share={"talk": 1.0},
        oversubscription=2.0,
        spread=2,
    )
    episode = Episode(tables, [(0.0, 0, 1.0)] * 3)
    assert episode.decide(episode.choice(2, 2)) == PLACED
    assert episode.decide(episode.choice(4, 4)) == PLACED
    assert sorted(episode.state.reach[:2].tolist()) == [1, 2]
    assert episode.state.stretch[:2].tolist() == [1.0, 1.0]
    # Over the spine a job leaves by the uplinks of its leaves, two hosts on each.
    assert sorted(episode.state.load[2].tolist()) == [0, 0, 0, 0, 10.0, 10.0]


def test_harm_to_running_jobs_is_told_before_it_is_done(
    make_tables: MakeTables,
) -> None:
    tables = make_tables(job("talk", 80), share={"talk": 1.0}, oversubscription=2.0)
    # The first may take 48 s, and takes 40 alone.
    episode = Episode(tables, [(0.0, 0, 0.6), (1.0, 0, 1.0), (2.0, 0, 1.0)])
    both = episode.choice(2, 2)
    episode.decide(both)
    assert episode.options.harmed[both - 1] == 1
    assert episode.options.harmed[episode.choice(2, 1) - 1] == 0
    episode.decide(both)
    late = episode.state.ends_s > episode.state.due_s
    assert (late & episode.state.running).sum() == 1
    episode.decide(0)
    assert (episode.summary().late, episode.summary().slowed) == (1, 1)
    # Paid at the decision, taken back at the end; the second met its deadline.
    assert episode.state.totals[-1] == -1 + 1 - 1


def test_prices_are_joined_by_lines(make_tables: MakeTables) -> None:
    tables = make_tables(job("talk", 80), share={"talk": 0.5})
    choice = 2
    prices = tables.step_s[0, choice, 1]
    for stretch in (1.0, 1.5, 3.0, 11.0, 16.0, 40.0):
        expected = 20 + 20 * stretch
        found = step_seconds(prices, tables.stretches, stretch)
        assert found == pytest.approx(expected)
    assert prices.tolist() == [20 + 20 * stretch for stretch in STRETCHES]


def test_refreshing_twice_changes_nothing(make_tables: MakeTables) -> None:
    tables = make_tables(job("talk", 80), share={"talk": 1.0}, oversubscription=2.0)
    episode = Episode(tables, [(0.0, 0, 1.0)] * 3)
    for _ in range(2):
        episode.decide(episode.choice(2, 2))
    before = episode.state.ends_s.copy()
    refresh(tables, episode.state)
    np.testing.assert_allclose(before, episode.state.ends_s)


@pytest.mark.parametrize(
    ("share", "stretch"),
    [(0.5, (1.0, 1.5, 1.0)), (0.6, (1.2, 1.6, 1.6)), (0.0, (1.0, 1.0, 1.0))],
)
def test_bursts_collide_unless_they_are_shifted(
    make_tables: MakeTables, share: float, stretch: tuple[float, ...]
) -> None:
    # A job sends 10 B/s for a share of a step, over an uplink that carries 10.
    spread = make_tables(job("some", 80), share={"some": share}, oversubscription=2.0)
    for bursts, expected in enumerate(stretch):
        tables = spread._replace(bursts=np.array([bursts]))
        episode = Episode(tables, [(0.0, 0, 1.0)] * 3)
        both = episode.choice(2, 2)
        assert episode.options.stretch[both - 1] == 1.0
        episode.decide(both)
        assert episode.state.stretch[0] == 1.0
        assert episode.options.stretch[both - 1] == pytest.approx(expected)
        episode.decide(both)
        assert episode.state.stretch[:2].tolist() == pytest.approx([expected] * 2)


@pytest.mark.parametrize(
    ("share", "turn", "stretch"),
    [(0.5, 0, 2.0), (0.5, 1, 1.5), (0.5, 2, 1.0), (0.6, 2, 4 / 3), (1.0, 3, 2.0)],
)
def test_an_action_shifts_a_job_to_where_the_other_does_not_send(
    make_tables: MakeTables, share: float, turn: int, stretch: float
) -> None:
    # As above. Jobs of half a step meet for half, a quarter and none of it.
    tables = make_tables(
        job("some", 80),
        share={"some": share},
        oversubscription=2.0,
        bursts="chosen",
        shifts=4,
    )
    episode = Episode(tables, [(0.0, 0, 1.0)] * 3)
    both = episode.choice(2, 2)
    same = slice(both - 1, both + 3)
    assert tables.shifts[same].tolist() == [0.0, 0.25, 0.5, 0.75]
    assert (tables.degrees[same] == 2).all()
    episode.decide(both)
    assert episode.state.stretch[0] == 1.0
    chosen = both + turn
    assert episode.options.stretch[chosen - 1] == pytest.approx(stretch)
    assert episode.options.possible[chosen - 1]
    episode.decide(chosen)
    assert episode.state.stretch[:2].tolist() == pytest.approx([stretch] * 2)


def test_jobs_that_a_shift_would_make_late_are_told(make_tables: MakeTables) -> None:
    tables = make_tables(
        job("half", 80),
        share={"half": 0.5},
        oversubscription=2.0,
        bursts="chosen",
        shifts=2,
    )
    # The first may take 48 s and takes 40 alone; it would take 60 beside the second.
    episode = Episode(tables, [(0.0, 0, 0.6), (1.0, 0, 1.0)])
    both = episode.choice(2, 2)
    episode.decide(both)
    assert episode.options.harmed[both - 1 : both + 1].tolist() == [1, 0]


def test_unknown_bursts_are_refused(make_tables: MakeTables) -> None:
    with pytest.raises(UnknownNameError, match="'shifted'"):
        make_tables(job("talk", 80), share={"talk": 1.0}, bursts="shift")
