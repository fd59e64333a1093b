"""Time of collectives over groups that span several network levels.

A group has one entry per level, innermost first: how many members meet there, and what
each can send and how fast a message is. Every member drives its own share of the links,
so a ring whose hosts hold m members each crosses hosts at m times one member's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cluster import AxisLevel
from planner.cost.recipes import Recipe
from planner.schema.cluster import MeasuredCollective

__all__ = [
    "TP_KINDS",
    "Groups",
    "LayerLines",
    "LinkShares",
    "ReplicaGroups",
    "called_lines",
    "layer_lines",
    "lines_of",
    "replica_groups",
    "time_of",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


#: Kinds of call of tensor parallelism, order of the first axis of its payloads.
TP_KINDS = ("all_reduce", "all_gather", "reduce_scatter")

#: Messages that each kind sends per ring step pair, relative to reduce-scatter.
_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShares:
    """Shares of their links' bandwidth that collectives and transfers reach.

    Attributes:
        between_hosts: Bytes/s below which a link lies between hosts.
        inside: Share of links inside a host.
        outside: Share of links between hosts.
        partial_rails: Share of their hosts' network interfaces that groups drive whose
            hosts hold several members, but other groups the rest.
        lone_factor: How many times its share of the network a device has that sends
            while the others of its host do not.
    """

    between_hosts: float
    inside: float
    outside: float
    partial_rails: float
    lone_factor: float = 1.0

    def reached(self, bandwidth: Array) -> Array:
        """Bytes/s that are reached of links' bandwidths. Same shape."""
        outside = bandwidth < self.between_hosts
        return np.asarray(bandwidth * np.where(outside, self.outside, self.inside))

    def of_groups(self, groups: Groups, stride: Index) -> Groups:
        """Groups at the rates that they reach.

        Args:
            groups: Distinct ones, at the bandwidths of their links.
            stride: Distance in ranks between neighbours of each. Shape [distinct].
        """
        rate = self.reached(groups.bandwidth)
        if self.partial_rails != 1.0:
            # Between neighbours are ranks of other groups, that drive the rest.
            shared = (stride[:, None] > 1) & (groups.below > 1)
            rate = rate * np.where(shared, self.partial_rails, 1.0)
        if self.lone_factor == 1.0:
            return replace(groups, bandwidth=rate)
        # Of the members inside a host, one sends to the next host.
        inside = groups.bandwidth[:, :1] >= self.between_hosts
        in_host = np.where(inside, groups.members[:, :1], 1.0)
        outside = groups.bandwidth < self.between_hosts
        alone = np.where(outside, np.minimum(in_host, self.lone_factor), 1.0)
        return replace(groups, bandwidth=rate, alone=alone)


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
        alone: How many times its bandwidth a member has where each sends to the next
            alone; 1 if None. Shape [distinct, levels].
        aggregates: Mask of levels whose switches add up what members send; none if
            None. Shape [distinct, levels].
    """

    members: Array
    bandwidth: Array
    latency: Array
    which: Index
    rings: bool = False
    alone: Array | None = None
    aggregates: NDArray[np.bool_] | None = None

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
        aggregates = np.zeros((len(groups), width), dtype=bool)
        for row, levels in enumerate(groups):
            for column, level in enumerate(levels):
                members[row, column] = level.members
                bandwidth[row, column] = level.bandwidth_bytes_per_s
                latency[row, column] = level.latency_s
                aggregates[row, column] = level.aggregates
        return cls(
            members=members,
            bandwidth=bandwidth,
            latency=latency,
            which=np.arange(len(groups)) if which is None else which,
            rings=rings,
            aggregates=aggregates if aggregates.any() else None,
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


def _in_network(groups: Groups, adds: NDArray[np.bool_]) -> _Line:
    """Hierarchical, but for levels whose switches add: all goes up once, and down.

    t = size / (members below l) / bandwidth_l + 2 latency_l at such a level, since a
    link carries parts up and sums down at the same time.
    """
    m = groups.members
    wire = np.where(adds, 1.0, 2 * (m - 1) / m) / groups.below / groups.bandwidth
    hops = np.where(adds, 2.0, 2 * np.ceil(np.log2(m)))
    used = m > 1
    steps = np.where(used, hops * groups.latency, 0.0)
    return steps.sum(axis=1), np.where(used, wire, 0.0).sum(axis=1)


def _all_to_all(groups: Groups) -> _Line:
    """Every rank keeps 1/n and sends the rest straight away.

    The share that leaves level l is 1 - (ranks below and at l-1) / n.
    """
    n, used = groups.distinct_size[:, None], groups.members > 1
    outside = np.where(used, (n - groups.below) / n, 0.0)
    steps = np.where(used, groups.latency, 0.0).max(axis=1)
    return steps, (outside / groups.bandwidth).max(axis=1)


def _next(groups: Groups) -> _Line:
    """One message from every rank to the next: all wait for the slowest link."""
    used = groups.members > 1
    bandwidth = groups.bandwidth * (1.0 if groups.alone is None else groups.alone)
    rate = np.where(used, bandwidth, np.inf).min(axis=1)
    return np.where(used, groups.latency, 0.0).max(axis=1), 1 / rate


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
    """Two straight lines in the size, of which :func:`time_of` takes the smaller.

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
    elif kind == "send":
        lines = [_next(groups)]
    elif kind == "all_to_all":
        lines = [_all_to_all(groups)]
    elif groups.rings and kind != "all_reduce":
        lines = [_ring(groups, _PASSES[kind])]
    else:
        other = _tree if groups.rings else _hierarchical
        lines = [time(groups, _PASSES[kind]) for time in (_ring, other)]
        if kind == "all_reduce" and groups.aggregates is not None:
            adds = groups.aggregates & (groups.members > 1)
            some = adds.any(axis=1)
            fixed, each = _in_network(groups, adds)
            lines[1] = (
                np.where(some, fixed, lines[1][0]),
                np.where(some, each, lines[1][1]),
            )
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
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, or
            ``send``, of every rank to the next.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroups:
    """Groups of n strategies, and the lines of their collectives.

    A line is fixed seconds and seconds per byte of each of two algorithms, see
    :func:`planner.cost.traffic.collectives.lines_of`.

    Attributes:
        shard: Devices that share one copy (ZeRO).
        replicate: Devices that hold the same shard.
        gather: Lines of the all-gather of weights. Shape [distinct of shard, 2, 2].
        scatter: Of the reduce-scatter of gradients. The same shape.
        mirror: Of the all-reduce over replicas. [distinct of replicate, 2, 2].
        near: Devices that share a second copy of the weights, from which all gathers
            are but a step's first; those of ``shard`` if there is none.
        again: Lines of that gather. Shape [distinct of near, 2, 2].
    """

    shard: Groups
    replicate: Groups
    gather: Array
    scatter: Array
    mirror: Array
    near: Groups
    again: Array


