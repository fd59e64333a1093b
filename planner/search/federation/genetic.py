"""The genetic algorithm by which Ravnest forms clusters of nodes, as a baseline.

A chromosome holds the cluster of each node. Its fitness, which is minimised, is

100 sum_c max(0, L - ram_c) + max_c speed_c - min_c speed_c

over the clusters that have a node, for a model that needs L MB to train; the "speed" of
a cluster is the seconds that its nodes take to send their memory, one by one, rounded
down: speed_c = sum of ram // bandwidth. Source: Menon et al. 2024, Ravnest
(2401.01728), section 3.1, and the constants of its published code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import ClusterError

__all__ = ["GeneticResult", "Nodes", "fitness_of", "genetic_search", "spread_of"]

Index = NDArray[np.int64]
Array = NDArray[np.float64]

_POPULATION, _GENERATIONS, _MOST_CLUSTERS = 200, 500, 5
_TOURNAMENT, _MUTATION = 5, 0.01
_SHORTAGE = 100


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Nodes:
    """Nodes as the algorithm sees them. Shapes [n].

    Attributes:
        ram_mb: Memory in MB, whole numbers.
        bandwidth_mbit_per_s: Of the node's connection, in Mb/s, whole numbers.

    Raises:
        ClusterError: If there is none, or a bandwidth below 1 Mb/s.
    """

    ram_mb: Index
    bandwidth_mbit_per_s: Index

    def __post_init__(self) -> None:
        if not len(self.ram_mb):
            raise ClusterError("there are no nodes to form clusters of; give one")
        if self.bandwidth_mbit_per_s.min() < 1:
            raise ClusterError(
                f"node {int(self.bandwidth_mbit_per_s.argmin())} has a bandwidth of "
                f"{int(self.bandwidth_mbit_per_s.min())} Mb/s; the algorithm divides "
                f"by it: give 1 or more"
            )

    def __len__(self) -> int:
        return len(self.ram_mb)

    @property
    def speed(self) -> Index:
        """Seconds that each node takes to send its memory, as the paper has them."""
        return self.ram_mb // self.bandwidth_mbit_per_s


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class GeneticResult:
    """Best chromosome that was ever in the population.

    Attributes:
        cluster: Cluster of each node, from 0 without gaps. Shape [n].
        fitness: Its fitness.
        found_at: Generation in which it was found, from 0.
    """

    cluster: Index
    fitness: int
    found_at: int

    @property
    def clusters(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of each cluster."""
        count = int(self.cluster.max()) + 1
        return tuple(
            tuple(np.flatnonzero(self.cluster == one).tolist()) for one in range(count)
        )


def genetic_search(
    nodes: Nodes,
    model_mb: int,
    *,
    seed: int = 0,
    population: int = _POPULATION,
    generations: int = _GENERATIONS,
    most_clusters: int = _MOST_CLUSTERS,
) -> GeneticResult:
    """Form clusters that each hold a model, and take equally long to send it.

    Args:
        nodes: At least one.
        model_mb: Memory that training takes, in MB.
        seed: Of all random draws.
        population: Chromosomes in a generation, an even number.
        generations: Number of generations.
        most_clusters: Largest number of clusters.
    """
    random = np.random.default_rng(seed)
    count = len(nodes)
    genes = random.integers(most_clusters, size=(population, count))
    best, least, found_at = genes[0], np.iinfo(np.int64).max, 0
    for generation in range(generations):
        fitness = fitness_of(genes, nodes, model_mb, most_clusters)
        first = int(fitness.argmin())
        if fitness[first] < least:
            best, least, found_at = genes[first].copy(), int(fitness[first]), generation
        genes = _offspring(genes, fitness, most_clusters, random)
    cluster = np.unique(best, return_inverse=True)[1].reshape(-1)
    return GeneticResult(cluster=cluster, fitness=int(least), found_at=found_at)


def fitness_of(genes: Index, nodes: Nodes, model_mb: int, most_clusters: int) -> Index:
    """Fitness of chromosomes, which is minimised.

    Args:
        genes: Cluster of each node. Shape [population, n].
        nodes: The nodes.
        model_mb: Memory that training takes, in MB.
        most_clusters: Number that all clusters are below.

    Returns:
        Shape [population].
    """
    member = genes[:, :, None] == np.arange(most_clusters)
    there = member.any(axis=1)
    ram = np.einsum("pnc,n->pc", member, nodes.ram_mb)
    speed = np.einsum("pnc,n->pc", member, nodes.speed)
    shortage = np.where(there, np.maximum(model_mb - ram, 0), 0).sum(axis=1)
    most = np.where(there, speed, np.iinfo(np.int64).min).max(axis=1)
    fewest = np.where(there, speed, np.iinfo(np.int64).max).min(axis=1)
    return np.asarray(_SHORTAGE * shortage + most - fewest)


def _offspring(
    genes: Index, fitness: Index, most_clusters: int, random: np.random.Generator
) -> Index:
    """Return the next generation: two children of each pair of parents."""
    size, count = genes.shape
    pairs = size // 2
    # The first draws of a permutation are draws without replacement.
    drawn = random.random((2 * pairs, size)).argpartition(_TOURNAMENT, axis=1)
    drawn = drawn[:, :_TOURNAMENT]
    winners = drawn[np.arange(2 * pairs), fitness[drawn].argmin(axis=1)]
    first, second = genes[winners[:pairs]], genes[winners[pairs:]]
    point = random.integers(1, max(count, 2), size=pairs)
    head = np.arange(count) < point[:, None]
    children = np.concatenate(
        [np.where(head, first, second), np.where(head, second, first)]
    )
    mutated = random.random(children.shape) < _MUTATION
    others = random.integers(most_clusters, size=children.shape)
    return np.where(mutated, others, children)


def spread_of(clusters: Index, nodes: Nodes) -> int:
    """Difference between the slowest cluster's seconds and the fastest one's.

    Args:
        clusters: Cluster of each node, -1 for one that is left out. Shape [n].
        nodes: The nodes.
    """
    used = clusters >= 0
    speed = np.bincount(clusters[used], weights=nodes.speed[used])
    there = np.bincount(clusters[used]) > 0
    return int(speed[there].max() - speed[there].min())
