"""Time of collectives over groups that span several network levels.

A group has one entry per level, innermost first: how many members meet there, and what
each can send and how fast a message is. Every member drives its own share of the links,
so a ring whose hosts hold m members each crosses hosts at m times one member's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cluster import AxisLevel
from planner.schema.cluster import MeasuredCollective

__all__ = ["Groups", "time_of"]

Array = NDArray[np.float64]

#: Messages that each kind sends per ring step pair, relative to reduce-scatter.
_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Many communication groups, padded to the same number of levels.

    Attributes:
        members: Per level; 1 where a group does not use it. Shape [groups, levels].
        bandwidth: Bytes/s of one member at a level. Shape [groups, levels].
        latency: Seconds of one message at a level. Shape [groups, levels].
    """

    members: Array
    bandwidth: Array
    latency: Array

    @classmethod
    def from_levels(cls, groups: Sequence[Sequence[AxisLevel]]) -> Groups:
        """Pad groups given level by level, innermost first."""
        width = max((len(levels) for levels in groups), default=1) or 1
        members = np.ones((len(groups), width))
        bandwidth = np.full((len(groups), width), np.inf)
        latency = np.zeros((len(groups), width))
        for row, levels in enumerate(groups):
            for column, level in enumerate(levels):
                members[row, column] = level.members
                bandwidth[row, column] = level.bandwidth_bytes_per_s
                latency[row, column] = level.latency_s
        return cls(members=members, bandwidth=bandwidth, latency=latency)

    @property
    def size(self) -> Array:
        """Ranks in each group. Shape [groups]."""
        return np.asarray(self.members.prod(axis=1))

    def __getitem__(self, index: NDArray[np.int64]) -> Groups:
        return Groups(
            members=self.members[index],
            bandwidth=self.bandwidth[index],
            latency=self.latency[index],
        )


def _ring(groups: Groups, size_bytes: Array, passes: float) -> Array:
    """One flat ring: every byte crosses the slowest level.

    t = passes (n-1)/n size / min_l(bandwidth_l * members below l) + passes * latency
    Source: Thakur, Rabenseifner, Gropp 2005, section 4.3; multi-rail rings as NCCL
    builds them use one network interface per member inside a host.
    """
    n = groups.size
    below = np.cumprod(groups.members, axis=1) / groups.members
    used = groups.members > 1
    rate = np.where(used, groups.bandwidth * below, np.inf).min(axis=1)
    steps = np.where(used, groups.members * groups.latency, 0.0).sum(axis=1)
    wire = (n - 1) / n * size_bytes / rate
    return np.asarray(np.where(n > 1, passes * (wire + steps), 0.0))


def _hierarchical(groups: Groups, size_bytes: Array, passes: float) -> Array:
    """Reduce-scatter level by level going out, gather coming back.

    Level l handles size / (members below l); its latency grows with log2 members.
    """
    below = np.cumprod(groups.members, axis=1) / groups.members
    m = groups.members
    wire = (m - 1) / m * (size_bytes[:, None] / below) / groups.bandwidth
    steps = np.where(m > 1, np.ceil(np.log2(m)) * groups.latency, 0.0)
    return np.asarray(passes * (wire + steps).sum(axis=1))


def _all_to_all(groups: Groups, size_bytes: Array) -> Array:
    """Every rank keeps 1/n and sends the rest of its ``size_bytes`` straight away.

    The share that leaves level l is 1 - (ranks below and at l-1) / n.
    """
    n = groups.size
    below = np.cumprod(groups.members, axis=1) / groups.members
    outside = np.where(groups.members > 1, (n[:, None] - below) / n[:, None], 0.0)
    wire = (outside * size_bytes[:, None] / groups.bandwidth).max(axis=1)
    steps = np.where(groups.members > 1, groups.latency, 0.0).max(axis=1)
    return np.asarray(np.where(n > 1, wire + steps, 0.0))


def time_of(
    kind: str,
    size_bytes: ArrayLike,
    groups: Groups,
    measured: Sequence[MeasuredCollective] = (),
) -> Array:
    """Seconds until the last rank holds its result.

    Takes the faster of a flat ring and the hierarchical algorithm, as communication
    libraries choose by size; a measurement of the same kind replaces both.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        size_bytes: Bytes of the whole tensor: what each rank holds before an
            all-reduce, reduce-scatter or all-to-all, and after an all-gather.
            Shape [groups].
        groups: Who takes part.
        measured: Probed collectives of this cluster.
    Returns:
        Seconds, 0 for groups of one. Shape [groups].
    """
    size = np.broadcast_to(np.asarray(size_bytes, dtype=float), groups.size.shape)
    known = [entry for entry in measured if entry.kind == kind]
    if known:
        return _measured(known, size, groups.size)
    if kind == "all_to_all":
        return _all_to_all(groups, size)
    passes = _PASSES[kind]
    return np.minimum(_ring(groups, size, passes), _hierarchical(groups, size, passes))


def _measured(known: Sequence[MeasuredCollective], size: Array, ranks: Array) -> Array:
    """alpha + size / bandwidth of the probe with the nearest group size."""
    sizes = np.array([entry.group_size for entry in known], dtype=float)
    alpha = np.array([entry.alpha_s for entry in known])
    rate = np.array([entry.bandwidth_bytes_per_s for entry in known])
    nearest = np.abs(np.log(sizes)[None, :] - np.log(ranks)[:, None]).argmin(axis=1)
    time = alpha[nearest] + size / rate[nearest]
    return np.asarray(np.where(ranks > 1, time, 0.0))
