"""Play episodes of the job stream on any cluster, and judge policies by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from time import perf_counter

import numpy as np

from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from envs.stream.state import summarize
from planner.errors import StrategyError
from planner.schema.stream import StreamRecord
from policies.baselines import Policy, make_baseline
from policies.scorer import Scorer
from policies.stream.rollouts import StreamBase, play_out, stream_room
from policies.stream.worlds import StreamWorld
from policies.validation import Played, Validation

__all__ = [
    "StreamCase",
    "StreamPolicyMaker",
    "StreamValidation",
    "fixed_baselines",
    "play_stream",
    "stream_validation",
]

#: Baselines that are played on all seeds of a case, the best of the first seed.
_FINALISTS = 3

#: Cases are worlds at a load, deciders are scorers.
StreamValidation = Validation["StreamCase", Scorer]
#: Makes a policy for an environment, whose jobs, cluster and exact state it may ask.
StreamPolicyMaker = Callable[[JobStreamEnv], Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCase:
    """A world at a load, with Poisson arrivals and uniform deadlines.

    Attributes:
        world: Cluster and jobs.
        load: Work offered over what the cluster can do.
        intervals: Length of an episode in mean times between arrivals.
    """

    world: StreamWorld
    load: float
    intervals: float = 1000.0

    def env(self, *, observe: bool, record: bool = False) -> JobStreamEnv:
        """Make the environment; see :class:`envs.stream.env.JobStreamEnv`."""
        law = StreamLaw(load=self.load)
        config = self.world.config(law, self.intervals, observe=observe)
        return JobStreamEnv(replace(config, record=record))


def play_stream(
    make: StreamPolicyMaker, env: JobStreamEnv, seeds: Sequence[int]
) -> Played:
    """Play an episode of each seed.

    Args:
        make: Makes a policy for each episode.
        env: Environment to play in.
        seeds: Seeds of the arrivals.

    Raises:
        StrategyError: If there are no seeds.
    """
    if not seeds:
        raise StrategyError("no seeds to play; give at least one")
    records: list[StreamRecord] = []
    found, spent_s, decisions = [], 0.0, 0
    for seed in seeds:
        obs, info = env.reset(seed=seed)
        policy, ended = make(env), env.session.over
        while not ended:
            begin = perf_counter()
            action = policy.predict(obs, env.action_masks())
            spent_s += perf_counter() - begin
            decisions += 1
            obs, _, ended, _, info = env.step(np.int64(action))
        found.append(info["summary"])
        if "record" in info:
            records.append(info["record"].model_copy(update={"seed": seed}))
    return Played(
        summaries=tuple(found),
        decision_s=spent_s / max(decisions, 1),
        records=tuple(records),
    )


def fixed_baselines(env: JobStreamEnv) -> tuple[str, ...]:
    """Return the names of the fixed baselines, every constant included."""
    degrees = sorted(set(env.tables.degrees.tolist()))
    constants = tuple(f"constant_{degree}" for degree in degrees)
    return ("para_max", "para_min", "min_feasible", *constants)


def stream_validation(
    cases: Sequence[StreamCase], seeds: Sequence[int], pool: Executor | None = None
) -> StreamValidation:
    """Find the best fixed baseline of each case.

    Args:
        cases: Worlds and loads.
        seeds: Seeds of each case.
        pool: Processes to play in.
    """
    work = [(case, tuple(seeds)) for case in cases]
    best = list((map if pool is None else pool.map)(_best_fixed, work))
    return Validation(
        cases=tuple(cases),
        seeds=tuple(seeds),
        rate=_scored_rate,
        baselines=tuple(rate for rate, _ in best),
        names=tuple(name for _, name in best),
    )


@lru_cache(maxsize=64)
def _unseen(case: StreamCase) -> JobStreamEnv:
    return case.env(observe=False)


def _scored_rate(work: tuple[StreamCase, Sequence[int], Scorer]) -> float:
    """Mean blocking rate of a scorer, played in compiled code without observations."""
    case, seeds, scorer = work
    env, base, found = _unseen(case), StreamBase(1, scorer), []
    session = env.session
    actions = int(session.observer.action_space.n)
    for seed in seeds:
        env.reset(seed=seed)
        room = stream_room(session.tables, session.state, base, actions)
        room = room._replace(state=session.state)
        play_out(session.tables, session.stream, session.rewards, base, room)
        found.append(summarize(session.tables, session.state).blocking_rate)
    return fmean(found)


def _best_fixed(work: tuple[StreamCase, tuple[int, ...]]) -> tuple[float, str]:
    """Find the best on all seeds among those that are best on the first."""
    case, seeds = work
    env, names = _unseen(case), fixed_baselines(_unseen(case))
    first = sorted(
        (play_stream(_maker(name), env, seeds[:1]).blocking_rate, name)
        for name in names
    )
    return min(
        (play_stream(_maker(name), env, seeds).blocking_rate, name)
        for _, name in first[:_FINALISTS]
    )


def _maker(name: str) -> StreamPolicyMaker:
    return lambda env: make_baseline(name, env.tables)
