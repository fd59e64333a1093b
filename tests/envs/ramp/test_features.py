"""Candidates and their features, against counting servers and blocks one by one."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest

from envs.ramp.arrivals import LAWS
from envs.ramp.episodes import OUTCOMES, RampEpisodes
from envs.ramp.features import (
    BLOCK_SIZES,
    NUM_FEATURES,
    NUM_SHARES,
    OFFSETS,
    empty_candidates,
    encode,
    make_memo,
    write_shares,
)
from envs.ramp.history import EDGES, NUM_HISTORY, remember, write_history
from envs.ramp.jobs import RampJobs
from envs.ramp.placement import block_table
from envs.ramp.state import RampState, exact_state
from envs.ramp.topology import RampTopology
from tests.envs.ramp.conftest import MODELS


@lru_cache
def _blocks(topology: RampTopology, size: int) -> list[set[int]]:
    return [set(block) for block in topology.blocks(size).tolist()]


def _shares(topology: RampTopology, busy: set[int]) -> list[float]:
    """Free servers, and those in disjoint blocks taken in the order of trying."""
    total = topology.num_servers
    found = [(total - len(busy)) / total]
    for size in BLOCK_SIZES:
        taken, count = set(busy), 0
        for block in _blocks(topology, size) if size <= topology.most_splits else []:
            if not taken & block:
                taken |= block
                count += size
        found.append(count / total)
    return found


def _servers(mask: int) -> set[int]:
    return {server for server in range(64) if int(mask) >> server & 1}


def _expected(
    jobs: RampJobs, state: RampState, row: int
) -> tuple[list[set[int] | None], list[list[float]]]:
    """Servers of each possible candidate, and its features, without masks of bits."""
    topology, interval = jobs.topology, float(state.interval_s[row])
    running = [
        (float(state.running.ends_s[row, n]), _servers(state.running.masks[row, n]))
        for n in range(int(state.running.number[row]))
    ]
    busy = set().union(*(held for _, held in running))
    flags = np.array([s in busy for s in range(topology.num_servers)])
    name, now = MODELS[state.model[row]], float(state.now_s[row])
    deadline = float(state.beta[row]) * jobs.jobs[name].sequential_jct_s
    given: list[set[int] | None] = [set()]
    features = []
    for k, degree in enumerate(jobs.degrees):
        placed = jobs.place(name, degree, flags)
        late = state.jct_s[row, state.model[row], k] > deadline
        full = degree > topology.num_servers - int(state.running.held[row])
        none = placed is None or late or full
        given.append(None if none else set(placed[placed >= 0].tolist()))
    for choice, servers in enumerate(given):
        if servers is None:
            features.append([0.0] * NUM_FEATURES)
            continue
        jct = state.jct_s[row, state.model[row], choice - 1] if choice else 0.0
        line: list[float] = []
        for offset in OFFSETS:
            at = now + offset * interval + 1e-7
            held = set().union(*(held for end, held in running if end > at))
            line += _shares(topology, held | servers if now + jct > at else held)
        if choice:
            length = jct / interval
            line += [
                0.0,
                float(now + jct > state.horizon_s + 1e-7),
                len(servers) / topology.num_servers,
                min(length, 40) / 40,
                math.ceil(length) - length,
                1 - jct / deadline,
            ]
        else:
            line += [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        features.append(line)
    return given, features


def test_features_are_those_counted_by_hand(jobs: RampJobs) -> None:
    horizon = 5e4
    drawn = [LAWS[law].draw(MODELS, horizon, 0) for law in "AD"]
    many = RampEpisodes(jobs, drawn, horizon)
    out = empty_candidates(many.tables, 2)
    generator = np.random.default_rng(0)
    kinds = np.zeros(3)
    while not many.over.all():
        state = exact_state(many, np.array([1000.0, 1000.0]))
        encode(many.tables, state, out)
        for row in range(2):
            given, features = _expected(jobs, state, row)
            assert out.possible[row].tolist() == [g is not None for g in given]
            held = [_servers(mask) for mask in out.servers[row]]
            assert held == [g or set() for g in given]
            np.testing.assert_allclose(out.features[row], features, atol=1e-6)
            kinds += (
                sum(g is None for g in given),
                len(given),
                out.features[row, :, -5].sum(),
            )
        allowed = [np.flatnonzero(possible) for possible in out.possible]
        choice = np.array([generator.choice(each[-2:]) for each in allowed]) - 1
        outcome = many.decide(choice)
        # Some possible jobs are late all the same: where they run decides.
        assert {OUTCOMES[o] for o in outcome[choice >= 0]} <= {"placed", "late"}
    # Impossible candidates, possible ones, and ends after the horizon: all were seen.
    assert kinds[0] > 100
    assert kinds[1] - kinds[0] > 200
    assert kinds[2] > 10


def test_an_episode_that_is_over_leaves_turning_away_alone(jobs: RampJobs) -> None:
    drawn = [LAWS["A"].draw(MODELS, horizon, 1) for horizon in (1500.0, 4500.0)]
    many = RampEpisodes(jobs, drawn, 4500.0)
    out = empty_candidates(many.tables, 2)
    for _ in range(3):
        many.decide(np.array([2, 2]))
    encode(many.tables, exact_state(many, np.full(2, 1000.0)), out)
    assert many.over.tolist() == [True, False]
    assert out.possible[0].tolist() == [True] + [False] * len(jobs.degrees)
    assert not out.features[0].any()
    assert out.features[1].any()


@pytest.mark.parametrize(
    "topology", [RampTopology(), RampTopology(groups=3, racks=2, most_splits=6)]
)
def test_shares_of_any_set_of_servers(topology: RampTopology) -> None:
    blocks = block_table(topology)
    assert blocks is not None
    generator = np.random.default_rng(0)
    out, memo = np.ones(NUM_SHARES, dtype=np.float32), make_memo()
    for share in np.linspace(0, 1, 41):
        busy = np.flatnonzero(generator.random(topology.num_servers) < share).tolist()
        mask = np.uint64(sum(1 << server for server in busy))
        write_shares(blocks, topology.num_servers, mask, memo, out)
        np.testing.assert_allclose(out, _shares(topology, set(busy)), atol=1e-6)


def test_history_is_the_weighted_histogram_of_deadlines() -> None:
    betas = np.random.default_rng(0).uniform(0.1, 1.0, 60)
    seen = np.zeros(len(EDGES) + 1, dtype=np.float32)
    out = np.ones(NUM_HISTORY, dtype=np.float32)
    write_history(seen, 100.0, out)
    assert out.tolist() == [0.0] * (len(EDGES) + 1) + [1.0, 1.0]
    for count, beta in enumerate(betas, start=1):
        remember(seen, float(beta))
        write_history(seen, 8.0, out)
        weights = 0.99 ** np.arange(count)[::-1]
        edges = [0.0, *EDGES]
        inside = [
            weights[(betas[:count] > low) & (betas[:count] <= high)].sum()
            for low, high in zip(edges, EDGES, strict=False)
        ]
        np.testing.assert_allclose(out[:-3], inside / weights.sum(), atol=1e-5)
        assert out[-3:].tolist() == pytest.approx([min(count / 50, 1), 0.2, 0.8])


def test_a_history_is_of_one_episode_alone(jobs: RampJobs) -> None:
    drawn = LAWS["B"].draw(MODELS, 1e4, 0)
    many = RampEpisodes(jobs, [drawn], 1e4)
    for _ in range(5):
        many.decide(np.array([-1]))
    assert many.seen[0, -1] == 5
    assert many.seen[0, :-1].sum() == pytest.approx(sum(0.99**n for n in range(5)))
    many.restart(0, drawn)
    assert not many.seen.any()
