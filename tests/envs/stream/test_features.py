"""Features of devices and candidates in states that a person can follow."""

from __future__ import annotations

import numpy as np
import pytest

from envs.ramp.features import NUM_SHARES, OFFSETS
from envs.stream.features import (
    NUM_CANDIDATE_FEATURES,
    NUM_DEVICE_FEATURES,
    write_candidates,
    write_devices,
)
from envs.stream.observation import StreamObserver
from tests.envs.stream.conftest import Episode, MakeTables, job, leaf_spine

OWN = len(OFFSETS) * NUM_SHARES


@pytest.fixture
def episode(make_tables: MakeTables) -> Episode:
    """Two hosts of four; a job on two devices until 250 s, the mean interval is 100."""
    tables = make_tables(
        job("a", 500),
        job("b", 80),
        cluster=leaf_spine(hosts=2, per_host=4),
        share={"b": 0.25},
    )
    made = Episode(tables, [(0.0, 0, 1.0), (0.0, 1, 0.5)], horizon_s=260.0)
    made.decide(made.choice(2, 1))
    return made


def _candidates(episode: Episode, more: int = 1) -> np.ndarray:
    rows = more + len(episode.tables.degrees)
    out = np.full((rows, NUM_CANDIDATE_FEATURES), np.nan, dtype=np.float32)
    write_candidates(episode.tables, episode.state, episode.options, out)
    return out


def test_shares_say_what_is_free_later(episode: Episode) -> None:
    out = _candidates(episode)
    away = out[0, :OWN].reshape(len(OFFSETS), NUM_SHARES)
    # Six of eight are free, two of them beside the job: 6 in pairs, 4 in fours.
    assert away[0].tolist() == [0.75, 0.75, 0.5, 0.0, 0.0]
    assert away[1].tolist() == away[0].tolist()
    # After 250 s all eight are: in one block of two whole hosts.
    assert away[2].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
    four = episode.choice(4, 1)
    shares = out[four, :OWN].reshape(len(OFFSETS), NUM_SHARES)
    # It runs for 20 s, and leaves no trace after the first interval.
    assert (shares == away).all()


def test_own_features_of_a_candidate(episode: Episode) -> None:
    out, four = _candidates(episode), episode.choice(4, 1)
    own = out[four, OWN:]
    assert own[:7].tolist() == pytest.approx(
        [0, 0, 4 / 8, 0.2 / 40, 0.8, 1 - 20 / 40, 1 / 2]
    )
    assert own[7:].tolist() == pytest.approx([0, 0, 0, 80 / (20 * 4) / 2, 0, 0])
    spread = out[episode.choice(4, 2), OWN:]
    assert spread[[6, 9, 12]].tolist() == pytest.approx([1.0, 1 / 2, 0.25])
    # On one device it is late, on eight there is no room: both are blank.
    assert not out[episode.choice(1, 1)].any()
    assert not out[episode.choice(8, 2)].any()
    assert out[0, OWN] == 1
    waiting = _candidates(episode, more=2)
    assert (waiting[-1, :OWN] == waiting[0, :OWN]).all()
    assert waiting[-1, OWN:].tolist() == [0.0] * 11 + [1.0, 0.0]


def test_jobs_past_the_horizon_are_told(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 500))
    episode = Episode(tables, [(0.0, 0, 1.0)], horizon_s=300.0)
    out = _candidates(episode)
    assert out[episode.choice(1, 1), OWN + 1] == 1
    assert out[episode.choice(2, 1), OWN + 1] == 0


def test_devices_say_when_they_are_free(episode: Episode) -> None:
    tables = episode.tables
    devices = np.zeros((8, NUM_DEVICE_FEATURES), dtype=np.float32)
    held = np.zeros((1 + len(tables.degrees), 8), dtype=np.float32)
    write_devices(tables, episode.state, episode.options, devices, held)
    assert devices[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert devices[0, 1:10].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert devices[0, 10:].tolist() == pytest.approx([2.5 / 40, 1, 0.5, 0])
    assert devices[7, 10:].tolist() == pytest.approx([0, 1, 1, 0])
    # Best fit: the pair goes beside the job, four go to the whole host.
    assert np.flatnonzero(held[episode.choice(2, 1)]).tolist() == [2, 3]
    assert np.flatnonzero(held[episode.choice(4, 1)]).tolist() == [4, 5, 6, 7]
    assert np.flatnonzero(held[episode.choice(4, 2)]).tolist() == [2, 3, 4, 5]


def test_occupied_devices_are_never_free(make_tables: MakeTables) -> None:
    cluster = leaf_spine(hosts=2).with_occupied([1])
    tables = make_tables(job("a", 500), cluster=cluster)
    episode = Episode(tables, [(0.0, 0, 1.0)])
    obs, mask = StreamObserver(tables).see(episode.state, episode.options)
    assert obs["devices"][1].tolist() == [0.0] * 10 + [1.0, 1.0, 1.0, 1.0]
    assert not obs["candidate_devices"][:, 1].any()
    assert mask.sum() == 1 + episode.options.possible.sum()
    assert obs["candidates"][0, 0] == 1.0


def test_a_job_that_has_waited_has_less_time(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 400), cluster=leaf_spine(hosts=2))
    episode = Episode(tables, [(0.0, 0, 1.0), (0.0, 0, 0.5)], max_waiting=4)
    observer = StreamObserver(tables, max_waiting=4)
    episode.decide(episode.choice(4, 2))
    obs, mask = observer.see(episode.state, episode.options)
    assert obs["job"].tolist() == pytest.approx([0.5, 2 / 40, 4 / 40, 1, 0, 0, 3 / 8])
    # The running job ends at 100 s, and 100 s more are in time.
    assert mask.tolist() == [True, *[False] * len(tables.degrees), True]
    episode.wait()
    obs, _ = observer.see(episode.state, episode.options)
    assert obs["job"].tolist() == pytest.approx(
        [0.25, 1 / 40, 4 / 40, 1, 1 / 40, 0, 3 / 8]
    )
