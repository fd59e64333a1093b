"""The rollout planner of the corrected world."""

from __future__ import annotations

import numpy as np
import pytest

from envs.ramp.arrivals import BetaLaw
from envs.ramp.features import NUM_SHARES, OFFSETS
from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from envs.stream.features import NUM_CANDIDATE_FEATURES
from envs.stream.observation import NUM_SHARED
from planner.errors import StrategyError, UnknownNameError
from policies.scorer import Scorer
from policies.stream.lookahead import StreamRolloutPolicy

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


def test_the_rule_is_left_only_for_what_is_better_by_more_than_chance(
    env: JobStreamEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.reset(seed=0)
    mask = env.action_masks()
    allowed = np.flatnonzero(mask)
    assert len(allowed) > 2
    policy = StreamRolloutPolicy(env, futures=4, arrivals=3)
    standing, other = int(allowed[1]), int(allowed[2])

    def chosen(base: list[float], instead: list[float]) -> int:
        rewards = np.full((4, len(mask)), -np.inf)
        rewards[:, allowed] = -9.0
        rewards[:, standing], rewards[:, other] = base, instead
        monkeypatch.setattr(
            policy, "_follow", lambda wanted, streams=None: rewards.copy()
        )
        return int(policy.predict({}, mask))

    # One stream of four says that the other is better by 4: 1, give or take 1.
    assert chosen([1, 1, 1, 1], [5, 1, 1, 1]) == standing
    # Two of them say so: 2, give or take 1.15.
    assert chosen([1, 1, 1, 1], [5, 5, 1, 1]) == other
    # Better in each by a little, however far the streams are apart.
    assert chosen([8, -3, 2, 0], [8.1, -2.9, 2.1, 0.1]) == other
    assert chosen([1, 1, 1, 1], [1, 1, 1, 1]) == standing


def test_where_rollouts_show_nothing_the_scorer_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = JobStreamEnv(law=BUSY, horizon_s=1e4)
    obs, _ = seen.reset(seed=0)
    mask = seen.action_masks()
    allowed = np.flatnonzero(mask)
    last = int(allowed[-1])
    # Of one hidden unit, which sees the share of the devices that a candidate takes.
    first = np.zeros((NUM_CANDIDATE_FEATURES + NUM_SHARED, 1), dtype=np.float32)
    first[len(OFFSETS) * NUM_SHARES + 2] = -0.1
    one = np.ones(1, dtype=np.float32)
    scorer = Scorer(first, one, np.ones((1, 1), dtype=np.float32), 0 * one, one)
    policy = StreamRolloutPolicy(seen, base=scorer, futures=12, arrivals=2)
    asked = []

    def chosen(better: int, gain: float) -> int:
        def follow(wanted: np.ndarray, streams: int) -> np.ndarray:
            asked.append((int(wanted.sum()), streams))
            rewards = np.full((streams, len(mask)), -np.inf)
            rewards[:, wanted] = 1.0
            rewards[:, better] += gain
            return rewards

        monkeypatch.setattr(policy, "_follow", follow)
        return int(policy.predict(obs, mask))

    assert chosen(int(allowed[1]), 0.0) == last
    assert chosen(int(allowed[1]), 2.0) == allowed[1]
    # As many rollouts in all as for four candidates of 12 futures.
    assert asked[0] == (len(allowed), 48 // len(allowed))


def test_the_rule_stands_from_its_degree_on(env: JobStreamEnv) -> None:
    env.reset(seed=0)
    mask = env.action_masks()
    for least, degree in ((1, 8), (16, 16), (10_000, 8)):
        policy = StreamRolloutPolicy(env, base=least, futures=1, arrivals=1)
        standing = policy._standing(np.flatnonzero(mask))
        assert env.tables.degrees[standing - 1] == degree
    assert policy._standing(np.array([0])) == 0


def test_wrong_planners_are_refused(env: JobStreamEnv) -> None:
    with pytest.raises(StrategyError, match="futures=0"):
        StreamRolloutPolicy(env, futures=0)
    with pytest.raises(UnknownNameError, match="gpt5"):
        StreamRolloutPolicy(env, law=StreamLaw(models=("gpt5",)))
    with pytest.raises(StrategyError, match=r"masks of shape \(2, 11\)"):
        StreamRolloutPolicy(env).predict({}, np.ones((2, 11), dtype=bool))
