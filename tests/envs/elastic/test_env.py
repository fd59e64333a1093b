"""The environment of elastic jobs."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from sb3_contrib.common.maskable.utils import get_action_masks
from stable_baselines3.common.env_checker import check_env as check_for_sb3
from stable_baselines3.common.vec_env import DummyVecEnv

import envs
from envs.elastic.costs import FailureLaw
from envs.elastic.env import JOB_FEATURES, ElasticStreamEnv
from envs.elastic.pools import HostPool
from envs.elastic.session import ElasticConfig
from planner.errors import StrategyError
from tests.envs.elastic.small import table, trace

assert envs


def _config(**fields: object) -> ElasticConfig:
    kinds = {"new": (2.0, 4.0, 8.0), "old": (1.0, 0.0, 0.0)}
    given = {
        "trace": trace((0, 40, 30, 1), (0, 10, 30, 2), (5, 90, 30, 4)),
        "source": table(kinds),
        "cluster": tuple(HostPool(kind=kind, hosts=1, devices=4) for kind in kinds),
    }
    return ElasticConfig(**{**given, **fields})  # type: ignore[arg-type]


def _env(**options: object) -> ElasticStreamEnv:
    return ElasticStreamEnv(_config(), slots=4, **options)  # type: ignore[arg-type]


def test_gymnasium_accepts_it() -> None:
    law = FailureLaw(mean_s=100.0)
    made = gymnasium.make(
        "meshwright/ElasticStream-v0", config=_config(failures=law), slots=4
    )
    check_env(made.unwrapped)


def test_mask_allows_what_the_step_takes() -> None:
    env = _env()
    random = np.random.default_rng(2)
    for episode in range(5):
        env.reset(seed=episode)
        while not env.session.over:
            mask = env.action_masks()
            allowed = [
                env._allowed(*divmod(number, env.moves))
                for number in range(int(env.action_space.n) - 1)
            ]
            # Promises and declines of one job exclude each other in both.
            assert mask[1:].tolist() == allowed
            env.step(random.choice(np.flatnonzero(mask)))


def test_rewards_add_up_to_the_summary() -> None:
    env = _env()
    env.reset(seed=0)
    total = 0.0
    info: dict[str, object] = {}
    random = np.random.default_rng(5)
    while not env.session.over:
        action = random.choice(np.flatnonzero(env.action_masks()))
        _, reward, _, _, info = env.step(action)
        total += reward
    summary = info["summary"]
    assert isinstance(summary, dict)
    assert total == summary["met"] - summary["declined"] - summary["late"]
    assert summary["jobs"] == 3


def test_a_recorded_episode_ends_with_its_record() -> None:
    ends = []
    for record in (False, True):
        env = _env(record=record)
        env.reset(seed=0)
        random = np.random.default_rng(5)
        info: dict[str, object] = {}
        while not env.session.over:
            assert "record" not in info
            action = random.choice(np.flatnonzero(env.action_masks()))
            *_, info = env.step(action)
        ends.append(info)
    plain, kept = ends
    assert "record" not in plain
    assert kept["summary"] == plain["summary"]
    counts = Counter(kept["record"].jobs.outcome)
    names = ("met", "late", "declined")
    assert [counts[name] for name in names] == [plain["summary"][n] for n in names]


def test_moves_of_a_job() -> None:
    env = _env()
    obs, _ = env.reset()
    assert env.view.tolist() == [1, 0]  # the second is due first
    assert obs["jobs"][:, 0].tolist() == [1, 1, 0, 0]
    assert obs["pools"].tolist() == [[1, 1], [1, 1]]
    run = 1 + 1 * env.moves + 3 + 2  # four new devices for the first job
    obs, *_ = env.step(np.int64(run))
    assert obs["pools"][:, 1].tolist() == [0, 1]
    env.step(np.int64(1 + env.moves + 1))  # promise it
    env.step(np.int64(1))  # decline the second
    assert not env.action_masks()[1:].any()
    _, reward, *_ = env.step(np.int64(0))
    assert reward == pytest.approx(-1.0)
    assert env.session.degree.tolist() == [4, 0, 0]
    assert env.session.summary().declined == 1


def test_observations_show_what_was_decided() -> None:
    env = _env()
    obs, _ = env.reset()
    told = [JOB_FEATURES.index(name) for name in ("undecided", "promised", "settled")]
    # 30 iterations in 10 s, at 2, 4 and 8 new or 1 old iteration a second.
    shares = [1.5, 0.75, 0.375, 3.0, 10.0, 10.0]
    assert obs["options"][0].tolist() == pytest.approx(shares)
    assert obs["jobs"][:2, told].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert not obs["held"].any()
    env.step(np.int64(1 + 3))  # one new device for the first in view
    env.step(np.int64(1 + 1))  # promise it
    obs, *_ = env.step(np.int64(1 + env.moves))  # decline the second
    assert obs["jobs"][:2, told].tolist() == [[0, 1, 1], [0, 0, 1]]
    assert obs["held"].tolist()[0] == [1, 0, 0, 0, 0, 0]
    assert not obs["held"][1:].any()
    obs, *_ = env.step(np.int64(0))
    assert obs["jobs"][0, told].tolist() == [0, 1, 0]
    assert obs["held"][0, 0] == 1


def test_moves_end_before_time_passes() -> None:
    env, random = _env(), np.random.default_rng(3)
    for _ in range(20):
        env.reset(seed=0)
        while not env.session.over:
            made = 0
            while len(allowed := np.flatnonzero(env.action_masks()[1:])):
                env.step(1 + random.choice(allowed))
                made += 1
            # Each job is at most promised, paused and run.
            assert made <= 3 * len(env.view)
            env.step(np.int64(0))


def test_late_jobs_do_not_hide_others() -> None:
    config = _config(trace=trace((0, 5, 900, 1), (0, 90, 30, 1)))
    env = ElasticStreamEnv(config, slots=1)
    env.reset()
    assert env.view.tolist() == [0]
    env.step(np.int64(0))
    assert (env.session.now_s, env.view.tolist()) == (5.0, [1])


def test_copy_goes_on_alike() -> None:
    env = _env()
    env.reset(seed=4)
    env.step(np.int64(1 + 3))
    ends = []
    for one in (env, pickle.loads(pickle.dumps(env)), copy.deepcopy(env)):
        random = np.random.default_rng(1)
        seen: list[float] = []
        while not one.session.over:
            action = random.choice(np.flatnonzero(one.action_masks()))
            obs, reward, *_ = one.step(action)
            seen += [reward, *obs["jobs"].ravel().tolist()]
        ends.append(seen)
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.filterwarnings("ignore:Your observation .* has an unconventional shape")
def test_stable_baselines_accepts_it() -> None:
    check_for_sb3(_env())
    many = DummyVecEnv([_env, _env])
    assert get_action_masks(many).shape == (2, many.action_space.n)


def test_action_that_is_not_allowed_changes_nothing() -> None:
    env = _env()
    before, _ = env.reset()
    after, reward, terminated, *_ = env.step(np.int64(1 + 3 * env.moves + 3))
    assert (reward, terminated) == (0.0, False)
    assert all((before[key] == after[key]).all() for key in before)


def test_observations_can_be_left_out() -> None:
    env = _env(observe=False)
    obs, _ = env.reset()
    assert not obs["jobs"].any()
    assert env.action_masks()[1:].any()


def test_bad_input() -> None:
    with pytest.raises(StrategyError, match="slots=0"):
        ElasticStreamEnv(_config(), slots=0)
    env = _env()
    with pytest.raises(StrategyError, match="action=99999 of"):
        env.step(np.int64(99999))