def called_lines(
    kind: str,
    groups: Groups,
    recipe: Recipe,
    *,
    measured: tuple[MeasuredCollective, ...] = (),
    on_gpu: bool = True,
    core_wait_s: float | Array = 0.0,
) -> Array:
    """Lines of a collective between copies, with what a call takes of the host.

    Args:
        kind: See :func:`time_of`.
        groups: Who takes part.
        recipe: See :func:`replica_groups`, as for the others.
        measured: Probed collectives.
        on_gpu: False adds the host's time per collective.
        core_wait_s: What each message waits for a core.
    Returns:
        As :func:`lines_of`. Shape [distinct, 2, 2].
    """
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


def replica_groups(
    shard: Groups,
    replicate: Groups,
    recipe: Recipe,
    *,
    measured: tuple[MeasuredCollective, ...] = (),
    on_gpu: bool = True,
    core_wait_s: float | Array = 0.0,
    sum_share: float = 1.0,
    near: Groups | None = None,
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
        sum_share: See :class:`planner.cost.context.PricingContext`.
        near: See :class:`ReplicaGroups`; None if there is no second copy.
    """

    def lines(kind: str, groups: Groups) -> Array:
        return called_lines(
            kind,
            groups,
            recipe,
            measured=measured,
            on_gpu=on_gpu,
            core_wait_s=core_wait_s,
        )

    gather = lines("all_gather", shard)
    return ReplicaGroups(
        shard=shard,
        replicate=replicate,
        near=shard if near is None else near,
        again=gather if near is None else lines("all_gather", near),
        gather=gather,
        scatter=lines("reduce_scatter", shard),
        mirror=lines("all_reduce", replicate) * sum_share,
    )


#: Lines of each kind of call, of each combination. Shapes [combinations, 2, 2].
_Lines = dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLines:
    """Lines of the collectives inside layers, by kind of call.

    Attributes:
        tp: Tensor parallelism, waits for cores included.
        cp: Context parallelism.
        ep: Expert parallelism.
    """

    tp: _Lines
    cp: _Lines
    ep: _Lines


#: Links that carry less than this share of what those inside a host do are outside.
_OUTSIDE = 0.5


def layer_lines(
    tp: Groups,
    cp: Groups,
    ep: Groups,
    recipe: Recipe,
    *,
    measured: tuple[MeasuredCollective, ...] = (),
    tp_wait_s: Array,
) -> LayerLines:
    """Work out the lines of collectives inside layers.

    Args:
        tp: Groups of every combination; likewise cp, ep.
        recipe: How much of what is routed crosses slower links.
        measured: Probed collectives.
        tp_wait_s: What a call of tp waits for cores. Shape [combinations].
    """

    def lines(groups: Groups, *kinds: str) -> _Lines:
        return {kind: lines_of(kind, groups, measured)[groups.which] for kind in kinds}

    inner = ep.bandwidth[:, :1]
    slower = (ep.bandwidth < _OUTSIDE * inner) & (ep.members > 1)
    share = np.where(slower, recipe.routed_share, 1.0)
    found = lines(tp, *TP_KINDS)
    for line in found.values():
        line[:, :, 0] += tp_wait_s[:, None]
    return LayerLines(
        tp=found,
        cp=lines(cp, "send", "all_to_all"),
        ep=lines(replace(ep, bandwidth=ep.bandwidth / share), "all_to_all"),
    )
