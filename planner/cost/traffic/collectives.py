"""Time of collectives over groups that span several network levels.

A group has one entry per level, innermost first: how many members meet there, and what
each can send and how fast a message is. Every member drives its own share of the links,
so a ring whose hosts hold m members each crosses hosts at m times one member's rate.

:func:`group_levels` finds these entries for thousands of orders of devices in one
compiled pass, as a search over orders needs it; for one order it agrees with
:func:`planner.cluster.levels.axis_levels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cluster import AxisLevel
from planner.cluster.topology import HierarchicalTopology, MatrixTopology, Topology
from planner.cost.recipes import Recipe
from planner.schema.cluster import MeasuredCollective
from planner.simulate.compiled import compiled

__all__ = [
    "Groups",
    "LevelTables",
    "ReplicaGroups",
    "group_levels",
    "level_tables",
    "lines_of",
    "replica_groups",
    "time_of",
]

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


class LevelTables(NamedTuple):
    """A network as arrays; of a hierarchical one matrices are empty, and vice versa.

    Attributes:
        domains: Switch of each device on each level. Shape [levels, devices].
        inside_bandwidth: Inside each device's host (bytes/s). Shape [devices];
            likewise inside_latency (s), nic_bandwidth, nic_latency.
        mesh: 1 where a host's devices have cables to each other. Shape [devices].
        level_bandwidth: Of each level above the host. Shape [levels]; likewise
            level_latency.
        bandwidth: Of each pair of devices. Shape [devices, devices]; likewise latency.
    """

    domains: Index
    inside_bandwidth: Array
    inside_latency: Array
    mesh: Index
    nic_bandwidth: Array
    nic_latency: Array
    level_bandwidth: Array
    level_latency: Array
    bandwidth: Array
    latency: Array


def level_tables(topology: Topology) -> LevelTables | None:
    """Arrays of a network; None for a kind of network that is not known here."""
    domains = np.ascontiguousarray(np.stack(topology.domains), dtype=np.int64)
    none, square = np.zeros(0), np.zeros((0, 0))
    if isinstance(topology, MatrixTopology):
        return LevelTables(
            domains=domains,
            inside_bandwidth=none,
            inside_latency=none,
            mesh=np.zeros(0, dtype=np.int64),
            nic_bandwidth=none,
            nic_latency=none,
            level_bandwidth=none,
            level_latency=none,
            bandwidth=topology.matrices[0].copy(),
            latency=topology.matrices[1].copy(),
        )
    if isinstance(topology, HierarchicalTopology):
        ends = topology.ends
        return LevelTables(
            domains=domains,
            inside_bandwidth=ends.host_bandwidth,
            inside_latency=ends.host_latency,
            mesh=ends.mesh.astype(np.int64),
            nic_bandwidth=ends.nic_bandwidth,
            nic_latency=ends.nic_latency,
            level_bandwidth=ends.level_bandwidth,
            level_latency=ends.level_latency,
            bandwidth=square,
            latency=square,
        )
    return None


@compiled
def _common(
    domains: Index,
    ids: Index,
    degree: int,
    stride: int,
    count: Index,
    members: Array,
) -> bool:
    """Members that meet at each level in every group; whether all hold just as many.

    ``count`` is zero for every switch, before and after.
    """
    levels, even, below, span = len(domains), True, 1, degree * stride
    for level in range(levels - 1):
        domain, common, least, most = domains[level], 0, len(ids), 0
        for block in range(0, len(ids) // span * span, span):
            for start in range(block, block + stride):
                for place in range(degree):
                    count[domain[ids[start + place * stride]]] += 1
                for place in range(degree):
                    switch = domain[ids[start + place * stride]]
                    found = count[switch]
                    if found == 0:
                        continue
                    count[switch] = 0
                    least, most = min(least, found), max(most, found)
                    while found:
                        common, found = found, common % found
        even = even and least == common and most == common
        members[level] = common / below
        below = common
    members[levels - 1] = degree / below
    return even


@compiled
def _slowest(
    net: LevelTables,
    ids: Index,
    degree: int,
    stride: int,
    in_host: float,
    low: Index,
    high: Index,
    bandwidth: Array,
    latency: Array,
) -> None:
    """Slowest link that any group uses at each level of a hierarchical network.

    ``low`` and ``high`` are -1 for every switch, before and after.
    """
    span = degree * stride
    for level in range(len(net.domains)):
        domain = net.domains[level]
        for block in range(0, len(ids) // span * span, span):
            for start in range(block, block + stride):
                for place in range(degree):
                    device = ids[start + place * stride]
                    below = device if level == 0 else net.domains[level - 1, device]
                    switch = domain[device]
                    if low[switch] < 0:
                        low[switch], high[switch] = below, below
                    low[switch] = min(low[switch], below)
                    high[switch] = max(high[switch], below)
                for place in range(degree):
                    device = ids[start + place * stride]
                    switch = domain[device]
                    if low[switch] == high[switch]:
                        continue
                    if level == 0:
                        cables = max(1.0, in_host - 1) if net.mesh[device] else 1.0
                        rate = net.inside_bandwidth[device] * cables
                        wait = net.inside_latency[device]
                    else:
                        rate = min(
                            net.nic_bandwidth[device], net.level_bandwidth[level]
                        )
                        wait = max(net.nic_latency[device], net.level_latency[level])
                    bandwidth[level] = min(bandwidth[level], rate)
                    latency[level] = max(latency[level], wait)
                for place in range(degree):
                    switch = domain[ids[start + place * stride]]
                    low[switch], high[switch] = -1, -1


@compiled
def _slowest_pairs(
    net: LevelTables,
    ids: Index,
    degree: int,
    stride: int,
    bandwidth: Array,
    latency: Array,
) -> None:
    """The same where every pair has a link of its own; two levels."""
    hosts, span = net.domains[0], degree * stride
    for block in range(0, len(ids) // span * span, span):
        for start in range(block, block + stride):
            for one in range(degree):
                a = ids[start + one * stride]
                for other in range(degree):
                    b = ids[start + other * stride]
                    if a == b:
                        continue
                    level = 0 if hosts[a] == hosts[b] else 1
                    bandwidth[level] = min(bandwidth[level], net.bandwidth[a, b])
                    latency[level] = max(latency[level], net.latency[a, b])


@compiled
def _merge(members: Array, bandwidth: Array, latency: Array) -> None:
    """Put the levels in use first; neighbours with the same link become one."""
    kept = 0
    for level in range(len(members)):
        count, rate, wait = members[level], bandwidth[level], latency[level]
        members[level], bandwidth[level], latency[level] = 1.0, np.inf, 0.0
        if count == 1:
            continue
        if kept and bandwidth[kept - 1] == rate and latency[kept - 1] == wait:
            members[kept - 1] *= count
            continue
        members[kept], bandwidth[kept], latency[kept] = count, rate, wait
        kept += 1


@compiled
def _fill(
    net: LevelTables,
    orders: Index,
    lengths: Index,
    which: Index,
    degree: Index,
    stride: Index,
    members: Array,
    bandwidth: Array,
    latency: Array,
) -> None:
    switches = 1
    for level in range(len(net.domains)):
        switches = max(switches, net.domains[level].max() + 1)
    count = np.zeros(switches, dtype=np.int64)
    low, high = np.full(switches, -1), np.full(switches, -1)
    for row in range(len(which)):
        order = which[row]
        ids, each, step = orders[order, : lengths[order]], degree[row], stride[row]
        if each == 1:
            continue
        even = _common(net.domains, ids, each, step, count, members[row])
        if len(net.bandwidth):
            _slowest_pairs(net, ids, each, step, bandwidth[row], latency[row])
        else:
            in_host = members[row, 0]
            _slowest(
                net, ids, each, step, in_host, low, high, bandwidth[row], latency[row]
            )
        if not even:
            for level in range(1, len(net.domains)):
                before = level - 1
                bandwidth[row, level] = min(
                    bandwidth[row, level], bandwidth[row, before]
                )
                latency[row, level] = max(latency[row, level], latency[row, before])
        _merge(members[row], bandwidth[row], latency[row])


def group_levels(
    net: LevelTables, orders: Index, which: Index, degree: Index, stride: Index
) -> tuple[Array, Array, Array]:
    """Levels that the groups of mesh axes use, under one order of devices each.

    Args:
        net: The network.
        orders: Device id of each rank, -1 after the last. Shape [orders, most ranks].
        which: Order of each axis. Shape [n].
        degree: Ranks in a group, of which one must fit. Shape [n].
        stride: Distance in ranks between its neighbours. Shape [n].
    Returns:
        Members, bandwidth (bytes/s) and latency (s) as in
        :class:`planner.cost.traffic.collectives.Groups`. Shapes [n, levels].
    """
    shape = (len(which), len(net.domains))
    members, bandwidth = np.ones(shape), np.full(shape, np.inf)
    latency = np.zeros(shape)
    _fill(
        net,
        np.ascontiguousarray(orders, dtype=np.int64),
        (orders >= 0).sum(axis=1),
        np.ascontiguousarray(which, dtype=np.int64),
        np.ascontiguousarray(degree, dtype=np.int64),
        np.ascontiguousarray(stride, dtype=np.int64),
        members,
        bandwidth,
        latency,
    )
    return members, bandwidth, latency


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
