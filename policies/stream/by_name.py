"""Every policy of the job stream on any cluster by a name."""

from __future__ import annotations

from pathlib import Path

from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from planner.errors import StrategyError, UnknownNameError
from policies.baselines import Policy, make_baseline
from policies.ramp.by_name import LEARNED, OBSERVING, POLICIES
from policies.stream.lookahead import StreamRolloutPolicy

__all__ = ["make_stream_policy", "stream_observes"]

#: Futures, and arrivals of each, of rollouts by what was learned and by the rule.
#: Source: benchmarks/job_stream_world.py, within 50 ms a decision on one core.
_LOOKED_AT, _ROLLED_OUT = (24, 24), (24, 16)


def stream_observes(name: str) -> bool:
    """Whether a policy reads encoded observations."""
    return name in OBSERVING or name in LEARNED


def make_stream_policy(
    name: str,
    env: JobStreamEnv,
    *,
    seed: int = 0,
    law: StreamLaw | None = None,
    folder: str | Path | None = None,
) -> Policy:
    """A policy for an environment.

    Args:
        name: In :data:`policies.ramp.by_name.POLICIES`.
        env: That it decides for.
        seed: For policies that draw.
        law: Told to policies that draw futures; else they go by what they see.
        folder: Of saved weights; those that come with the package by default.

    Raises:
        UnknownNameError: If there is no such policy.
        StrategyError: If weights cannot be read or are of another world, or a constant
            has no candidate.
    """
    if name == "rollout":
        futures, arrivals = _ROLLED_OUT
        return StreamRolloutPolicy(
            env, futures=futures, arrivals=arrivals, law=law, seed=seed
        )
    if name in LEARNED:
        # Graph networks take seconds to import, and are not everybody's.
        from policies.actor import widths_of
        from policies.learned import PointerDecider
        from policies.saved import load_policy, shipped_folder

        source = shipped_folder("job_stream_world") if folder is None else folder
        saved = load_policy(env.graphs, env.device_graph, source)
        wanted = widths_of(env.observation_space)
        if saved.network.widths != wanted:
            raise StrategyError(
                f"{source} is of a policy for observations of "
                f"{saved.network.widths}, here they are {wanted}; give weights that "
                f"were trained in this world"
            )
        if name == "learned":
            return PointerDecider(saved.network)
        futures, arrivals = _LOOKED_AT
        return StreamRolloutPolicy(
            env,
            base=saved.scorer,
            futures=futures,
            arrivals=arrivals,
            law=law,
            seed=seed,
        )
    try:
        return make_baseline(name, env.tables, seed)
    except UnknownNameError as error:
        raise UnknownNameError("policy", name, POLICIES) from error
