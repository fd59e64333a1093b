"""The corrected world as a gymnasium environment."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

import envs
from envs.ramp.arrivals import BetaLaw
from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from envs.stream.jobs import BUILT_IN
from envs.stream.observation import JOB_FEATURES
from planner.cluster import Cluster
from planner.errors import ClusterError, StrategyError, UnknownNameError
from planner.schema.cluster import Link
from policies.baselines import make_baseline

SHORT = {"law": StreamLaw(interval_s=600.0), "horizon_s": 2e4}


@pytest.mark.parametrize("waiting", [0, 4])
def test_contracts_of_gymnasium_and_stable_baselines3(waiting: int) -> None:
    assert envs.__all__ == []
    made = gymnasium.make("meshwright/JobStream-v0", max_waiting=waiting, **SHORT)
    check_env(made.unwrapped, skip_render_check=True)
    with warnings.catch_warnings():
        # It recommends flat observations; a graph network reads tables.
        warnings.filterwarnings("ignore", message=".*unconventional shape")
        check_env_for_sb3(made.unwrapped)


def _run(env: JobStreamEnv, policy: str, seed: int) -> tuple[list[Any], dict[str, Any]]:
    made = make_baseline(policy, env.tables, seed)
    obs, _ = env.reset(seed=seed)
    steps: list[Any] = []
    ended = False
    while not ended:
        action = made.predict(obs, env.action_masks())
        assert env.action_masks()[action]
        obs, reward, ended, truncated, info = env.step(np.int64(action))
        assert not truncated
        assert env.observation_space.contains(obs)
        steps.append((int(action), reward, info["outcome"], info["degree"]))
    return steps, info["summary"]


def test_any_cluster_is_played_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No prices ship for these hosts; two devices of each make other shapes."""
    monkeypatch.setattr("envs.stream.prices.price_plan", pytest.fail)
    jobs = tuple(job for job in BUILT_IN if job.name in {"bert-large", "vit-l"})
    env = JobStreamEnv(cluster="dgx-b200:2", jobs=jobs, **SHORT)
    steps, summary = _run(env, "min_feasible", seed=3)
    assert len(steps) > 10
    assert np.isfinite(env.tables.step_s[:, :, 1, 0]).any(axis=1).all()
    assert summary["throughput"] > 0
    assert _run(env, "min_feasible", seed=3)[1] == summary
    plan = env.session.plan(0, 0, 0)
    assert plan is not None
    assert plan.step_s[0] == env.tables.step_s[0, 0, 0, 0]


@pytest.mark.parametrize(
    "policy", ["para_max", "para_min", "min_feasible", "random", "constant_4"]
)
def test_baselines_run_and_possible_actions_are_placed(policy: str) -> None:
    env = JobStreamEnv(law=StreamLaw(load=1.2), horizon_s=1e5)
    steps, summary = _run(env, policy, seed=1)
    assert len(steps) == summary["arrived"]
    outcomes = {outcome for action, _, outcome, _ in steps if action}
    assert outcomes == {"placed"}
    degrees = {degree for action, _, _, degree in steps if action}
    if policy == "constant_4":
        assert degrees == {4}
    if policy == "para_max":
        assert max(degrees) == 32
    met = summary["met"] + summary["unfinished"] - summary["blocked"]
    assert sum(reward for _, reward, *_ in steps) == pytest.approx(met)
    assert summary["blocking_rate"] == summary["blocked"] / summary["arrived"]
    assert 0.2 < summary["utilisation"] <= 1.0


def test_seeds_say_what_happens() -> None:
    env = JobStreamEnv(law=(StreamLaw(load=0.5), StreamLaw(load=1.5)), horizon_s=5e4)
    first = _run(env, "random", seed=3)
    assert _run(env, "random", seed=3) == first
    assert _run(env, "random", seed=4) != first


def test_more_load_blocks_more_and_waiting_less() -> None:
    rates = {}
    for load in (0.3, 1.5):
        for waiting in (0, 8):
            law = StreamLaw(load=load, process="bursty")
            env = JobStreamEnv(law=law, max_waiting=waiting, horizon_s=3e5)
            rates[load, waiting] = _run(env, "min_feasible", 2)[1]["blocking_rate"]
    assert rates[0.3, 0] < rates[1.5, 0]
    assert rates[0.3, 8] < rates[0.3, 0]
    assert rates[0.3, 8] < rates[1.5, 8]


