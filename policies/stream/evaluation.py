"""Play episodes of the job stream on any cluster, and say what came of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

__all__ = [
    "StreamCase",
    "StreamPlayed",
    "StreamPolicyMaker",
    "StreamValidation",
    "fixed_baselines",
    "play_stream",
    "stream_validation",
]

#: Baselines that are played on all seeds of a case: others were far behind on one.
_FINALISTS = 3

#: Makes a policy for an environment, whose jobs, cluster and exact state it may ask.
StreamPolicyMaker = Callable[[JobStreamEnv], Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCase:
    """A world at a load, with Poisson arrivals and uniform deadlines.

    Attributes:
        world: Cluster and jobs.
        load: Work offered over what the cluster can do.
        intervals: Mean times between arrivals that an episode lasts.
    """

    world: StreamWorld
    load: float
    intervals: float = 1000.0

    def env(self, *, observe: bool, record: bool = False) -> JobStreamEnv:
        """The environment; see :class:`envs.stream.env.JobStreamEnv`."""
        law = StreamLaw(load=self.load)
        config = self.world.config(law, self.intervals, observe=observe)
        return JobStreamEnv(replace(config, record=record))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlayed:
    """What came of episodes.

    Attributes:
        blocking_rates: Of each seed.
        summaries: Of each seed; the fields of
            :class:`envs.stream.state.StreamSummary`.
        decision_s: Wall time of the policy for a decision.
        records: Of each seed, if the environment keeps them.
    """

    blocking_rates: tuple[float, ...]
    summaries: tuple[Mapping[str, float], ...]
    decision_s: float
    records: tuple[StreamRecord, ...] = ()

    @property
    def blocking_rate(self) -> float:
        """Mean over the seeds."""
        return fmean(self.blocking_rates)

    def mean(self, name: str) -> float:
        """Mean of a field over the seeds."""
        return fmean(summary[name] for summary in self.summaries)


def play_stream(
    make: StreamPolicyMaker, env: JobStreamEnv, seeds: Sequence[int]
) -> StreamPlayed:
    """Play an episode of each seed.

    Args:
        make: Makes the policy, anew for each episode.
        env: To play in.
        seeds: Of the arrivals.

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
    return StreamPlayed(
        blocking_rates=tuple(one["blocking_rate"] for one in found),
        summaries=tuple(found),
        decision_s=spent_s / max(decisions, 1),
        records=tuple(records),
    )


def fixed_baselines(env: JobStreamEnv) -> tuple[str, ...]:
    """Names of the baselines that look at nothing ahead, every constant included."""
    degrees = sorted(set(env.tables.degrees.tolist()))
    constants = tuple(f"constant_{degree}" for degree in degrees)
    return ("para_max", "para_min", "min_feasible", *constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamValidation:
    """Cases that progress is judged by, with what the best baseline comes to there.

    Attributes:
        cases: Worlds and loads.
        seeds: Of each.
        baselines: Least blocking rate of the fixed baselines in each case.
        names: Of those baselines.
    """

    cases: tuple[StreamCase, ...]
    seeds: tuple[int, ...]
    baselines: tuple[float, ...]
    names: tuple[str, ...]

    def gains(self, scorer: Scorer, pool: Executor | None = None) -> tuple[float, ...]:
        """Share by which a scorer blocks less than the best baseline, of each case.

        Where that blocks nothing, 0 if the scorer does not either, else minus what it
        blocks.

        Args:
            scorer: That decides.
            pool: Processes to play in.
        """
        work = [(case, self.seeds, scorer) for case in self.cases]
        rates = (map if pool is None else pool.map)(_scored_rate, work)
        return tuple(
            1.0 - rate / least if least > 0.0 else -rate
            for rate, least in zip(rates, self.baselines, strict=True)
        )


def stream_validation(
    cases: Sequence[StreamCase], seeds: Sequence[int], pool: Executor | None = None
) -> StreamValidation:
    """Find the best fixed baseline of each case.

    Args:
        cases: Worlds and loads.
        seeds: Of each.
        pool: Processes to play in.
    """
    work = [(case, tuple(seeds)) for case in cases]
    best = list((map if pool is None else pool.map)(_best_fixed, work))
    return StreamValidation(
        cases=tuple(cases),
        seeds=tuple(seeds),
        baselines=tuple(rate for rate, _ in best),
        names=tuple(name for _, name in best),
    )


@lru_cache(maxsize=64)
def _unseen(case: StreamCase) -> JobStreamEnv:
    return case.env(observe=False)


def _scored_rate(work: tuple[StreamCase, tuple[int, ...], Scorer]) -> float:
    """Mean blocking rate of a scorer: in compiled code, which needs no observations."""
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
    """The best on all seeds of those that are best on the first."""
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
