"""The rollout planner of the corrected world."""

from __future__ import annotations

import numpy as np
import pytest

from envs.ramp.arrivals import BetaLaw
from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from planner.errors import StrategyError, UnknownNameError
from policies.stream_lookahead import StreamRolloutPolicy

#: Deadlines that take at least eight devices, far more often than there is room.
BUSY = StreamLaw(load=3.0, beta=BetaLaw(values=(0.2,)), models=("vit-h",))


@pytest.fixture(scope="module")
def env() -> JobStreamEnv:
    return JobStreamEnv(law=BUSY, horizon_s=1e4, observe=False)


def test_values_are_what_becomes_of_jobs(env: JobStreamEnv) -> None:
    env.reset(seed=0)
    before = env.exact_state()
    policy = StreamRolloutPolicy(env, futures=8, arrivals=3, law=BUSY)
    values = policy.values()
    after = env.exact_state()
    assert all((a == b).all() for a, b in zip(before[:17], after[:17], strict=True))
    mask = env.action_masks()
    assert np.isfinite(values[mask]).all()
    assert (values[~mask] == -np.inf).all()
    # Of the job itself and two that are decided after it, each +1 or -1. On eight
    # devices each all have room; turned away, the first is blocked for nothing.
    smallest = 1 + int(np.flatnonzero(mask[1:])[0])
    assert env.tables.degrees[smallest - 1] == 8
    assert values[smallest] == 3
    assert values[0] == 1
    # All 32 devices for one job are a waste.
    assert values[-1] < 3


def test_it_repeats_and_keeps_to_the_mask(env: JobStreamEnv) -> None:
    taken = []
    for _ in range(2):
        obs, _ = env.reset(seed=1)
        policy = StreamRolloutPolicy(env, futures=4, arrivals=4, seed=5)
        actions, ended = [], False
        while not ended:
            action = policy.predict(obs, env.action_masks())
            assert env.action_masks()[action]
            actions.append(int(action))
            obs, _, ended, *_ = env.step(np.int64(action))
        taken.append(actions)
    assert taken[0] == taken[1]
    assert len(set(taken[0])) > 1


def test_wrong_planners_are_refused(env: JobStreamEnv) -> None:
    with pytest.raises(StrategyError, match="futures=0"):
        StreamRolloutPolicy(env, futures=0)
    with pytest.raises(UnknownNameError, match="gpt5"):
        StreamRolloutPolicy(env, law=StreamLaw(models=("gpt5",)))
    with pytest.raises(StrategyError, match=r"masks of shape \(2, 11\)"):
        StreamRolloutPolicy(env).predict({}, np.ones((2, 11), dtype=bool))
