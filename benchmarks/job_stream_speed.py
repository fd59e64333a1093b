"""Decisions a second of the job stream on one core.

python -m benchmarks.job_stream_speed

Seconds of processor time, code compiled beforehand. The original simulator makes 7 to
14 decisions a second. Source: as envs.ramp, its published code on this kind of machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from envs.ramp.arrivals import LAWS
from envs.ramp.features import empty_candidates, encode
from envs.ramp.jobs import MODELS, read_jobs
from envs.ramp.replay_env import RampReplayEnv
from envs.ramp.vector import RampVecEnv
from envs.ramp.world import RampWorld
from envs.stream.env import JobStreamEnv
from policies.baselines import Constant, ParaMin, make_baseline
from policies.ramp.lookahead import RolloutPolicy

__all__ = ["Rate", "job_stream_speed"]

_ROWS, _STEPS = 64, 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One line of the table.

    Attributes:
        name: Name of the policy and environment.
        per_s: Decisions a second of processor time.
        target_per_s: Goal; None if there is none.
    """

    name: str
    per_s: float
    target_per_s: float | None = None

    def __str__(self) -> str:
        asked = (
            "" if self.target_per_s is None else f"  (asked: {self.target_per_s:,.0f})"
        )
        cost = f"{1e6 / self.per_s:,.1f} us"
        return f"{self.name:58} {self.per_s:10,.0f} /s {cost:>12}{asked}"


def _world() -> Rate:
    """Para_min in the reference world, without cached step times."""
    jobs, worst = read_jobs(), np.inf
    degrees = np.array(jobs.degrees)
    for law in LAWS:
        jobs.forget()
        world = RampWorld(jobs, LAWS[law].draw(MODELS, 1e6, 0))
        start, count = time.process_time(), 0
        while world.head is not None:
            valid = degrees[world.mask()]
            enough = valid[valid >= np.ceil(1 / world.head.beta)]
            world.decide(int(enough[0] if len(enough) else max(valid, default=0)))
            count += 1
        worst = min(worst, count / (time.process_time() - start))
    return Rate(
        name="reference world, Para_min, empty memo, slowest law",
        per_s=worst,
        target_per_s=1500,
    )


def _single(**options: Any) -> float:
    env = RampReplayEnv(law="A", mask="benchmark", **options)
    env.session.jobs.forget()
    policy = ParaMin(env.tables)
    obs, _ = env.reset(seed=0)
    start, count, ended = time.process_time(), 0, False
    while not ended:
        action = policy.predict(obs, env.action_masks())
        obs, _, ended, *_ = env.step(np.int64(action))
        count += 1
    return count / (time.process_time() - start)


def _batched(policy: Callable[[RampVecEnv], Any], **options: Any) -> float:
    """Steps with what they need: masks, infos, and new episodes where one ends."""
    env = RampVecEnv(_ROWS, law=list(LAWS), seed=0, **options)
    decide, obs = policy(env), env.reset()
    start = time.process_time()
    for _ in range(_STEPS):
        obs, *_ = env.step(decide.predict(obs, env.action_masks()))
    return _ROWS * _STEPS / (time.process_time() - start)


def _encoding() -> float:
    """Features alone, in states that constant degree 4 leads to."""
    env = RampVecEnv(_ROWS, law="A", observe=False, seed=0)
    env.reset()
    out = empty_candidates(env.tables, _ROWS)
    spent, policy, obs = 0.0, Constant(env.tables, 4), env.reset()
    for _ in range(500):
        state = env.exact_state()
        start = time.process_time()
        encode(env.tables, state, out)
        spent += time.process_time() - start
        obs, *_ = env.step(policy.predict(obs, env.action_masks()))
    return _ROWS * 500 / spent


def _stream(*, observe: bool) -> float:
    """A random policy on any cluster at load 1, its own time included."""
    env = JobStreamEnv(observe=observe)
    spent, count = 0.0, 0
    # The first episode loads or compiles the code.
    for seed in range(3):
        policy = make_baseline("random", env.tables, seed)
        obs, _ = env.reset(seed=seed)
        start, ended = time.process_time(), False
        while not ended:
            action = policy.predict(obs, env.action_masks())
            obs, _, ended, *_ = env.step(np.int64(action))
            count += seed > 0
        spent += (time.process_time() - start) * (seed > 0)
    return count / spent


def _rollouts(count: int = 400) -> float:
    env = RampReplayEnv(law="A", observe=False)
    policy = RolloutPolicy(env, base=4, law=LAWS["A"])
    obs, _ = env.reset(seed=0)
    policy.predict(obs, env.action_masks())
    spent = 0.0
    for _ in range(count):
        start = time.process_time()
        action = policy.predict(obs, env.action_masks())
        spent += time.process_time() - start
        obs, *_ = env.step(np.int64(action))
    return count / spent


def job_stream_speed() -> list[Rate]:
    """All rates, one core."""
    # The first of each loads or compiles its code.
    _single(), _single(observe=False), _world()
    return [
        _world(),
        Rate(name="RampReplayEnv, Para_min, empty memo", per_s=_single(observe=False)),
        Rate(name="RampReplayEnv, Para_min, with observations", per_s=_single()),
        Rate(
            name=f"RampVecEnv of {_ROWS}, Para_min, without encoding",
            per_s=_batched(
                lambda env: ParaMin(env.tables), observe=False, mask="benchmark"
            ),
            target_per_s=10_000,
        ),
        Rate(
            name=f"RampVecEnv of {_ROWS}, constant 4, without encoding",
            per_s=_batched(lambda env: Constant(env.tables, 4), observe=False),
            target_per_s=10_000,
        ),
        Rate(
            name=f"RampVecEnv of {_ROWS}, constant 4, with encoding",
            per_s=_batched(lambda env: Constant(env.tables, 4)),
        ),
        Rate(name="features alone", per_s=_encoding(), target_per_s=200_000),
        Rate(name="rollouts, 40 futures of 16 arrivals", per_s=_rollouts()),
        Rate(
            name="JobStreamEnv, random, without encoding",
            per_s=_stream(observe=False),
            target_per_s=500,
        ),
        Rate(
            name="JobStreamEnv, random, with observations",
            per_s=_stream(observe=True),
            target_per_s=300,
        ),
    ]


def main() -> None:
    """Print the table."""
    for rate in job_stream_speed():
        print(rate)


if __name__ == "__main__":
    main()
