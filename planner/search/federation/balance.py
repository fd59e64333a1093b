"""Clusters of equal "speed", as Ravnest wants them, by moves and swaps of nodes.

Minimises the fitness of :mod:`planner.search.federation.genetic` for a given number of
clusters: from divisions that deal out the slowest nodes first, one node moves to
another cluster, or two change places, as long as that helps. :func:`cut_evenly` cuts a
given order of nodes instead, by an exact dynamic program.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from planner.search.federation.genetic import Nodes, fitness_of

__all__ = ["balance", "cut_evenly"]

Index = NDArray[np.int64]

_STARTS = 48


def balance(nodes: Nodes, model_mb: int, clusters: int, *, seed: int = 0) -> Index:
    """Form a given number of clusters that each hold a model.

    Args:
        nodes: At least as many as clusters.
        model_mb: Memory that training takes, in MB.
        clusters: Number of clusters, none of which is empty.
        seed: Of the divisions that it starts from.

    Returns:
        Cluster of each node. Shape [n].
    """
    random = np.random.default_rng(seed)
    best, least = np.zeros(len(nodes), dtype=np.int64), np.iinfo(np.int64).max
    for start in range(_STARTS):
        # The first by speed alone, the others with some noise.
        noise = random.random(len(nodes)) * (start > 0)
        found = _dealt(nodes, clusters, noise)
        found, fitness = _improved(found, nodes, model_mb, clusters)
        if fitness < least:
            best, least = found, fitness
        if not least:
            break
    return best


def cut_evenly(
    order: Index, nodes: Nodes, model_mb: int, clusters: int
) -> Index | None:
    """Cut an order of nodes into clusters of the least spread that each hold a model.

    For each speed that may be the lowest, the cut with the lowest highest speed among
    those that stay above it is a dynamic program.

    Args:
        order: All nodes. Shape [n].
        nodes: The nodes.
        model_mb: Memory that training takes, in MB.
        clusters: Number of clusters.

    Returns:
        Cluster of each node, shape [n]; None if no cut of the order holds a model in
        every cluster.
    """
    count = len(order)
    ram, speed = (
        np.subtract.outer(total, total).T.astype(np.float64)
        for total in (
            np.append(0, np.cumsum(nodes.ram_mb[order])),
            np.append(0, np.cumsum(nodes.speed[order])),
        )
    )
    # Of the segment from row up to, not including, column.
    holds = np.triu(ram >= model_mb, 1)
    best, least = None, np.inf
    for lowest in np.unique(speed[holds]):
        gain = np.where(holds & (speed >= lowest), speed, np.inf)
        most = np.full((clusters + 1, count + 1), np.inf)
        most[0, 0] = 0.0
        first = np.zeros(most.shape, dtype=np.int64)
        for number in range(clusters):
            reached = np.maximum(most[number][:, None], gain)
            first[number + 1] = reached.argmin(axis=0)
            most[number + 1] = reached.min(axis=0)
        if most[clusters, count] - lowest < least:
            best, least = first, most[clusters, count] - lowest
    if best is None:
        return None
    found, stop = np.empty(count, dtype=np.int64), count
    for number in range(clusters, 0, -1):
        start = int(best[number, stop])
        found[order[start:stop]] = number - 1
        stop = start
    return found


def _dealt(nodes: Nodes, clusters: int, noise: NDArray[np.float64]) -> Index:
    """Give each node, the slowest first, to the cluster with the least so far."""
    found = np.empty(len(nodes), dtype=np.int64)
    sums = np.zeros(clusters)
    order = np.argsort(-nodes.speed * (1 + noise) - noise, kind="stable")
    for place, node in enumerate(order.tolist()):
        # One for each cluster first, so that none is empty.
        cluster = place if place < clusters else int(sums.argmin())
        found[node] = cluster
        sums[cluster] += nodes.speed[node]
    return found


def _improved(
    start: Index, nodes: Nodes, model_mb: int, clusters: int
) -> tuple[Index, int]:
    """Take the best move or swap until none helps."""
    current = start
    value = int(fitness_of(current[None], nodes, model_mb, clusters)[0])
    while value:
        others = _neighbours(current, clusters)
        fitness = fitness_of(others, nodes, model_mb, clusters)
        best = int(fitness.argmin())
        if fitness[best] >= value:
            break
        current, value = others[best], int(fitness[best])
    return current, value


def _neighbours(current: Index, clusters: int) -> Index:
    """Divisions that differ by a move or a swap, without empty clusters."""
    found = []
    for node, cluster in itertools.product(range(len(current)), range(clusters)):
        if cluster != current[node]:
            moved = current.copy()
            moved[node] = cluster
            found.append(moved)
    for one, other in itertools.combinations(range(len(current)), 2):
        if current[one] != current[other]:
            swapped = current.copy()
            swapped[[one, other]] = swapped[[other, one]]
            found.append(swapped)
    if not found:
        return current[None]
    every = np.stack(found)
    there = (every[:, :, None] == np.arange(clusters)).any(axis=1).all(axis=1)
    return every[there] if there.any() else current[None]
