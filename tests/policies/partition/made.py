"""Problems and networks small enough to be looked at whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from envs.partition.features import Observed
from envs.partition.world import World
from planner.cluster import Cluster
from policies.partition.examples import Example, prepare_example
from policies.partition.network import NetworkConfig, PartitionNetwork
from tests.envs.partition.small import small_world
from tests.search.device_order.made import far_sites

__all__ = ["example_of", "network", "renumbered", "site_world"]


def network(seed: int = 0, **changes: Any) -> PartitionNetwork:
    """A network of small random weights."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"width": 8, "layers": 2, "hidden": 16, **changes}
    return PartitionNetwork(NetworkConfig(**sizes))


def site_world(devices: int = 5, **changes: Any) -> World:
    """Lone devices of two sites."""
    cluster: Cluster = far_sites(devices, 2)
    return small_world(
        **{"name": f"sites-{devices}", "cluster": cluster.document, **changes}
    )


def example_of(world: World, seed: int = 0) -> Example:
    """The training example of a world."""
    example = prepare_example(world, np.random.default_rng(seed))
    assert example is not None
    return example


def renumbered(seen: Observed, groups: np.ndarray[Any, Any]) -> Observed:
    """The same with group ``groups[i]`` in place i."""
    place = np.argsort(groups)
    return replace(
        seen,
        groups=seen.groups[groups],
        group_edges=place[seen.group_edges],
        pairs=seen.pairs[np.ix_(groups, groups)],
    )
