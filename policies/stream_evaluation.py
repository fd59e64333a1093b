"""Play episodes of the job stream on any cluster, and say what came of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter

import numpy as np

from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from planner.errors import StrategyError
from policies.baselines import Policy, make_baseline
from policies.stream_worlds import StreamWorld

__all__ = [
    "StreamCase",
    "StreamPlayed",
    "StreamPolicyMaker",
    "StreamValidation",
    "fixed_baselines",
    "play_stream",
    "stream_validation",
]

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

    def env(self, *, observe: bool) -> JobStreamEnv:
        """The environment; see :class:`envs.stream.env.JobStreamEnv`."""
        law = StreamLaw(load=self.load)
        return JobStreamEnv(self.world.config(law, self.intervals, observe=observe))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlayed:
    """What came of episodes.

    Attributes:
        blocking_rates: Of each seed.
        summaries: Of each seed; the fields of
            :class:`envs.stream.summary.StreamSummary`.
        decision_s: Wall time of the policy for a decision.
    """

    blocking_rates: tuple[float, ...]
    summaries: tuple[Mapping[str, float], ...]
    decision_s: float

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
    return StreamPlayed(
        blocking_rates=tuple(one["blocking_rate"] for one in found),
        summaries=tuple(found),
        decision_s=spent_s / max(decisions, 1),
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
        envs: Of the cases, with observations.
        seeds: Of each.
        baselines: Least blocking rate of the fixed baselines in each case.
        names: Of those baselines.
    """

    cases: tuple[StreamCase, ...]
    envs: tuple[JobStreamEnv, ...]
    seeds: tuple[int, ...]
    baselines: tuple[float, ...]
    names: tuple[str, ...]

    def gains(self, make: StreamPolicyMaker) -> tuple[float, ...]:
        """Share by which a policy blocks less than the best baseline, of each case.

        Where that blocks nothing, 0 if the policy does not either, else minus what it
        blocks.
        """
        found = []
        for env, least in zip(self.envs, self.baselines, strict=True):
            rate = play_stream(make, env, self.seeds).blocking_rate
            found.append(1.0 - rate / least if least > 0.0 else -rate)
        return tuple(found)


def stream_validation(
    cases: Sequence[StreamCase], seeds: Sequence[int]
) -> StreamValidation:
    """Find the best fixed baseline of each case.

    Args:
        cases: Worlds and loads.
        seeds: Of each.
    """
    baselines, names = [], []
    for case in cases:
        env = case.env(observe=False)
        rates = {
            name: play_stream(_maker(name), env, seeds).blocking_rate
            for name in fixed_baselines(env)
        }
        names.append(min(rates, key=lambda name: rates[name]))
        baselines.append(rates[names[-1]])
    return StreamValidation(
        cases=tuple(cases),
        envs=tuple(case.env(observe=True) for case in cases),
        seeds=tuple(seeds),
        baselines=tuple(baselines),
        names=tuple(names),
    )


def _maker(name: str) -> StreamPolicyMaker:
    return lambda env: make_baseline(name, env.tables)
