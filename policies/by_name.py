"""Policies of the job stream by name, for command lines and benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.ramp.arrivals import ArrivalLaw
from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from planner.errors import UnknownNameError
from policies.baselines import BASELINES, DegreeTables, Policy, make_baseline
from policies.ramp.lookahead import RolloutPolicy
from policies.scorer import Scorer
from policies.stream.lookahead import StreamRolloutPolicy

if TYPE_CHECKING:
    # stable-baselines3, which the second one needs, takes seconds to import.
    from envs.ramp.replay_env import RampReplayEnv
    from envs.ramp.vector import RampVecEnv

    World = RampReplayEnv | RampVecEnv

__all__ = [
    "LEARNED",
    "OBSERVING",
    "POLICIES",
    "make_policy",
    "make_stream_policy",
    "stream_observes",
]

#: Learned policies: one forward pass a decision, and rollouts of the learned policy.
LEARNED = ("learned", "learned+lookahead")
#: All names; ``constant_K`` with a degree for K.
POLICIES = (*BASELINES, "rollout", *LEARNED)
#: Policies that read encoded observations.
OBSERVING = ("learned",)

#: Futures, and arrivals in each, of rollouts by the learned policy in the replay:
#: within 50 ms a decision on one core. Source: benchmarks/job_stream.py.
_LEARNED = (32, 24)
#: The same for rollouts by constants. Source: the settings of the first measurements on
#: the benchmark; law D needs more arrivals.
_CONSTANTS, _CONSTANTS_OF = (40, 16), {"D": (24, 24)}
#: The same on any cluster, by the learned policy and by the rule. Source:
#: benchmarks/job_stream_world.py, within 50 ms a decision on one core.
_STREAM_LEARNED, _STREAM_RULE = (24, 24), (24, 16)


def make_policy(
    name: str,
    env: World,
    *,
    seed: int = 0,
    law: ArrivalLaw | None = None,
    law_name: str = "",
    folder: str | Path | None = None,
) -> Policy:
    """Make a policy for an environment of the replay.

    Args:
        name: In :data:`POLICIES`.
        env: The environment that it decides for.
        seed: Seed of policies that draw.
        law: Law that rollouts draw futures from; None for the arrivals seen so far.
        law_name: The benchmark's name for it.
        folder: Folder of saved weights; by default those that ship.

    Raises:
        UnknownNameError: If there is no such policy.
        StrategyError: If weights cannot be read, or a constant has no block.
    """
    shape, scorer = _CONSTANTS_OF.get(law_name, _CONSTANTS), None
    if name in LEARNED:
        network, scorer = _learned(env, folder, "job_stream")
        if name == "learned":
            return network
        shape = _LEARNED
    elif name != "rollout":
        return _baseline(name, env.tables, seed)
    return RolloutPolicy(
        env,
        base=scorer,
        law=law,
        models=tuple(env.session.jobs.jobs),
        futures=shape[0],
        arrivals=shape[1],
        seed=seed,
    )


def stream_observes(name: str) -> bool:
    """Return True if a policy reads encoded observations on any cluster."""
    return name in OBSERVING or name in LEARNED


def make_stream_policy(
    name: str,
    env: JobStreamEnv,
    *,
    seed: int = 0,
    law: StreamLaw | None = None,
    folder: str | Path | None = None,
) -> Policy:
    """Make a policy for an environment of the job stream on any cluster.

    Args:
        name: In :data:`POLICIES`.
        env: The environment that it decides for.
        seed: Seed of policies that draw.
        law: Law that rollouts draw futures from; None for the arrivals seen so far.
        folder: Folder of saved weights; by default those that ship.

    Raises:
        UnknownNameError: If there is no such policy.
        StrategyError: If weights cannot be read or belong to another world, or a
            constant has no candidate.
    """
    shape, base = _STREAM_RULE, None
    if name in LEARNED:
        network, base = _learned(env, folder, "job_stream_world")
        if name == "learned":
            return network
        shape = _STREAM_LEARNED
    elif name != "rollout":
        return _baseline(name, env.tables, seed)
    return StreamRolloutPolicy(
        env,
        base=1 if base is None else base,
        futures=shape[0],
        arrivals=shape[1],
        law=law,
        seed=seed,
    )


def _learned(env: Any, folder: str | Path | None, world: str) -> tuple[Policy, Scorer]:
    """Read the weights: a policy of the network, and the scorer for rollouts."""
    # Graph networks take seconds to import, and other policies do without.
    from policies.compact import PointerDecider
    from policies.pointer import check_widths, load_policy
    from policies.saved import shipped_folder

    source = shipped_folder(world) if folder is None else folder
    saved = load_policy(env.graphs, env.device_graph, source)
    if isinstance(env, JobStreamEnv):
        check_widths(saved.network, env.observation_space, source)
    return PointerDecider(saved.network), saved.scorer


def _baseline(name: str, tables: DegreeTables, seed: int) -> Policy:
    try:
        return make_baseline(name, tables, seed)
    except UnknownNameError as error:
        raise UnknownNameError("policy", name, POLICIES) from error
