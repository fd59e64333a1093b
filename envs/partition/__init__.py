"""Planning problems (worlds), and a sampler of them."""

from envs.partition.graphs import GraphStore
from envs.partition.sampler import SPLITS, WorldSampler, sample_world
from envs.partition.world import World, load_worlds, save_worlds

__all__ = [
    "SPLITS",
    "GraphStore",
    "World",
    "WorldSampler",
    "load_worlds",
    "sample_world",
    "save_worlds",
]
