"""Gymnasium worlds over the cost model. May import planner, never policies.

Importing this package registers its environments with ``gymnasium.make``, if gymnasium
is installed; ``gymnasium.make("envs:meshwright/RampReplay-v0")`` imports it itself.
"""

from __future__ import annotations

from importlib.util import find_spec

__all__: list[str] = []

if find_spec("gymnasium") is not None:
    from gymnasium.envs.registration import register

    register(
        id="meshwright/RampReplay-v0",
        entry_point="envs.ramp.replay_env:RampReplayEnv",
    )
    register(
        id="meshwright/JobStream-v0",
        entry_point="envs.stream.env:JobStreamEnv",
    )
    register(
        id="meshwright/ElasticStream-v0",
        entry_point="envs.elastic.env:ElasticStreamEnv",
    )
    register(
        id="meshwright/Partition-v0",
        entry_point="envs.partition.env:PartitionEnv",
    )
