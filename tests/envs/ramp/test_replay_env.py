"""The replay as a gymnasium environment: its contract, and the world it shows."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

import envs
from envs.ramp.arrivals import LAWS, ArrivalLaw, BetaLaw
from envs.ramp.jobs import RampJobs
from envs.ramp.replay_env import RampReplayEnv
from envs.ramp.world import Arrival, RampWorld
from planner.errors import CaptureError, StrategyError, UnknownNameError
from tests.envs.ramp.conftest import MODELS


def test_contracts_of_gymnasium_and_stable_baselines3(jobs: RampJobs) -> None:
    assert envs.__all__ == []
    made = gymnasium.make("meshwright/RampReplay-v0", jobs=jobs, horizon_s=2e4)
    check_env(made.unwrapped, skip_render_check=True)
    with warnings.catch_warnings():
        # It recommends flat observations; a graph network reads tables.
        warnings.filterwarnings("ignore", message=".*unconventional shape")
        check_env_for_sb3(made.unwrapped)


def test_the_env_shows_the_reference_world(jobs: RampJobs) -> None:
    env = RampReplayEnv(jobs=jobs, law="A", horizon_s=6e4, mask="benchmark")
    env.reset(seed=3)
    arrivals = _drawn(env, jobs, seed=3)
    world = RampWorld(jobs, arrivals, 6e4)
    generator = np.random.default_rng(0)
    degrees, rewards, seen = (0, *jobs.degrees), [], None
    while world.head is not None:
        head, now = world.head, world.head.time_s
        assert env.action_masks().tolist() == [True, *world.mask()]
        action = generator.choice(np.flatnonzero(env.action_masks()))
        obs, reward, ended, truncated, info = env.step(np.int64(action))
        assert info["outcome"] == world.decide(degrees[action])
        assert info["degree"] == degrees[action]
        rewards.append(reward)
        assert not truncated
        assert ended == (world.head is None)
        seen = info
        if ended:
            break
        assert env.observation_space.contains(obs)
        head, now = world.head, world.head.time_s
        assert MODELS[int(obs["job_graph"][0])] == head.model
        assert obs["job"][0] == pytest.approx(head.beta)
        intervals = jobs.jobs[head.model].sequential_jct_s / 1000
        assert obs["job"][1] == pytest.approx(min(head.beta * intervals, 40) / 40)
        assert obs["job"][2] == pytest.approx(min(intervals, 40) / 40)
        left = np.zeros(32)
        for job in world.running:
            left[job.servers] = (job.end_s - now) / 1000
        np.testing.assert_allclose(
            obs["devices"][:, -1], np.minimum(left, 40) / 40, atol=1e-6
        )
        for column, offset in enumerate((0, 1, 2, 3, 4, 6, 9, 13, 19, 28)):
            free = left <= offset + 1e-9
            assert (obs["devices"][:, column] == free).all()
        held = obs["candidate_devices"].sum(axis=1)
        np.testing.assert_allclose(held, obs["candidates"][:, -4] * 32, atol=1e-5)
    assert seen is not None
    summary = world.summary()
    assert seen["summary"]["blocked"] == summary.blocked
    assert seen["summary"]["blocking_rate"] == summary.blocking_rate
    assert summary.unfinished > 0
    # A job that still runs at the horizon is blocked: rewards say the same.
    assert rewards.count(-1.0) == summary.blocked
    assert set(rewards) == {1.0, -1.0}
    with pytest.raises(StrategyError, match="reset"):
        env.step(np.int64(0))


def _drawn(env: RampReplayEnv, jobs: RampJobs, seed: int) -> list[Arrival]:
    generator, _ = gymnasium.utils.seeding.np_random(seed)
    return list(env.session.source.draw(generator).arrivals)


def test_possible_actions_are_placed(jobs: RampJobs) -> None:
    env = RampReplayEnv(jobs=jobs, law=["A", "C"], horizon_s=1e5)
    generator = np.random.default_rng(0)
    outcomes = []
    for seed in (0, None):
        env.reset(seed=seed)
        ended = False
        while not ended:
            allowed = np.flatnonzero(env.action_masks())
            assert allowed[0] == 0
            action = np.int64(generator.choice(allowed))
            *_, ended, _, info = env.step(action)
            outcomes.append((action > 0, info["outcome"]))
    assert {name for taken, name in outcomes if not taken} == {"refused"}
    # Late is possible: how long a job takes depends a little on where it is placed.
    assert {name for taken, name in outcomes if taken} <= {"placed", "late"}
    late = sum(name == "late" for _, name in outcomes)
    assert late < 0.02 * len(outcomes)


def test_seeds_say_which_episodes_come(jobs: RampJobs) -> None:
    env = RampReplayEnv(jobs=jobs, law=["A", "B", "C", "D"], horizon_s=2e4)

    def betas() -> list[float]:
        return env.session.episodes.arrivals.beta[0].tolist()

    env.reset(seed=5)
    first = betas()
    env.reset()
    second = betas()
    env.reset(seed=5)
    assert first == betas()
    env.reset()
    assert second == betas()
    assert first != second


def test_a_trace_is_replayed(jobs: RampJobs, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrival_s,model,beta\n0,gnmt,0.5\n500,vgg16,0.3\n4000,gnmt,0.9\n9000,gnmt,1\n"
    )
    env = RampReplayEnv(jobs=jobs, trace=path, horizon_s=9000)
    assert env.session.source.draw(np.random.default_rng(0)).interval_s == 3000.0
    env.reset()
    steps = [env.step(np.int64(a))[3:] for a in (2, 3, 1)]
    info = steps[-1][-1]
    # The arrival on the horizon is counted and not decided; vgg16 runs on past it.
    assert info["summary"]["arrived"] == 4
    assert info["summary"]["late"] + info["summary"]["unfinished"] >= 1


def test_graphs_are_those_of_the_jobs(jobs: RampJobs) -> None:
    env = RampReplayEnv(jobs=jobs)
    assert [graph.name for graph in env.graphs] == list(MODELS)
    sizes = [(len(graph.nodes), graph.edge_index.shape[1]) for graph in env.graphs]
    # Ops and edges of each job, as published.
    assert sizes == [(142, 159), (82, 83), (96, 117), (136, 153), (46, 47)]
    for graph, job in zip(env.graphs, jobs.jobs.values(), strict=True):
        source, target = graph.edge_index
        assert (graph.nodes[target, -1] > graph.nodes[source, -1]).all()
        assert graph.nodes[:, -1].min() == 0
        assert graph.nodes[:, -1].max() == 1
        shares = np.expm1(graph.nodes[:, 1].astype(float))
        assert shares.mean() == pytest.approx(1)
        assert shares[0] == pytest.approx(
            job.forward[0] / np.mean([job.forward, job.backward]), rel=1e-4
        )
    source, target = env.device_graph
    assert len(source) == 32 * (3 + 3 + 1)
    pairs = set(zip(source.tolist(), target.tolist(), strict=True))
    assert (0, 1) in pairs
    assert (0, 3) not in pairs
    assert all((b, a) in pairs for a, b in pairs)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"law": "E"}, UnknownNameError, "law 'E'"),
        ({"law": ()}, StrategyError, "no law"),
        ({"mask": "none"}, UnknownNameError, "mask 'none'"),
        ({"horizon_s": 0.0}, StrategyError, r"horizon_s=0\.0"),
        ({"interval_s": math.nan}, StrategyError, "interval_s=nan"),
        ({"accepted_reward": math.nan}, StrategyError, "accepted_reward=nan"),
        ({"blocked_reward": math.inf}, StrategyError, "blocked_reward=inf"),
        ({"trace": "nowhere.csv"}, StrategyError, r"nowhere\.csv"),
    ],
)
def test_wrong_options_are_refused(
    jobs: RampJobs, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        RampReplayEnv(jobs=jobs, **options)


def test_missing_profiles_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CaptureError, match=r"no profile resnet18\.txt"):
        RampReplayEnv(folder=tmp_path)
    monkeypatch.delenv("MESHWRIGHT_DATA", raising=False)
    with pytest.raises(CaptureError, match="MESHWRIGHT_DATA is not set"):
        RampReplayEnv()


def test_a_wrong_action_is_refused(jobs: RampJobs) -> None:
    law = ArrivalLaw(beta=BetaLaw(values=(0.5,)), models=("gnmt",))
    env = RampReplayEnv(jobs=jobs, law=[law, LAWS["A"]], horizon_s=5e3)
    env.reset(seed=0)
    with pytest.raises(StrategyError, match="actions from 7 to 7"):
        env.step(np.int64(7))
