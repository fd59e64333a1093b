"""Replays side by side go as each would alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported

from envs.ramp.jobs import RampJobs
from envs.ramp.replay_env import RampReplayEnv
from envs.ramp.vector import RampVecEnv
from planner.errors import StrategyError


def _same(one: Any, many: Any, row: int) -> None:
    assert one.keys() == many.keys()
    for name, part in one.items():
        np.testing.assert_array_equal(part, many[name][row])


@pytest.mark.parametrize("mask", ["benchmark", "possible"])
def test_rows_go_as_single_environments(jobs: RampJobs, mask: str) -> None:
    options: dict[str, Any] = {
        "jobs": jobs,
        "law": ["A", "B", "D"],
        "horizon_s": 3e4,
        "mask": mask,
    }
    many = RampVecEnv(3, seed=7, **options)
    single = [RampReplayEnv(**options) for _ in range(3)]
    obs = many.reset()
    for row, env in enumerate(single):
        _same(env.reset(seed=7 + row)[0], obs, row)
    generator = np.random.default_rng(0)
    ended = 0
    for _ in range(70):
        masks = get_action_masks(many)
        assert masks.shape == (3, 7)
        actions = np.array([generator.choice(np.flatnonzero(m)) for m in masks])
        obs, rewards, dones, infos = many.step(actions)
        for row, env in enumerate(single):
            assert env.action_masks().tolist() == masks[row].tolist()
            alone, reward, over, _, info = env.step(actions[row])
            assert (reward, over) == (rewards[row], dones[row])
            if over:
                ended += 1
                last = infos[row].pop("terminal_observation")
                for name, part in alone.items():
                    np.testing.assert_array_equal(part, last[name])
                assert not infos[row].pop("TimeLimit.truncated")
                alone, _ = env.reset()
            np.testing.assert_equal(infos[row], info)
            _same(alone, obs, row)
    assert ended == 6


def test_without_encoding_the_jobs_alone_are_seen(jobs: RampJobs) -> None:
    options: dict[str, Any] = {"jobs": jobs, "horizon_s": 2e4}
    full, bare = RampVecEnv(2, **options), RampVecEnv(2, observe=False, **options)
    for env in (full, bare):
        env.seed(1)
    seen, some = full.reset(), bare.reset()
    assert set(bare.observation_space) == {"job", "job_graph"}
    for _ in range(30):
        for name, part in some.items():
            np.testing.assert_array_equal(part, seen[name])
        assert (full.action_masks() == bare.action_masks()).all()
        actions = (
            full.action_masks().shape[1] - 1 - full.action_masks()[:, ::-1].argmax(1)
        )
        seen, rewards, *_ = full.step(actions)
        some, others, *_ = bare.step(actions)
        assert (rewards == others).all()


def test_what_stable_baselines3_asks_of_a_vecenv(jobs: RampJobs) -> None:
    many = RampVecEnv(2, jobs=jobs, horizon_s=1e4)
    many.reset()
    assert is_masking_supported(many)
    assert many.env_method("action_masks", indices=1)[0].shape == (7,)
    assert many.get_attr("render_mode") == [None, None]
    assert many.env_is_wrapped(RampReplayEnv) == [False, False]  # type: ignore[arg-type]
    many.set_attr("label", 3)
    assert many.get_attr("label", [0]) == [3]
    with pytest.raises(StrategyError, match="shared by all 2 rows"):
        many.set_attr("label", 4, indices=[1])
    with pytest.raises(StrategyError, match="no method 'fly'"):
        many.env_method("fly")
    with pytest.raises(StrategyError, match="step_async"):
        many.step_wait()
    with pytest.raises(StrategyError, match="num_envs=0"):
        RampVecEnv(0, jobs=jobs)
    many.close()
