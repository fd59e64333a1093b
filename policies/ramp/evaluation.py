"""Play episodes of the replay with a policy, and judge policies by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from policies.validation import Played, Validation

__all__ = ["PolicyMaker", "ReplayValidation", "play", "validation"]

#: Makes a policy for an environment, whose jobs, cluster and exact state it may ask.
PolicyMaker = Callable[[RampVecEnv], Policy]
#: Cases are names of laws.
ReplayValidation = Validation[str, PolicyMaker]


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
    """Play one episode for each seed, all side by side.

    Args:
        make: Makes the policy.
        jobs: Jobs that may arrive.
        law: Law of the arrivals.
        seeds: Consecutive.
        horizon_s: End of the episodes.
        observe: Whether observations are encoded in full, for a policy that reads them.
        mask: Actions that are allowed; the fixed policies are defined over the
            benchmark's.
        record: Whether to keep the fate of every job.

    Raises:
        StrategyError: If there are no seeds, or they do not count up by one.
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
                name = law if isinstance(law, str) else None
                records[row] = infos[row]["record"].model_copy(
                    update={"law": name, "seed": seeds[row]}
                )
        ended |= over
    return Played(
        summaries=tuple(found[row] for row in range(len(seeds))),
        decision_s=spent_s / decisions,
        records=tuple(records[row] for row in sorted(records)),
    )


def validation(
    jobs: RampJobs, laws: tuple[str, ...], seeds: range, horizon_s: float = 1e6
) -> ReplayValidation:
    """Find the best constant degree of each law.

    Args:
        jobs: Jobs that may arrive.
        laws: Names of laws.
        seeds: Consecutive; the same for each law.
        horizon_s: End of the episodes.
    """

    def rate(work: tuple[str, Sequence[int], PolicyMaker]) -> float:
        law, chosen, make = work
        return play(make, jobs, law, chosen, horizon_s=horizon_s).blocking_rate

    def constant(law: str, degree: int) -> float:
        return play(
            lambda env: Constant(env.tables, degree),
            jobs,
            law,
            seeds,
            horizon_s=horizon_s,
            observe=False,
            mask="benchmark",
        ).blocking_rate

    degrees = ramp_tables(jobs).degrees.tolist()
    best = [min((constant(law, degree), degree) for degree in degrees) for law in laws]
    return Validation(
        cases=laws,
        seeds=seeds,
        rate=rate,
        baselines=tuple(least for least, _ in best),
        names=tuple(f"constant_{degree}" for _, degree in best),
    )
