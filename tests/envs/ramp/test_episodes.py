"""Episodes side by side go as each would alone in the reference world."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from envs.ramp.arrivals import LAWS
from envs.ramp.episodes import OUTCOMES, RampEpisodes, servers_in
from envs.ramp.jobs import RampJobs, ramp_tables
from envs.ramp.topology import RampTopology
from envs.ramp.world import Arrival, RampWorld
from planner.errors import ClusterError, StrategyError, UnknownNameError
from tests.envs.ramp.conftest import MODELS


def _same(one: RampWorld, many: RampEpisodes, row: int) -> None:
    expected, found = asdict(one.summary()), asdict(many.summary(row))
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, nan_ok=True), name


def test_every_decision_is_that_of_the_reference(jobs: RampJobs) -> None:
    laws = [
        LAWS["A"],
        replace(LAWS["B"], process="poisson", interval_s=700.0),
        replace(LAWS["C"], process="bursty"),
        replace(LAWS["D"], interval_s=2000.0),
    ]
    drawn = [law.draw(MODELS, 3e5, seed) for seed, law in enumerate(laws)]
    worlds = [RampWorld(jobs, arrivals, 3e5) for arrivals in drawn]
    many = RampEpisodes(jobs, drawn, 3e5)
    generator = np.random.default_rng(0)
    degrees = np.array([0, *jobs.degrees])
    seen = set()
    while not many.over.all():
        heads = many.heads()
        for row, world in enumerate(worlds):
            head = world.head
            assert (head is None) == many.over[row]
            if head is not None:
                assert MODELS[heads[1][row]] == head.model
                assert many.valid()[row].tolist() == world.mask().tolist()
        choice = generator.integers(-1, len(jobs.degrees), len(worlds))
        outcome = many.decide(choice)
        for row, world in enumerate(worlds):
            if outcome[row] >= 0:
                assert OUTCOMES[outcome[row]] == world.decide(degrees[choice[row] + 1])
                seen.add(OUTCOMES[outcome[row]])
    assert seen == set(OUTCOMES)
    for row, world in enumerate(worlds):
        _same(world, many, row)


def test_an_episode_starts_again_without_a_trace_of_the_last(jobs: RampJobs) -> None:
    first, second = (LAWS["A"].draw(MODELS, 2e5, seed) for seed in (1, 2))
    many = RampEpisodes(jobs, [first, first], 2e5)
    choices = np.random.default_rng(3).integers(-1, 6, (400, 2))
    for choice in choices[:150]:
        many.decide(choice)
    many.restart(1, [*second, *(replace(a, time_s=2e5 + 1) for a in second)])
    assert many.over.tolist() == [False, False]
    fresh = RampEpisodes(jobs, [second], 2e5)
    for choice in choices[150:]:
        outcome = many.decide(choice)
        assert outcome[1] == fresh.decide(choice[1:])[0]
    assert many.over.all()
    assert many.summary(1).blocked == fresh.summary(0).blocked
    assert many.decide(np.zeros(2, dtype=np.int64)).tolist() == [-1, -1]


def test_what_cannot_run_side_by_side_is_refused(jobs: RampJobs) -> None:
    big = RampJobs(jobs.jobs, RampTopology(groups=8, racks=8, servers=2))
    with pytest.raises(ClusterError, match="128 servers"):
        ramp_tables(big)
    tight = RampJobs(jobs.jobs, RampTopology(memory_bytes=10e9))
    with pytest.raises(ClusterError, match="may fill a server"):
        ramp_tables(tight)
    with pytest.raises(UnknownNameError, match="gnmt"):
        RampEpisodes(jobs, [[Arrival(time_s=0.0, model="gmnt", beta=0.5)]])
    one = RampEpisodes(jobs, [[Arrival(time_s=0.0, model="gnmt", beta=0.5)]])
    with pytest.raises(StrategyError, match="choices from 6"):
        one.decide(np.array([6]))


def test_bits_are_counted() -> None:
    drawn = np.random.default_rng(0).integers(0, 2**63, 100, dtype=np.uint64)
    for mask in [0, 1, 2**64 - 1, *drawn.tolist()]:
        assert servers_in(np.uint64(mask)) == mask.bit_count()
