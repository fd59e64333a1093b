"""Small worlds of every kind, and episodes of random actions in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.partition.env import PartitionEnv
from envs.partition.world import World
from tests.cost.made import device, hosts
from tests.envs.partition.small import small_world, uneven_machines
from tests.search.device_order.made import far_sites

__all__ = ["ROOM", "WORLDS", "env_of", "play", "quick_env"]

#: Of observations.
ROOM = {"max_units": 16, "max_groups": 6, "max_meshes": 48}
WORLDS = {
    "all": small_world(),
    "any": small_world(name="any", devices="any", objective="throughput_per_device"),
    "occupied": small_world(
        name="occupied",
        cluster=uneven_machines().with_occupied([0, 4, 5, 8]).document,
    ),
    "sites": small_world(name="sites", cluster=far_sites(5, 2).document),
    "one device": small_world(
        name="one", cluster=hosts((1, 1, device())).document, objective="memory"
    ),
}


def env_of(*worlds: World, **options: Any) -> PartitionEnv:
    """An environment of some worlds, or of the first."""
    return PartitionEnv(worlds or [WORLDS["all"]], **{**ROOM, **options})


def quick_env() -> PartitionEnv:
    """All of the worlds, by closed forms; tests reset it as they like."""
    return env_of(*WORLDS.values(), fidelity="analytic", baselines=("plain",))


def play(
    env: PartitionEnv, rng: np.random.Generator, **reset: Any
) -> tuple[list[int], float, dict[str, Any]]:
    """An episode of random actions that are allowed."""
    obs, info = env.reset(**reset)
    actions: list[int] = []
    ended, reward = False, 0.0
    while not ended:
        masks = env.action_masks()
        assert masks.any()
        assert reward == 0.0
        assert env.observation_space.contains(obs)
        assert bool(obs["phase"][0]) == bool(actions)
        assert (obs["left"] > 0).any() == bool(actions)
        actions.append(int(rng.choice(np.flatnonzero(masks))))
        obs, reward, ended, truncated, info = env.step(np.int64(actions[-1]))
        assert not truncated
    assert env.observation_space.contains(obs)
    assert env.action_masks().any()
    return actions, reward, info
