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

__all__ = ["Groups", "lines_of", "time_of"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Messages that each kind sends per ring step pair, relative to reduce-scatter.
_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Communication groups of many strategies, few of which differ.

    Attributes:
        members: Per distinct group and level, innermost first; 1 where it does not
            use the level. Shape [distinct, levels].
        bandwidth: Bytes/s of one member at a level. Shape [distinct, levels].
        latency: Seconds of one message at a level. Shape [distinct, levels].
        which: Distinct group of each strategy. Shape [n].
        rings: Whether all go as NCCL's do: gathers and scatters round a ring, sums
            round it or over its trees. For the former it has a tree from release 2.23
            on, with one device a host. Source: its release notes, "PAT algorithm".
    """

    members: Array
    bandwidth: Array
    latency: Array
    which: Index
    rings: bool = False

    @classmethod
    def from_levels(
        cls,
        groups: Sequence[Sequence[AxisLevel]],
        which: Index | None = None,
        rings: bool = False,
    ) -> Groups:
        """Pad groups given level by level, innermost first.

        Args:
            groups: The distinct ones.
            which: Distinct group of each strategy; one strategy a group if None.
            rings: As the attribute.
        """
        width = max((len(levels) for levels in groups), default=1) or 1
        members = np.ones((len(groups), width))
        bandwidth = np.full((len(groups), width), np.inf)
        latency = np.zeros((len(groups), width))
        for row, levels in enumerate(groups):
            for column, level in enumerate(levels):
                members[row, column] = level.members
                bandwidth[row, column] = level.bandwidth_bytes_per_s
                latency[row, column] = level.latency_s
        return cls(
            members=members,
            bandwidth=bandwidth,
            latency=latency,
            which=np.arange(len(groups)) if which is None else which,
            rings=rings,
        )

    @property
    def distinct_size(self) -> Array:
        """Ranks in each distinct group. Shape [distinct]."""
        return np.asarray(self.members.prod(axis=1))

    @property
    def size(self) -> Array:
        """Ranks in each strategy's group. Shape [n]."""
        return np.asarray(self.distinct_size[self.which])

    @property
    def below(self) -> Array:
        """Members of a group that meet further in than each level. As members."""
        return np.asarray(np.cumprod(self.members, axis=1) / self.members)


#: Fixed seconds and seconds per byte of each distinct group. Shape [distinct] each.
_Line = tuple[Array, Array]


def _ring(groups: Groups, passes: float) -> _Line:
    """One flat ring: every byte crosses the slowest level.

    t = passes (n-1)/n size / min_l(bandwidth_l * members below l) + passes * latency
    Source: Thakur, Rabenseifner, Gropp 2005, section 4.3; multi-rail rings as NCCL
    builds them use one network interface per member inside a host.
    """
    n, used = groups.distinct_size, groups.members > 1
    rate = np.where(used, groups.bandwidth * groups.below, np.inf).min(axis=1)
    if groups.rings:
        # One message goes all the way round: at a level between the members of each
        # group that meets there.
        around = (groups.members - 1) * n[:, None] / groups.below / groups.members
    else:
        around = groups.members
    steps = np.where(used, around * groups.latency, 0.0).sum(axis=1)
    return passes * steps, passes * (n - 1) / n / rate


def _hierarchical(groups: Groups, passes: float) -> _Line:
    """Reduce-scatter level by level going out, gather coming back.

    Level l handles size / (members below l); its latency grows with log2 members.
    """
    m = groups.members
    wire = (m - 1) / m / groups.below / groups.bandwidth
    steps = np.where(m > 1, np.ceil(np.log2(m)) * groups.latency, 0.0)
    return passes * steps.sum(axis=1), passes * wire.sum(axis=1)


def _tree(groups: Groups, passes: float) -> _Line:
    """A double binary tree over hosts, as NCCL's.

    All bytes go up and come down again: of every rank's link the share that a ring
    uses, but only log2 of the hosts pass one after the other. In a host NCCL passes
    messages along a chain, of few and short hops: counted as a tree, too. Two hosts
    would pass half of the bytes; but measured sums over two hosts take a ring's
    time (DLPerf's 16 V100, vTrain's tp 16), which is taken here.
    Source: NCCL, src/graph/tuning.cc, ncclTopoTuneModel (bandwidths, latencies).
    """
    m, used = groups.members, groups.members > 1
    rate = np.where(used, groups.bandwidth * groups.below, np.inf).min(axis=1)
    steps = np.where(used, np.ceil(np.log2(m)) * groups.latency, 0.0).sum(axis=1)
    return passes * steps, passes / rate


def _all_to_all(groups: Groups) -> _Line:
    """Every rank keeps 1/n and sends the rest straight away.

    The share that leaves level l is 1 - (ranks below and at l-1) / n.
    """
    n, used = groups.distinct_size[:, None], groups.members > 1
    outside = np.where(used, (n - groups.below) / n, 0.0)
    steps = np.where(used, groups.latency, 0.0).max(axis=1)
    return steps, (outside / groups.bandwidth).max(axis=1)


def _measured(known: Sequence[MeasuredCollective], groups: Groups) -> _Line:
    """Alpha + size / bandwidth of the probe with the nearest group size."""
    sizes = np.array([entry.group_size for entry in known], dtype=float)
    alpha = np.array([entry.alpha_s for entry in known])
    rate = np.array([entry.bandwidth_bytes_per_s for entry in known])
    ranks = np.log(groups.distinct_size)[:, None]
    nearest = np.abs(np.log(sizes)[None, :] - ranks).argmin(axis=1)
    return alpha[nearest], 1.0 / rate[nearest]


def lines_of(
    kind: str, groups: Groups, measured: Sequence[MeasuredCollective] = ()
) -> Array:
    """What :func:`time_of` takes the smaller of: two straight lines in the size.

    Args:
        kind: As there.
        groups: Who takes part.
        measured: Probed collectives of this cluster.
    Returns:
        Fixed seconds and seconds per byte of the two algorithms of each distinct
        group, all 0 for groups of one. Shape [distinct, 2, 2].
    """
    known = [entry for entry in measured if entry.kind == kind]
    if known:
        lines = [_measured(known, groups)]
    elif kind == "all_to_all":
        lines = [_all_to_all(groups)]
    elif groups.rings and kind != "all_reduce":
        lines = [_ring(groups, _PASSES[kind])]
    else:
        other = _tree if groups.rings else _hierarchical
        lines = [time(groups, _PASSES[kind]) for time in (_ring, other)]
    alone = groups.distinct_size <= 1
    both = np.empty((len(alone), 2, 2))
    for algorithm, line in enumerate((lines[0], lines[-1])):
        for column, values in enumerate(line):
            both[:, algorithm, column] = values
    both[alone] = 0.0
    return both


def time_of(
    kind: str,
    size_bytes: ArrayLike,
    groups: Groups,
    measured: Sequence[MeasuredCollective] = (),
) -> Array:
    """Seconds until the last rank holds its result.

    Takes the faster of a flat ring and the hierarchical algorithm (or NCCL's tree, see
    :class:`Groups`), as communication libraries choose by size; a measurement of the
    same kind replaces both. All of them are straight lines in the size, so each
    distinct group is worked out once.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        size_bytes: Bytes of the whole tensor: what each rank holds before an
            all-reduce, reduce-scatter or all-to-all, and after an all-gather.
            Shape [n].
        groups: Who takes part.
        measured: Probed collectives of this cluster.
    Returns:
        Seconds, 0 for groups of one. Shape [n].
    """
    lines = lines_of(kind, groups, measured)[groups.which]
    size: Array = np.asarray(size_bytes, dtype=float)
    first, second = (lines[:, k, 0] + lines[:, k, 1] * size for k in range(2))
    return np.asarray(np.minimum(first, second))
