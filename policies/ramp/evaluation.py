"""Play episodes with a policy, and say what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from time import perf_counter

import numpy as np

from envs.ramp.arrivals import ArrivalLaw
from envs.ramp.jobs import RampJobs, ramp_tables
from envs.ramp.observation import MaskKind
from envs.ramp.session import ReplayConfig
from envs.ramp.vector import RampVecEnv
from planner.errors import StrategyError
from planner.schema.stream import StreamRecord
from policies.baselines import Constant, Policy

__all__ = ["Played", "PolicyMaker", "Validation", "play", "validation"]

#: Makes a policy for an environment, whose jobs, cluster and exact state it may ask.
PolicyMaker = Callable[[RampVecEnv], Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of episodes.

    Attributes:
        blocking_rates: Of each seed.
        throughput_bytes_per_s: Mean over the seeds.
        mean_jct_s: Mean over the seeds with completed jobs; NaN without any.
        decision_s: Wall time of the policy for a decision, side by side.
        records: Of each seed, if they were asked for.
    """

    blocking_rates: tuple[float, ...]
    throughput_bytes_per_s: float
    mean_jct_s: float
    decision_s: float
    records: tuple[StreamRecord, ...] = ()

    @property
    def blocking_rate(self) -> float:
        """Mean over the seeds."""
        return fmean(self.blocking_rates)


def play(
    make: PolicyMaker,
    jobs: RampJobs,
    law: str | ArrivalLaw,
    seeds: Sequence[int],
    *,
    horizon_s: float = 1e6,
    observe: bool = True,
    mask: MaskKind = "possible",
    record: bool = False,
) -> Played:
    """Play one episode of each seed, all side by side.

    Args:
        make: Makes the policy.
        jobs: What may arrive.
        law: Of the arrivals.
        seeds: Consecutive.
        horizon_s: When episodes end.
        observe: Whether observations are encoded in full, for a policy that looks.
        mask: Which actions are allowed; the fixed policies are defined over that of the
            benchmark.
        record: Whether to keep what became of every job.

    Raises:
        StrategyError: If the seeds are none, or do not count up by one.
    """
    if not seeds or list(seeds) != list(range(seeds[0], seeds[0] + len(seeds))):
        raise StrategyError(f"seeds={list(seeds)}; give at least one, counting up by 1")
    config = ReplayConfig(
        law=law,
        jobs=jobs,
        horizon_s=horizon_s,
        observe=observe,
        mask=mask,
        record=record,
    )
    env = RampVecEnv(len(seeds), config, seed=seeds[0])
    policy = make(env)
    obs, ended = env.reset(), np.zeros(len(seeds), dtype=np.bool_)
    found: dict[int, dict[str, float]] = {}
    records: dict[int, StreamRecord] = {}
    spent_s, decisions = 0.0, 0
    while not ended.all():
        begin = perf_counter()
        actions = policy.predict(obs, env.action_masks())
        spent_s += perf_counter() - begin
        decisions += len(seeds)
        obs, _, over, infos = env.step(actions)
        for row in np.flatnonzero(over & ~ended).tolist():
            found[row] = infos[row]["summary"]
            if record:
                called = law if isinstance(law, str) else None
                records[row] = infos[row]["record"].model_copy(
                    update={"law": called, "seed": seeds[row]}
                )
        ended |= over
    every = [found[row] for row in range(len(seeds))]
    jct_s = [one["mean_jct_s"] for one in every if not np.isnan(one["mean_jct_s"])]
    return Played(
        blocking_rates=tuple(one["blocking_rate"] for one in every),
        throughput_bytes_per_s=fmean(one["throughput_bytes_per_s"] for one in every),
        mean_jct_s=fmean(jct_s) if jct_s else float("nan"),
        decision_s=spent_s / decisions,
        records=tuple(records[row] for row in sorted(records)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Streams that progress is judged by, with what the best constants come to there.

    Attributes:
        jobs: What may arrive.
        laws: Names of laws.
        seeds: Consecutive; of each law.
        horizon_s: Of the episodes.
        constants: Blocking rate of the best constant degree of each law.
    """

    jobs: RampJobs
    laws: tuple[str, ...]
    seeds: range
    horizon_s: float
    constants: tuple[float, ...]

    def gains(self, make: PolicyMaker) -> tuple[float, ...]:
        """Share by which a policy blocks less than the best constant, for each law."""
        return tuple(
            1.0 - self._rate(make, law) / constant
            for law, constant in zip(self.laws, self.constants, strict=True)
        )

    def _rate(self, make: PolicyMaker, law: str) -> float:
        return play(
            make, self.jobs, law, self.seeds, horizon_s=self.horizon_s
        ).blocking_rate


def validation(
    jobs: RampJobs, laws: tuple[str, ...], seeds: range, horizon_s: float = 1e6
) -> Validation:
    """Choose the best constants, and make a Validation."""
    tables = ramp_tables(jobs)
    constants = []
    for law in laws:
        rates = [
            play(
                partial(_constant, degree=degree),
                jobs,
                law,
                seeds,
                horizon_s=horizon_s,
                observe=False,
                mask="benchmark",
            ).blocking_rate
            for degree in tables.degrees.tolist()
        ]
        constants.append(min(rates))
    return Validation(
        jobs=jobs,
        laws=laws,
        seeds=seeds,
        horizon_s=horizon_s,
        constants=tuple(constants),
    )


def _constant(env: RampVecEnv, degree: int) -> Policy:
    return Constant(env.tables, degree)
