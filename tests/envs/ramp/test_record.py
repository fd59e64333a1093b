"""Records of a replay agree with the reference world."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from envs.ramp.episodes import RampEpisodes, ReplayLog
from envs.ramp.jobs import RampJobs
from envs.ramp.record import device_runs, ramp_record
from envs.ramp.replay_env import RampReplayEnv
from envs.ramp.vector import RampVecEnv
from envs.ramp.world import Arrival, RampWorld
from planner.errors import StrategyError
from planner.report.stream.data import StreamData, stream_sums
from planner.schema.stream import StreamRecord
from policies.baselines import make_baseline


def test_runs_of_devices() -> None:
    assert device_runs([0, 1, 2, 5, 7, 8]) == ((0, 2), (5, 5), (7, 8))
    assert device_runs([]) == ()


@pytest.mark.parametrize("law", ["A", "D"])
@pytest.mark.parametrize("policy", ["para_max", "para_min", "random", "constant_4"])
def test_rows_are_those_of_the_reference(jobs: RampJobs, policy: str, law: str) -> None:
    env = RampVecEnv(
        2, jobs=jobs, law=law, horizon_s=1e5, seed=3, record=True, mask="benchmark"
    )
    made = make_baseline(policy, env.tables, 0)
    obs = env.reset()
    records: dict[int, StreamRecord] = {}
    taken: list[list[int]] = [[], []]
    while len(records) < 2:
        actions = made.predict(obs, env.action_masks())
        obs, _, over, infos = env.step(actions)
        for row in range(2):
            if row not in records:
                taken[row].append(infos[row]["degree"])
            if over[row] and row not in records:
                records[row] = infos[row]["record"]
                np.testing.assert_equal(records[row].summary, infos[row]["summary"])
    for row in range(2):
        _same(records[row], jobs, taken[row])


def _same(record: StreamRecord, jobs: RampJobs, taken: list[int]) -> None:
    """The same decisions in the reference world."""
    rows = record.jobs
    arrivals = [
        Arrival(time_s=time, model=record.models[model].name, beta=beta)
        for time, model, beta in zip(rows.arrival_s, rows.model, rows.beta, strict=True)
    ]
    world = RampWorld(jobs, arrivals, horizon_s=1e5)
    for degree in taken:
        world.decide(degree)
    assert world.head is None
    assert rows.asked[: len(taken)] == tuple(taken)
    placed = iter(world.accepted)
    for number, outcome in enumerate(world.outcomes):
        if outcome != "placed":
            assert rows.outcome[number] == outcome
            continue
        job = next(placed)
        assert rows.start_s[number] == job.start_s
        plan = record.plans[rows.plan[number]]
        assert (plan.degree, plan.alone_s) == (job.degree, job.jct_s)
        held = [
            device
            for first, last in record.device_sets[rows.devices[number]]
            for device in range(first, last + 1)
        ]
        assert held == job.servers.tolist()
        ended = job.end_s <= 1e5 + 1e-7
        assert rows.end_s[number] == (job.end_s if ended else None)
    sums, found = stream_sums(StreamData(record=record, name="")), world.summary()
    for name in ("arrived", "blocked", "refused", "no_room", "late", "unfinished"):
        assert sums[name] == getattr(found, name)
    for name in ("throughput_bytes_per_s", "mean_jct_s", "mean_speedup", "mean_degree"):
        expected = pytest.approx(getattr(found, name), rel=1e-12, nan_ok=True)
        assert sums[name] == expected
    assert sums["mean_workers"] == pytest.approx(found.mean_workers, nan_ok=True)


def test_a_job_on_the_horizon_is_not_decided(jobs: RampJobs) -> None:
    name = next(iter(jobs.jobs))
    arrivals = [Arrival(time_s=t, model=name, beta=1.0) for t in (0.0, 50.0, 60.0)]
    episodes = RampEpisodes(jobs, [arrivals], 50.0, log=ReplayLog())
    episodes.decide(np.array([-1]))
    record = ramp_record(episodes, 0, 50.0)
    assert record.jobs.outcome == ("refused", "undecided")
    assert record.jobs.arrival_s == (0.0, 50.0)
    with pytest.raises(StrategyError, match="give record=True"):
        ramp_record(RampEpisodes(jobs, [arrivals], 50.0), 0, 50.0)


def test_no_server_is_held_twice(jobs: RampJobs) -> None:
    options: dict[str, Any] = {"jobs": jobs, "law": "B", "horizon_s": 2e5}
    env = RampReplayEnv(record=True, observe=False, **options)
    made = make_baseline("random", env.tables, 1)
    obs, _ = env.reset(seed=1)
    over, info = False, {}
    while not over:
        obs, _, over, _, info = env.step(made.predict(obs, env.action_masks()))
    record: StreamRecord = info["record"]
    rows = record.jobs
    spans: list[list[tuple[float, float]]] = [[] for _ in range(32)]
    for start, end, which in zip(rows.start_s, rows.end_s, rows.devices, strict=True):
        if start is None:
            continue
        for first, last in record.device_sets[which]:
            for device in range(first, last + 1):
                spans[device].append((start, 2e5 if end is None else end))
    assert sum(map(len, spans)) > 100
    for mine in spans:
        assert all(b <= start + 1e-6 for (_, b), (start, _) in pairwise(sorted(mine)))
