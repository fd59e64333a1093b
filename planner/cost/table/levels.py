"""Levels of a network that groups of ranks span, under many orders of devices at once.

:func:`group_levels` finds the levels of groups under thousands of orders in one
compiled pass; for one order it agrees with :func:`planner.cluster.levels.axis_levels`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cluster.topology import HierarchicalTopology, MatrixTopology, Topology
from planner.simulate.compiled import compiled, inner

__all__ = ["LevelTables", "equal_runs", "group_levels", "level_tables"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


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


def level_tables(topology: Topology) -> LevelTables:
    """Arrays of a network.

    Raises:
        TypeError: If it is of a kind that is not known here.
    """
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
    raise TypeError(f"no arrays of a {type(topology).__name__} are known")


@compiled
def _host_runs(hosts: Index, orders: Index, lengths: Index, units: Index) -> None:
    """Fill in the largest size of equal runs of each order that lie in one host."""
    for row in range(len(orders)):
        unit = lengths[row]
        for rank in range(1, lengths[row]):
            if hosts[orders[row, rank]] != hosts[orders[row, rank - 1]]:
                one, other = unit, rank
                while other:
                    one, other = other, one % other
                unit = one
                if unit == 1:
                    break
        units[row] = unit


def equal_runs(hosts: Index | None, orders: Index, lengths: Index) -> Index:
    """Return the size of equal runs of ranks that are alike, as they lie in one host.

    Args:
        hosts: Host of each device; None where each pair of devices has its own link: a
            run is then one rank. Shape [devices].
        orders: Device id of each rank, -1 after the last. Shape [orders, most ranks].
        lengths: Ranks of each order. Shape [orders].
    Returns:
        A divisor of the ranks of each order. Shape [orders].
    """
    units = np.ones(len(orders), dtype=np.int64)
    if hosts is not None:
        _host_runs(np.ascontiguousarray(hosts), orders, lengths, units)
    return units


@inner
def _steps(unit: int, degree: int, stride: int) -> tuple[int, int]:
    """Steps from block to block and from start to start between groups that differ.

    Ranks of one run of ``unit`` lie in one host: where runs divide strides or contain
    them, groups that begin in one run meet at the same places.
    """
    span = degree * stride
    if unit % span == 0:
        return unit, stride
    if unit % stride == 0:
        return span, stride
    if stride % unit == 0:
        return span, unit
    return span, 1


@inner
def _common(
    domains: Index,
    ids: Index,
    unit: int,
    degree: int,
    stride: int,
    count: Index,
    members: Array,
) -> bool:
    """Find members that meet at each level in every group; True if all hold as many.

    ``count`` is zero for every switch, before and after.
    """
    levels, even, below, span = len(domains), True, 1, degree * stride
    block_step, start_step = _steps(unit, degree, stride)
    for level in range(levels - 1):
        domain, common, least, most = domains[level], 0, len(ids), 0
        for block in range(0, len(ids) // span * span, block_step):
            for start in range(block, block + stride, start_step):
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


@inner
def _slowest(
    net: LevelTables,
    ids: Index,
    unit: int,
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
    block_step, start_step = _steps(unit, degree, stride)
    for level in range(len(net.domains)):
        domain = net.domains[level]
        for block in range(0, len(ids) // span * span, block_step):
            for start in range(block, block + stride, start_step):
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


@inner
def _slowest_pairs(
    net: LevelTables,
    ids: Index,
    degree: int,
    stride: int,
    bandwidth: Array,
    latency: Array,
) -> None:
    """Slowest links where every pair has one of its own; two levels."""
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


@inner
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
    units: Index,
    which: Index,
    degree: Index,
    stride: Index,
    count: Index,
    low: Index,
    high: Index,
    members: Array,
    bandwidth: Array,
    latency: Array,
) -> None:
    for row in range(len(which)):
        order = which[row]
        ids, each, step = orders[order, : lengths[order]], degree[row], stride[row]
        if each == 1:
            continue
        unit = units[order]
        even = _common(net.domains, ids, unit, each, step, count, members[row])
        if len(net.bandwidth):
            _slowest_pairs(net, ids, each, step, bandwidth[row], latency[row])
        else:
            in_host = members[row, 0]
            _slowest(
                net,
                ids,
                unit,
                each,
                step,
                in_host,
                low,
                high,
                bandwidth[row],
                latency[row],
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
    # Room for compiled code, which takes long to compile where it makes arrays.
    switches = int(net.domains.max(initial=0)) + 1
    ids, lengths = (
        np.ascontiguousarray(orders, dtype=np.int64),
        (orders >= 0).sum(axis=1),
    )
    _fill(
        net,
        ids,
        lengths,
        equal_runs(None if len(net.bandwidth) else net.domains[0], ids, lengths),
        np.ascontiguousarray(which, dtype=np.int64),
        np.ascontiguousarray(degree, dtype=np.int64),
        np.ascontiguousarray(stride, dtype=np.int64),
        np.zeros(switches, np.int64),
        np.full(switches, -1),
        np.full(switches, -1),
        members,
        bandwidth,
        latency,
    )
    return members, bandwidth, latency
