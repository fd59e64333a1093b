"""Rollouts, against playing the same futures in the environment itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envs.ramp.arrivals import LAWS, ArrivalLaw, BetaLaw
from envs.ramp.features import NUM_FEATURES, empty_candidates, encode
from envs.ramp.history import NUM_HISTORY, write_history
from envs.ramp.jobs import RampJobs
from envs.ramp.replay_env import RampReplayEnv
from envs.ramp.state import Past
from envs.ramp.vector import RampVecEnv
from envs.ramp.world import Arrival, RampWorld
from planner.errors import StrategyError
from policies.baselines import Constant
from policies.futures import Futures
from policies.ramp.lookahead import RolloutPolicy
from policies.scorer import Scorer, ScorerPolicy, check_scorer, combined, score
from tests.envs.ramp.conftest import MODELS


class _Fixed:
    """Futures that the test knows."""

    learns = False

    def __init__(self, futures: Futures) -> None:
        self.futures = futures

    def draw(
        self, past: Past, interval_s: float, shape: Any, seed: np.random.Generator
    ) -> Futures:
        return self.futures


def _futures(seed: int, streams: int, count: int) -> Futures:
    generator = np.random.default_rng(seed)
    shape = (streams, count)
    return Futures(
        gap_s=generator.choice([200.0, 1000.0, 1500.0], shape),
        model=generator.integers(0, 5, shape),
        beta=generator.integers(10, 101, shape) / 100,
    )


def _play(
    jobs: RampJobs,
    before: list[Arrival],
    done: list[int],
    action: int,
    tail: list[Arrival],
) -> int:
    """Jobs blocked from a decision on, in the reference world with known times."""
    horizon = 40_000.0
    world = RampWorld(jobs, [*before, *tail], horizon)
    for degree in done:
        world.decide(degree)
    start = len(world.outcomes)
    accepted = len(world.accepted)
    degrees = (0, *jobs.degrees)
    world.decide(degrees[action])
    while world.head is not None:
        world.decide(4)
    blocked = sum(outcome != "placed" for outcome in world.outcomes[start:])
    late = [job for job in world.accepted[accepted:] if job.end_s > horizon + 1e-7]
    return blocked + len(late)


@pytest.mark.parametrize("steps", [3, 12, 30])
def test_costs_are_what_the_reference_world_comes_to(
    jobs: RampJobs, steps: int
) -> None:
    # One model whose time does not depend on where it runs keeps the memo out of it.
    law = ArrivalLaw(beta=LAWS["A"].beta, models=("vgg16", "resnet18", "alexnet"))
    env = RampReplayEnv(jobs=jobs, law=law, horizon_s=40_000.0)
    env.reset(seed=1)
    generator = np.random.default_rng(steps)
    before = list(env.session.source.draw(_np_random(1)).arrivals)
    done: list[int] = []
    for _ in range(steps):
        action = np.int64(generator.choice(np.flatnonzero(env.action_masks())))
        *_, info = env.step(action)
        done.append(info["degree"])
    futures = _futures(steps, 3, 10)
    futures = futures._replace(model=futures.model % 2)
    policy = RolloutPolicy(env, base=4)
    policy.source = _Fixed(futures)
    costs = policy.costs()
    possible = np.flatnonzero(env.action_masks())
    assert np.isfinite(costs).nonzero()[0].tolist() == possible.tolist()
    assert len(possible) > 1
    head = before[steps]
    expected = []
    for action in possible.tolist():
        played = []
        for stream in range(3):
            times = head.time_s + np.cumsum(futures.gap_s[stream])
            tail = [
                Arrival(time_s=float(t), model=MODELS[m], beta=float(b))
                for t, m, b in zip(
                    times, futures.model[stream], futures.beta[stream], strict=True
                )
            ]
            played.append(_play(jobs, before[: steps + 1], done, action, tail))
        expected.append(np.mean(played))
    # What all candidates block after they have become one is left out of costs.
    apart = costs[possible] - costs[possible].mean()
    assert apart == pytest.approx(np.array(expected) - np.mean(expected))
    assert costs[possible].max() <= max(expected) + 1e-9


def _np_random(seed: int) -> np.random.Generator:
    from gymnasium.utils.seeding import np_random

    return np_random(seed)[0]


def test_planning_blocks_fewer_jobs_than_its_base(jobs: RampJobs) -> None:
    rates = {}
    for name in ("rollout", "constant"):
        env = RampVecEnv(2, jobs=jobs, law="A", horizon_s=2e5, observe=False, seed=0)
        policy: RolloutPolicy | Constant = Constant(env.tables, 4)
        if name == "rollout":
            policy = RolloutPolicy(env, base=4, law=LAWS["A"], futures=20)
        obs, done = env.reset(), np.zeros(2, dtype=bool)
        while not done.any():
            obs, _, done, infos = env.step(policy.predict(obs, env.action_masks()))
        rates[name] = np.mean([info["summary"]["blocking_rate"] for info in infos])
    assert rates["rollout"] < rates["constant"] - 0.01


def test_the_same_seed_decides_the_same(jobs: RampJobs) -> None:
    taken = []
    for seed in (0, 0, 1):
        env = RampReplayEnv(jobs=jobs, law="C", horizon_s=1e5, observe=False)
        obs, _ = env.reset(seed=2)
        policy = RolloutPolicy(env, futures=2, arrivals=8, seed=seed)
        actions, ended = [], False
        while not ended:
            actions.append(int(policy.predict(obs, env.action_masks())))
            obs, _, ended, *_ = env.step(np.int64(actions[-1]))
        taken.append(actions)
    assert taken[0] == taken[1] != taken[2]


def test_the_base_follows_what_is_seen(jobs: RampJobs) -> None:
    """Tight deadlines need large degrees, which the base finds out by itself."""
    law = ArrivalLaw(beta=BetaLaw(values=(0.15,)))
    env = RampReplayEnv(jobs=jobs, law=law, horizon_s=2e5, observe=False)
    obs, _ = env.reset(seed=0)
    policy = RolloutPolicy(env, futures=2, arrivals=4)
    for _ in range(101):
        obs, *_ = env.step(np.int64(policy.predict(obs, env.action_masks())))
    degrees = env.tables.degrees
    chosen = degrees[policy._base(env.exact_state(), 0, env.past(0)) - 1]
    assert chosen in (8, 16)
    told = RolloutPolicy(env, law=ArrivalLaw(beta=BetaLaw(values=(0.75,))))
    assert degrees[told._base(env.exact_state(), 0, env.past(0)) - 1] in (2, 4)


def test_a_mask_is_kept_to(jobs: RampJobs) -> None:
    env = RampReplayEnv(jobs=jobs, law="A", horizon_s=1e5)
    obs, _ = env.reset(seed=0)
    policy = RolloutPolicy(env, base=4, futures=2)
    none = np.array([True] + [False] * 6)
    assert policy.predict(obs, none) == 0
    with pytest.raises(StrategyError, match="masks of 2 decisions for 1 episodes"):
        policy.predict(obs, np.stack([none, none]))
    with pytest.raises(StrategyError, match="futures=0"):
        RolloutPolicy(env, futures=0)
    with pytest.raises(StrategyError, match="degree 3"):
        RolloutPolicy(env, base=3)


def _scorer(seed: int) -> Scorer:
    generator = np.random.default_rng(seed)
    shapes = ((NUM_FEATURES + NUM_HISTORY, 12), (12,), (12, 9), (9,), (9,))
    parts = (generator.normal(size=shape) / 3 for shape in shapes)
    return check_scorer(Scorer(*(part.astype(np.float32) for part in parts)))


def test_a_scorer_is_the_network_that_its_weights_say() -> None:
    scorer, generator = _scorer(0), np.random.default_rng(1)
    for _ in range(20):
        x = generator.random(NUM_FEATURES + NUM_HISTORY).astype(np.float32)
        x[generator.random(len(x)) < 0.4] = 0
        hidden = np.maximum(x @ scorer.first + scorer.first_bias, 0)
        hidden = np.maximum(hidden @ scorer.second + scorer.second_bias, 0)
        room = (np.ones(12, dtype=np.float32), np.ones(9, dtype=np.float32))
        found = score(scorer, x[:NUM_FEATURES], x[NUM_FEATURES:], *room)
        assert found == pytest.approx(float(hidden @ scorer.last), rel=1e-4, abs=1e-5)


def test_a_scorer_decides_in_rollouts(jobs: RampJobs) -> None:
    """With one future of one job, costs are 1 if the scorer blocks it."""
    env = RampReplayEnv(jobs=jobs, law="A", horizon_s=1e6, mask="possible")
    env.reset(seed=0)
    scorer = _scorer(3)
    blocked = set()
    for _ in range(25):
        state = env.exact_state()
        policy = RolloutPolicy(env, base=scorer, futures=1, arrivals=1)
        futures = Futures(
            gap_s=np.array([[1000.0]]),
            model=state_next(env, "model"),
            beta=state_next(env, "beta"),
        )
        policy.source = _Fixed(futures)
        costs = policy.costs()
        env.step(np.int64(0))
        after = env.exact_state()
        out = empty_candidates(env.tables, 1)
        encode(env.tables, after, out)
        history = np.zeros(NUM_HISTORY, dtype=np.float32)
        left = (after.horizon_s - after.now_s[0]) / after.interval_s[0]
        write_history(after.seen[0], left, history)
        room = (np.ones(12, dtype=np.float32), np.ones(9, dtype=np.float32))
        values = [
            score(scorer, features, history, *room) if ok else np.inf
            for features, ok in zip(out.features[0], out.possible[0], strict=True)
        ]
        expected = 1 + (int(np.argmin(values)) == 0)
        assert costs[0] == expected
        blocked.add(expected)
        assert state.over.tolist() == [False]
        env.step(np.int64(np.argmin(values)))
    assert blocked == {1, 2}


def state_next(env: RampReplayEnv, name: str) -> Any:
    """The true future, which no policy could know."""
    arrivals = env.session.episodes.arrivals
    position = int(arrivals.position[0]) + 1
    return np.array([[getattr(arrivals, name)[0, position]]])


def test_weights_that_do_not_go_together_are_refused() -> None:
    scorer = _scorer(0)
    with pytest.raises(StrategyError, match=r"last of a scorer has the shape \(8,\)"):
        check_scorer(scorer._replace(last=scorer.last[:8]))
    with pytest.raises(StrategyError, match="second_bias of a scorer has weights"):
        check_scorer(scorer._replace(second_bias=np.full(9, np.nan, dtype=np.float32)))


def test_what_is_believed_and_what_is_rolled_out_count_by_their_variances() -> None:
    believed, costs = np.array([5.0, 5.5]), np.array([2.0, 1.0])
    sure = combined(believed, costs, np.zeros(2))
    assert sure == pytest.approx([0.5, -0.5])
    unsure = combined(believed, costs, np.full(2, 1e9))
    assert unsure == pytest.approx([-0.25, 0.25], abs=1e-6)
    # As sure of one as of the other: the mean of the two.
    even = combined(believed, costs, np.full(2, 0.02))
    assert even == pytest.approx([0.125, -0.125])


def test_a_scorer_that_is_sure_is_not_rolled_out(jobs: RampJobs) -> None:
    """A candidate far worse than the best is not followed, nor is the best alone."""
    env = RampVecEnv(1, jobs=jobs, law="A", horizon_s=1e5, seed=0)
    env.reset()
    scorer = _scorer(3)
    sure = scorer._replace(last=scorer.last * 1e6)
    policy = RolloutPolicy(env, base=sure, futures=4, arrivals=4)
    policy.source = _Fixed(None)  # type: ignore[arg-type]
    obs = env.session.see()[0]
    masks = env.action_masks()
    expected = ScorerPolicy(sure).predict(obs, masks)
    assert policy.predict(obs, masks).tolist() == expected.tolist()
