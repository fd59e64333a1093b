"""Who keeps copies of weights alike, and how fast: the groups of data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.collectives import Groups, lines_of
from planner.cost.recipes import Recipe
from planner.schema.cluster import MeasuredCollective

__all__ = ["ReplicaGroups", "replica_groups"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroups:
    """Groups of n strategies, and the lines of their collectives.

    A line is fixed seconds and seconds per byte of each of two algorithms, see
    :func:`planner.cost.collectives.lines_of`.

    Attributes:
        shard: Devices that share one copy (ZeRO).
        replicate: Devices that hold the same shard.
        gather: Lines of the all-gather of weights. Shape [distinct of shard, 2, 2].
        scatter: Of the reduce-scatter of gradients. The same shape.
        mirror: Of the all-reduce over replicas. [distinct of replicate, 2, 2].
    """

    shard: Groups
    replicate: Groups
    gather: Array
    scatter: Array
    mirror: Array


def replica_groups(
    shard: Groups,
    replicate: Groups,
    recipe: Recipe,
    *,
    measured: tuple[MeasuredCollective, ...] = (),
    on_gpu: bool = True,
    core_wait_s: float | Array = 0.0,
) -> ReplicaGroups:
    """Work out the lines of both groups' collectives.

    Args:
        shard: Of n strategies.
        replicate: Of the same.
        recipe: What gathers and reductions reach of links, and a call's host time.
        measured: Probed collectives.
        on_gpu: False adds the host's time per collective.
        core_wait_s: What each message waits for its receiver's turn on a core; one
            number, or shape [n].
    """

    def lines(kind: str, groups: Groups) -> Array:
        found = lines_of(kind, groups, measured)
        if on_gpu and not measured:
            found[:, :, 1] /= recipe.replica_efficiency
        # A ring passes every rank, twice to reduce and gather.
        hops = (groups.distinct_size - 1) * (2 if kind == "all_reduce" else 1)
        wait = np.zeros(len(hops))
        wait[groups.which] = core_wait_s
        calls = 0.0 if on_gpu else recipe.collective_overhead_s
        found[:, :, 0] += np.where(hops > 0, calls + wait * hops, 0.0)[:, None]
        return found

    return ReplicaGroups(
        shard=shard,
        replicate=replicate,
        gather=lines("all_gather", shard),
        scatter=lines("reduce_scatter", shard),
        mirror=lines("all_reduce", replicate),
    )
