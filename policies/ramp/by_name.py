"""Every policy of the job stream by a name: for command lines and benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from envs.ramp.arrivals import ArrivalLaw
from planner.errors import UnknownNameError
from policies.baselines import BASELINES, Policy, make_baseline
from policies.ramp.lookahead import RolloutPolicy
from policies.scorer import Scorer

if TYPE_CHECKING:
    from envs.ramp.replay_env import RampReplayEnv
    from envs.ramp.vector import RampVecEnv

    World = RampReplayEnv | RampVecEnv

__all__ = ["LEARNED", "OBSERVING", "POLICIES", "make_policy"]

#: Policies that have learned: one look a decision, and rollouts of what was learned.
LEARNED = ("learned", "learned+lookahead")
#: All names; ``constant_K`` with a degree for K.
POLICIES = (*BASELINES, "rollout", *LEARNED)
#: Those that read encoded observations.
OBSERVING = ("learned",)
#: Futures, and arrivals of each, of rollouts by what was learned: within 50 ms a
#: decision on one core. Source: benchmarks/job_stream.py.
_LOOKED_AT = (32, 24)
#: Likewise of rollouts by constants. Source: the settings with which they were first
#: measured on the benchmark; law D needs more arrivals.
_ROLLED_OUT = {"D": (24, 24)}


def make_policy(
    name: str,
    env: World,
    *,
    seed: int = 0,
    law: ArrivalLaw | None = None,
    law_name: str = "",
    folder: str | Path | None = None,
) -> Policy:
    """A policy for an environment.

    Args:
        name: In POLICIES.
        env: That it decides for.
        seed: For policies that draw.
        law: Told to policies that draw futures; else they go by what they see.
        law_name: The benchmark's name for it.
        folder: Of saved weights; those that come with the package by default.

    Raises:
        UnknownNameError: If there is no such policy.
        StrategyError: If weights cannot be read, or a constant has no block.
    """
    if name == "rollout":
        futures, arrivals = _ROLLED_OUT.get(law_name, (40, 16))
        return _rollouts(env, None, (futures, arrivals), law, seed)
    if name in LEARNED:
        # Graph networks take seconds to import, and are not everybody's.
        from policies.learned import PointerDecider
        from policies.saved import load_policy

        saved = load_policy(env.graphs, env.device_graph, folder)
        if name == "learned":
            return PointerDecider(saved.network)
        return _rollouts(env, saved.scorer, _LOOKED_AT, law, seed)
    try:
        return make_baseline(name, env.tables, seed)
    except UnknownNameError as error:
        raise UnknownNameError("policy", name, POLICIES) from error


def _rollouts(
    env: World,
    scorer: Scorer | None,
    shape: tuple[int, int],
    law: ArrivalLaw | None,
    seed: int,
) -> RolloutPolicy:
    return RolloutPolicy(
        env,
        base=scorer,
        law=law,
        models=tuple(env.session.jobs.jobs),
        futures=shape[0],
        arrivals=shape[1],
        seed=seed,
    )
