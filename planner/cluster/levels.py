"""Network levels that the ranks of one mesh axis use.

A collective over ranks that lie on several hosts runs in steps: inside each host, then
between hosts. Its cost depends on the members that take part in each step and on the
speed of that step's link: one :class:`AxisLevel` a step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from planner.cluster.topology import (
    FloatArray,
    HierarchicalTopology,
    IntArray,
    Topology,
)
from planner.errors import ClusterError

__all__ = ["AxisLevel", "axis_groups", "axis_levels", "boundary_links", "flow_factor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLevel:
    """One step of a collective along one axis.

    Attributes:
        members: Ranks, or parts of the group joined further in, that take part.
        bandwidth_bytes_per_s: Slowest link used, per device and direction.
        latency_s: Latency of the slowest link used, per message.
        name: Name of the network level.
        aggregates: Whether its switches add up what members send.
    """

    members: int
    bandwidth_bytes_per_s: float
    latency_s: float
    name: str
    aggregates: bool = False


def axis_groups(ids: IntArray, degree: int, stride: int) -> IntArray:
    """Device ids of every communication group of an axis.

    Rank r sits on ``ids[r]``; ranks r, r + stride, … r + (degree - 1) stride are a
    group. Ranks beyond the last whole block of degree x stride are in none.

    Args:
        ids: Device id of each rank. Shape [n].
        degree: Ranks in a group.
        stride: Distance in ranks between neighbours of a group.

    Returns:
        Shape [groups, degree].

    Raises:
        ClusterError: If degree or stride is below 1 or one group needs more ranks
            than there are.
    """
    if degree < 1 or stride < 1:
        raise ClusterError(f"degree={degree}, stride={stride}: both must be at least 1")
    span = degree * stride
    if span > len(ids):
        raise ClusterError(
            f"an axis of degree={degree} and stride={stride} covers {span} devices, "
            f"the cluster offers {len(ids)}; use a smaller degree or more nodes"
        )
    blocks = ids[: len(ids) // span * span].reshape(-1, degree, stride)
    return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(-1, degree)


def axis_levels(
    topology: Topology, ids: IntArray, degree: int, stride: int, *, aligned: bool
) -> tuple[AxisLevel, ...]:
    """Levels that the groups of one axis use, innermost first.

    Where every switch holds equally many members of every group, a level has that
    many. Where they hold different numbers, members are joined further in only in parts
    of a size that divides all of them (their greatest common divisor); the parts then
    count as if each hung on a switch of its own, which overstates the traffic of the
    outer level. A level has the bandwidth and the latency of the slowest link that any
    group uses there, and where numbers differ it is besides never faster than a level
    further in, because some of its parts do meet there. So the answer is never too
    fast. Neighbouring levels with the same link are one.

    Args:
        topology: The network.
        ids: Device id of each rank. Shape [n].
        degree: Ranks in a group.
        stride: Distance in ranks between neighbours of a group.
        aligned: True if ``ids`` is 0 … n - 1, which allows a closed form.

    Returns:
        Levels with at least two members, which multiply to ``degree``; empty for 1.

    Raises:
        ClusterError: As :func:`axis_groups`.
    """
    groups = axis_groups(ids, degree, stride)
    if degree == 1:
        return ()
    members, even = None, True
    if aligned and topology.level_sizes is not None:
        members = _closed_form(topology.level_sizes, degree, stride)
        if members is not None and topology.has_equal_links:
            groups = groups[:1]
    if isinstance(topology, HierarchicalTopology):
        groups = _one_of_each(topology.domains[0][ids], groups, stride)
    if members is None:
        members, even = _common_members(topology.domains, groups)
    bandwidth, latency = topology.slowest_by_level(groups, members[0])
    if not even:
        bandwidth = np.minimum.accumulate(bandwidth)
        latency = np.maximum.accumulate(latency)
    return _merge(members, bandwidth, latency, topology)


def _one_of_each(hosts: IntArray, groups: IntArray, stride: int) -> IntArray:
    """Return one of the groups that meet at the same places.

    Ranks that lie in one host in runs of equal size are alike: groups that begin in
    one run use the same links.

    Args:
        hosts: Host of each rank. Shape [n].
        groups: All groups of an axis, or the first of them. Shape [g, d].
        stride: Distance in ranks between neighbours of a group.
    """
    if len(groups) < stride:
        return groups
    changes = np.flatnonzero(np.diff(hosts)) + 1
    run = int(np.gcd.reduce(changes, initial=len(hosts)))
    span = groups.shape[1] * stride
    blocks = groups.reshape(-1, stride, groups.shape[1])
    if run % span == 0:
        blocks = blocks[:: run // span, :1]
    elif run % stride == 0:
        blocks = blocks[:, :1]
    elif stride % run == 0:
        blocks = blocks[:, ::run]
    return np.ascontiguousarray(blocks).reshape(-1, groups.shape[1])


def _closed_form(
    sizes: tuple[int, ...], degree: int, stride: int
) -> tuple[int, ...] | None:
    """Members per level where groups and switches align; None where they do not."""
    joined = [1]
    for size in sizes[:-1]:
        span = degree * stride
        if stride >= size:
            joined.append(1)
        elif size % span == 0:
            joined.append(degree)
        elif size % stride == 0 and span % size == 0:
            joined.append(size // stride)
        else:
            return None
    joined.append(degree)
    return tuple(b // a for a, b in itertools.pairwise(joined))


def _common_members(
    domains: tuple[IntArray, ...], groups: IntArray
) -> tuple[tuple[int, ...], bool]:
    """Members per level that fit every group and every switch.

    Returns:
        Members, and whether all groups and all switches hold just that many.
    """
    joined, even = [1], True
    rows = np.arange(len(groups), dtype=np.int64)[:, None]
    for domain in domains[:-1]:
        switch = domain[groups]
        keys = rows * (int(switch.max()) + 1) + switch
        counts = np.unique(keys, return_counts=True)[1]
        joined.append(int(np.gcd.reduce(counts)))
        even = even and bool((counts == joined[-1]).all())
    joined.append(groups.shape[1])
    return tuple(b // a for a, b in itertools.pairwise(joined)), even


def _merge(
    members: tuple[int, ...],
    bandwidth: FloatArray,
    latency: FloatArray,
    topology: Topology,
) -> tuple[AxisLevel, ...]:
    levels: list[AxisLevel] = []
    for count, band, wait, name, aggregates in zip(
        members,
        bandwidth.tolist(),
        latency.tolist(),
        topology.level_names,
        topology.aggregates,
        strict=True,
    ):
        if count == 1:
            continue
        found = AxisLevel(
            members=count,
            bandwidth_bytes_per_s=band,
            latency_s=wait,
            name=name,
            aggregates=aggregates,
        )
        if levels and levels[-1] == replace(
            found, members=levels[-1].members, name=levels[-1].name
        ):
            found = replace(found, members=count * levels.pop().members)
        levels.append(found)
    return tuple(levels)


def flow_factor(
    topology: Topology,
    senders: IntArray,
    receivers: IntArray,
    rounds: IntArray,
    each: IntArray | None = None,
) -> FloatArray:
    """Multiple of its share of the network that each of several messages has.

    A host's devices share its interfaces evenly; where only some of them send to other
    hosts at a time, each has more: an equal part, at most one interface.

    Args:
        topology: The network.
        senders: Device id of each message's sender. Shape [n].
        receivers: Of its receiver; it may send back at another time. Shape [n].
        rounds: Messages of one number go at the same time, others do not. Shape [n].
        each: Number of equal messages that each stands for; 1 if None. Shape [n].
    Returns:
        At least 1. Shape [n].
    """
    lone = topology.lone_factor
    factor = np.minimum(lone[senders], lone[receivers])
    if lone.max() == 1.0:
        return factor
    host = topology.domains[0]
    size, hosts = np.bincount(host), int(host.max()) + 1
    crosses = host[senders] != host[receivers]
    for ends in (senders, receivers):
        place = rounds * hosts + host[ends]
        many = None if each is None else each[crosses]
        flows = np.bincount(place[crosses], many, minlength=int(place.max()) + 1)
        factor = np.minimum(factor, size[host[ends]] / np.maximum(1, flows[place]))
    return np.where(crosses, np.maximum(factor, 1.0), 1.0)


def boundary_links(
    topology: Topology, ids: IntArray, pp: int, stride: int, *, wrap: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Slowest link over each boundary between pipeline stages, in either direction.

    Stage i holds ranks i stride … (i + 1) stride - 1; rank r sends to r + stride.

    Args:
        topology: The network.
        ids: Device id of each rank. Shape [n].
        pp: Stages.
        stride: Ranks of one stage.
        wrap: Add the way from the last stage to the first, which schedules with
            several virtual stages a rank use.

    Returns:
        Bandwidth (bytes/s) and latency (s). Shape [pp - 1], or [pp] with ``wrap``.

    Raises:
        ClusterError: As :func:`axis_groups`.
    """
    stages = axis_groups(ids, pp, stride)[:stride].T
    senders, receivers = stages[:-1], stages[1:]
    if wrap and pp > 1:
        senders, receivers = stages, np.roll(stages, -1, axis=0)
    there = topology.links(senders, receivers)
    back = topology.links(receivers, senders)
    once = np.zeros(senders.size, dtype=np.int64)
    factor = flow_factor(topology, senders.ravel(), receivers.ravel(), once)
    return (
        (np.minimum(there[0], back[0]) * factor.reshape(senders.shape)).min(axis=1),
        np.maximum(there[1], back[1]).max(axis=1),
    )
