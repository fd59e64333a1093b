"""Replays of the job stream, of a trace or a law, under a policy by its name."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from envs.ramp.arrivals import ArrivalLaw, get_law
from envs.ramp.jobs import MODELS
from envs.ramp.replay_env import RampReplayEnv
from planner.errors import StrategyError, UnknownNameError
from policies.baselines import BASELINES, Policy, make_baseline
from policies.by_name import OBSERVING, POLICIES, make_policy

__all__ = [
    "PLANNERS",
    "Decision",
    "Planner",
    "ReplayResult",
    "Told",
    "replay_law",
    "replay_trace",
    "scaled_law",
    "write_decisions",
]

#: Apart from the seeds of traces: a planner must not draw what its trace was drawn by.
_POLICY_SEEDS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One row of a replay's record.

    Attributes:
        arrival_s: When the job arrived.
        model: Its name.
        beta: Its deadline.
        degree: The action taken; 0 turned it away.
        outcome: One of placed, refused, no_room and late.
    """

    arrival_s: float
    model: str
    beta: float
    degree: int
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """A replay.

    Attributes:
        decisions: In order.
        summary: Fields of envs.ramp.world.Summary and the blocking rate.
        ms_per_decision: Wall time that the policy took; the first decision, which
            loads compiled code, left out.
    """

    decisions: tuple[Decision, ...]
    summary: dict[str, float]
    ms_per_decision: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A law that a planner knows its trace to be of.

    Attributes:
        name: In LAWS.
        load: Arrivals over the law's own in the same time.
    """

    name: str
    load: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Factory of a policy that needs more than ``job`` and ``job_graph``.

    Attributes:
        make: Takes the environment to decide in, a seed, and the law if it is known.
        observe: Whether the policy reads encoded observations.
    """

    make: Callable[[RampReplayEnv, int, Told | None], Policy]
    observe: bool = False


def scaled_law(name: str, load: float = 1.0) -> ArrivalLaw:
    """Return one of LAWS with its rate of arrivals scaled.

    Raises:
        UnknownNameError: If there is no such law.
        StrategyError: If the load is not a positive number.
    """
    if not 0.0 < load < np.inf:
        raise StrategyError(f"load={load}; give a positive share of the law's own")
    law = get_law(name)
    return replace(law, interval_s=law.interval_s / load)


def _by_name(name: str) -> Planner:
    def make(env: RampReplayEnv, seed: int, told: Told | None) -> Policy:
        law = None if told is None else scaled_law(told.name, told.load)
        told_name = "" if told is None else told.name
        return make_policy(name, env, seed=seed, law=law, law_name=told_name)

    return Planner(make=make, observe=name in OBSERVING)


#: Policies that are no baselines, by name.
PLANNERS: dict[str, Planner] = {
    name: _by_name(name) for name in POLICIES if name not in BASELINES
}


def _environment(policy: str, **options: Any) -> RampReplayEnv:
    planner = PLANNERS.get(policy)
    return RampReplayEnv(
        # The fixed policies are defined over the benchmark's own mask.
        mask="benchmark" if planner is None else "possible",
        observe=planner is not None and planner.observe,
        **options,
    )


def _policy(name: str, env: RampReplayEnv, seed: int, told: Told | None) -> Policy:
    if name in PLANNERS:
        return PLANNERS[name].make(env, seed, told)
    try:
        return make_baseline(name, env.tables, seed)
    except UnknownNameError as error:
        known = (*BASELINES, *PLANNERS)
        raise UnknownNameError("policy", name, known) from error


def _run(env: RampReplayEnv, decider: Policy, seed: int, bar: str) -> ReplayResult:
    obs, _ = env.reset(seed=seed)
    stream, names = env.session.episodes.arrivals, list(env.session.jobs.jobs)
    decisions, spent_s = [], 0.0
    info: dict[str, Any] = {}
    count = int(stream.decided[0])
    for number in tqdm(range(count), desc=bar, disable=None if bar else True):
        start = time.perf_counter()
        action = decider.predict(obs, env.action_masks())
        spent_s += time.perf_counter() - start if number else 0.0
        obs, _, _, _, info = env.step(np.int64(action))
        decisions.append(
            Decision(
                arrival_s=float(stream.time_s[0, number]),
                model=names[stream.model[0, number]],
                beta=float(stream.beta[0, number]),
                degree=info["degree"],
                outcome=info["outcome"],
            )
        )
    return ReplayResult(
        decisions=tuple(decisions),
        summary=info["summary"],
        ms_per_decision=1e3 * spent_s / max(count - 1, 1),
    )


def replay_trace(
    arrivals: Path,
    policy: str,
    *,
    horizon_s: float = 1e6,
    seed: int = 0,
    law: str | None = None,
    profiles: Path | None = None,
    models: tuple[str, ...] = MODELS,
) -> ReplayResult:
    """Replay a trace.

    Args:
        arrivals: CSV file.
        policy: A name of BASELINES, with a degree for K, or of PLANNERS.
        horizon_s: When the episode ends.
        seed: For policies that draw.
        law: Told to policies that draw futures.
        profiles: Folder of PipeDream profiles.
        models: That may arrive.

    Raises:
        MeshwrightError: If the trace, the policy or a number is wrong.
    """
    env = _environment(
        policy, trace=arrivals, horizon_s=horizon_s, folder=profiles, models=models
    )
    told = None if law is None else Told(name=law)
    return _run(env, _policy(policy, env, seed, told), seed, policy)


def replay_law(
    policy: str,
    law: str,
    seed: int,
    *,
    load: float = 1.0,
    told: bool = False,
    horizon_s: float = 1e6,
) -> ReplayResult:
    """Replay the trace that a law draws with a seed, the same for all policies.

    Args:
        policy: As for :func:`replay_trace`.
        law: A name of LAWS.
        seed: Seed of the trace; the policy has another.
        load: Arrivals over the law's own in the same time.
        told: Whether policies that draw futures know the law.
        horizon_s: When the episode ends.

    Raises:
        MeshwrightError: If the policy, the law or a number is wrong.
    """
    env = _environment(policy, law=scaled_law(law, load), horizon_s=horizon_s)
    known = Told(name=law, load=load) if told else None
    return _run(env, _policy(policy, env, _POLICY_SEEDS + seed, known), seed, "")


def write_decisions(decisions: Sequence[Decision], path: Path) -> None:
    """Write a CSV with a row per decision."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(Decision.__slots__)
        for row in decisions:
            time_s, beta = f"{row.arrival_s:.15g}", f"{row.beta:.15g}"
            writer.writerow([time_s, row.model, beta, row.degree, row.outcome])