def test_any_cluster_will_do(tmp_path: Path) -> None:
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    parts = [Cluster.from_preset(name, 1) for name in ("dgx-a100", "a40-pcie")]
    mixed = Cluster.mixed(*parts, level=link).with_occupied(range(4))
    jobs = BUILT_IN[:2]
    env = JobStreamEnv(
        cluster=mixed,
        jobs=jobs,
        max_degree=4,
        prices=tmp_path / "prices.json",
        horizon_s=2e4,
    )
    assert {(s.kind, s.devices) for s in env.shapes} == {
        (kind, degree) for kind in (0, 1) for degree in (1, 2, 4)
    }
    assert env.observation_space["devices"].shape == (16, 14)
    # An A40 is the slower of the two, and deadlines are those of the faster.
    one = [s.kind for s in env.shapes if s.devices == 1]
    assert one == [0, 1]
    assert (env.tables.empty_jct_s[:, 1] > env.tables.empty_jct_s[:, 0]).all()
    assert env.tables.empty_jct_s[:, 0] == pytest.approx(
        env.tables.sequential_jct_s, rel=0.02
    )
    steps, _ = _run(env, "random", seed=0)
    assert len(steps) > 10
    source, target = env.device_graph
    pairs = set(zip(source.tolist(), target.tolist(), strict=True))
    assert {(0, 1), (7, 0), (3, 11)} <= pairs
    assert not {(0, 0), (3, 12)} & pairs
    assert all((b, a) in pairs for a, b in pairs)


def test_rewards_are_as_configured() -> None:
    options = {"accepted_reward": 0.0, "blocked_reward": -0.25, "work_reward": 1.0}
    env = JobStreamEnv(**SHORT, **options)
    obs, _ = env.reset(seed=0)
    work = env.tables.sequential_jct_s
    expected = work[int(obs["job_graph"][0])] / work.mean()
    action = np.flatnonzero(env.action_masks())[-1]
    *_, info = (stepped := env.step(action))
    assert stepped[1] == pytest.approx(expected)
    shape = env.shapes[action - 1]
    assert (info["degree"], info["hosts"]) == (shape.devices, shape.hosts)
    # The plan's axes cover as many devices.
    axes = re.findall(r"(?:pp|dp_replicate|dp_shard|cp|tp)(\d+)", info["plan"])
    assert math.prod(map(int, axes)) == shape.devices
    assert env.step(np.int64(0))[1] == -0.25


def test_a_trace_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrival_s,model,beta\n0,gpt2-xl,0.5\n500,vit-h,0.3\n4000,llama3-8b,0.9\n"
    )
    env = JobStreamEnv(trace=path)
    obs, _ = env.reset()
    assert obs["job"][0] == pytest.approx(0.5)
    seen = [env.session.names[int(obs["job_graph"][0])]]
    for _ in range(2):
        obs, *_ = env.step(np.int64(0))
        seen.append(env.session.names[int(obs["job_graph"][0])])
    assert seen == ["gpt2-xl", "vit-h", "llama3-8b"]
    *_, ended, _, info = env.step(np.int64(0))
    assert ended
    assert info["summary"]["refused"] == 3
    path.write_text("arrival_s,model,beta\n900,gpt2-xl,0.5\n")
    with pytest.raises(StrategyError, match="no arrival before the horizon"):
        JobStreamEnv(trace=path, horizon_s=800.0)


def test_state_is_a_copy() -> None:
    env = JobStreamEnv(**SHORT)
    env.reset(seed=0)
    state = env.exact_state()
    env.step(np.flatnonzero(env.action_masks())[-1])
    assert state.clock[0] == 0
    assert not state.running.any()
    assert env.exact_state().running.any()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"accepted_reward": math.nan}, StrategyError, "accepted_reward=nan"),
        ({"work_reward": math.inf}, StrategyError, "work_reward=inf"),
        ({"horizon_s": 0.0}, StrategyError, r"horizon_s=0\.0"),
        ({"max_waiting": -1}, StrategyError, "max_waiting=-1"),
        ({"law": ()}, StrategyError, "no law"),
        ({"max_degree": 64}, ClusterError, "max_degree=64"),
        ({"spread": -1}, ClusterError, "spread=-1"),
        ({"oversubscription": 0.5}, StrategyError, r"oversubscription=0\.5"),
        ({"reference": "a100-8"}, UnknownNameError, "a100-80"),
        ({"cluster": "dgx-a10"}, UnknownNameError, "dgx-a100"),
        ({"law": StreamLaw(models=("gpt5",))}, UnknownNameError, "gpt5"),
        ({"jobs": BUILT_IN[:1] * 2}, StrategyError, "a name of its own"),
        (
            {"jobs": BUILT_IN[-1:], "max_degree": 1},
            ClusterError,
            "'llama3-8b' fits dgx-a100 x 4 in no shape of up to 1 devices",
        ),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        JobStreamEnv(**options)


def test_wrong_actions_are_refused() -> None:
    env = JobStreamEnv(**SHORT)
    with pytest.raises(StrategyError, match="reset it"):
        env.step(np.int64(0))
    env.reset(seed=0)
    with pytest.raises(StrategyError, match="action 11; give 0 to turn the job away"):
        env.step(np.int64(11))
    patient = JobStreamEnv(**SHORT, max_waiting=1)
    patient.reset(seed=0)
    with pytest.raises(StrategyError, match="to let it wait"):
        patient.step(np.int64(-1))


def test_sizes_change_the_job_and_not_its_share(tmp_path: Path) -> None:
    law = StreamLaw(
        interval_s=600.0, sizes=(2.0,), models=("vit-l",), beta=BetaLaw(values=(0.5,))
    )
    obs, _ = JobStreamEnv(law=law, horizon_s=2e4).reset(seed=0)
    usual, _ = JobStreamEnv(law=replace(law, sizes=(1.0,)), horizon_s=2e4).reset(seed=0)
    assert obs["job"][0] == usual["job"][0] == 0.5
    assert obs["job"][2] == pytest.approx(2 * usual["job"][2])


def test_the_queue_and_the_places_in_it_are_seen() -> None:
    law = StreamLaw(load=20.0, models=("vit-h",))
    env = JobStreamEnv(law=law, horizon_s=3e4, max_waiting=4)
    obs, _ = env.reset(seed=0)
    assert len(obs["job"]) == len(JOB_FEATURES) == 7
    assert obs["job"][-2:].tolist() == [0.0, 3 / 8]
    seen, ended = set(), False
    while not ended:
        mask = env.action_masks()
        obs, _, ended, *_ = env.step(np.int64(np.flatnonzero(mask)[-1]))
        behind, places = obs["job"][-2:].tolist()
        if not ended:
            assert 4 * behind + 8 * places == 3
            seen.add(behind)
    assert seen == {0.0, 0.25, 0.5, 0.75}
    without, _ = JobStreamEnv(law=law, horizon_s=3e4).reset(seed=0)
    assert without["job"][-2:].tolist() == [0.0, 0.0]


def test_actions_name_shifts_where_they_are_chosen_and_nowhere_else() -> None:
    plain = JobStreamEnv(bursts="shifted", **SHORT)
    none = JobStreamEnv(bursts="shifted", shifts=8, **SHORT)
    assert none.observation_space == plain.observation_space
    assert none.shapes == plain.shapes
    several = sum(shape.hosts > 1 for shape in plain.shapes)
    env = JobStreamEnv(bursts="chosen", shifts=3, **SHORT)
    assert len(env.shapes) == len(plain.shapes) + 2 * several
    assert env.action_space.n == plain.action_space.n + 2 * several
    # The same prices, whenever a job sends.
    first = next(i for i, shape in enumerate(env.shapes) if shape.hosts > 1)
    assert [env.shapes[first + turn].shift for turn in range(3)] == [0, 1 / 3, 2 / 3]
    for turn in (1, 2):
        np.testing.assert_array_equal(
            env.tables.step_s[:, first], env.tables.step_s[:, first + turn]
        )
    _, summary = _run(env, "random", 1)
    assert 0 <= summary["blocking_rate"] <= 1


def test_shifts_out_of_range_are_refused() -> None:
    with pytest.raises(StrategyError, match="shifts=0; give 1 to 64 offsets"):
        JobStreamEnv(bursts="chosen", shifts=0)
