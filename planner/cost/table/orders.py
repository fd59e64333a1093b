"""Many orders of the same devices: what a table's rows see of ranks and links.

A row of the strategy table says how devices are divided, an order says which device is
which rank. Rows of one table may each have an order of their own; everything that
depends on it is found here, for all orders at once. With a single order the answers are
those of :class:`planner.cost.context.PricingContext`, which keeps them.

:func:`group_levels` finds the levels of groups under thousands of orders in one
compiled pass; for one order it agrees with :func:`planner.cluster.levels.axis_levels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cluster.levels import flow_factor
from planner.cluster.topology import HierarchicalTopology, MatrixTopology, Topology
from planner.cost.context import Combinations, PricingContext
from planner.cost.table.rows import number_rows
from planner.cost.traffic.collectives import Groups, LayerLines, layer_lines, lines_of
from planner.simulate.compiled import compiled, inner

__all__ = ["LevelTables", "Orders", "Places", "group_levels", "level_tables"]

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


def _units(hosts: Index | None, orders: Index, lengths: Index) -> Index:
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
        _units(None if len(net.bandwidth) else net.domains[0], ids, lengths),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Distinct pairs of an order and a pipeline degree.

    Attributes:
        which: Place of each row. Shape [n].
        pp: Pipeline degree. Shape [places].
        types: Slowest device type of each pp rank, padded. Shape [places, most pp].
        bandwidth: Of the boundary after each rank, wrapping. [places, most pp].
        latency: The same in seconds.
        limits: Bytes that ranks 0, 1 and last may use. Shape [places, 3].
        core_contention: As :meth:`PricingContext.core_contention`. [places, 2].
        slowest: Slowest device type of all ranks. Shape [places].
        wait_s: What a message waits for a core at its receiver. Shape [places].
    """

    which: Index
    pp: Index
    types: Index
    bandwidth: Array
    latency: Array
    limits: Array
    core_contention: Array
    slowest: Index
    wait_s: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """Ranks of all places one after the other, in runs: the stages of pipelines.

    Attributes:
        place: Of each rank. Shape [ranks of all places].
        rank: In its place. The same shape.
        starts: First rank of each run. Shape [stages of all places].
        owner: Place of each run; likewise its ``stage``.
        heads: First run of each place. Shape [places].
    """

    place: Index
    rank: Index
    starts: Index
    owner: Index
    stage: Index
    heads: Index

    @classmethod
    def of(cls, pp: Index, length: Index) -> _Runs:
        """Lay out pipelines as deep as ``pp`` over as many devices as ``length``."""
        places = np.arange(len(pp))
        first, heads = np.cumsum(length) - length, np.cumsum(pp) - pp
        place, owner = np.repeat(places, length), np.repeat(places, pp)
        stage = np.arange(len(owner)) - heads[owner]
        return cls(
            place=place,
            rank=np.arange(len(place)) - first[place],
            starts=first[owner] + stage * (length // pp)[owner],
            owner=owner,
            stage=stage,
            heads=heads,
        )


@dataclass(frozen=True)
class Orders:
    """Orders that a table's rows refer to by number.

    Attributes:
        context: Everything else; its own order is not read where ``ids`` has several.
        ids: Device id of each rank, -1 after the last. Shape [orders, most ranks].
    """

    context: PricingContext
    ids: Index

    @classmethod
    def of(cls, context: PricingContext) -> Orders:
        """Take the one order of a context."""
        return cls(context=context, ids=context.order[None, :])

    @cached_property
    def lengths(self) -> Index:
        """Devices in each order. Shape [orders]."""
        return np.asarray((self.ids >= 0).sum(axis=1))

    @cached_property
    def core_waits_s(self) -> Array:
        """Each order's :attr:`PricingContext.core_wait_s`. Shape [orders]."""
        if not self.context.shares_cores:
            return np.zeros(len(self.ids))
        every = range(len(self.ids))
        return np.array([self.context_of(order).core_wait_s for order in every])

    @cached_property
    def _net(self) -> LevelTables:
        return level_tables(self.context.cluster.topology)

    @cached_property
    def _alike(self) -> Index:
        """Size of equal runs of each order that lie in one host. Shape [orders]."""
        topology = self.context.cluster.topology
        by_host = isinstance(topology, HierarchicalTopology)
        ids = np.ascontiguousarray(self.ids, dtype=np.int64)
        return _units(topology.domains[0] if by_host else None, ids, self.lengths)

    def context_of(self, order: int) -> PricingContext:
        """Return the context with one of the orders."""
        return self.context.reordered(self.ids[order, : self.lengths[order]])

    def groups(self, degree: Index, stride: Index, which: Index) -> Groups:
        """Communication groups of (order, degree, stride). Shapes [n]."""
        first, index = number_rows(which, degree, stride)
        if len(self.ids) == 1:
            return self.context.groups(degree[first], stride[first], index)
        if any(self.context.cluster.topology.aggregates):
            return self._aggregated(degree[first], stride[first], which[first], index)
        members, bandwidth, latency = group_levels(
            self._net, self.ids, which[first], degree[first], stride[first]
        )
        found = Groups(
            members=members,
            bandwidth=bandwidth,
            latency=latency,
            which=index,
            rings=self.context.rings,
        )
        return self.context.link_shares.of_groups(found, stride[first])

    def _aggregated(
        self, degree: Index, stride: Index, which: Index, index: Index
    ) -> Groups:
        """Groups of distinct axes on networks with levels whose switches add."""
        levels = []
        for order, members, apart in zip(
            which.tolist(), degree.tolist(), stride.tolist(), strict=True
        ):
            context = self.context_of(order)
            cluster = context.cluster
            levels.append(cluster.axis_levels(members, apart, context.ranks))
        found = Groups.from_levels(levels, index, rings=self.context.rings)
        return self.context.link_shares.of_groups(found, stride)

    def layer_lines(self, combos: Combinations) -> LayerLines:
        """Lines of the collectives inside layers, each combination in its order."""
        context, order = self.context, combos.orders
        strides = combos.strides()
        wait_s = combos.tp_waits_s(self.lengths[order], self.core_waits_s[order])
        tp, cp, ep = (self.groups(degree, stride, order) for degree, stride in strides)
        known = context.cluster.document.collectives
        return layer_lines(tp, cp, ep, context.recipe, measured=known, tp_wait_s=wait_s)

    def places(self, which: Index, pp: Index) -> Places:
        """Find the places of rows: device types, boundaries and limits of pipelines.

        Args:
            which: Order of each row. Shape [n].
            pp: Pipeline degree of each row, a divisor of the ranks. Shape [n].
        """
        first, place = number_rows(which, pp)
        order, degree = which[first], pp[first]
        shape = (len(first), int(degree.max(initial=1)))
        made = Places(
            which=place,
            pp=degree,
            types=np.zeros(shape, dtype=np.int64),
            bandwidth=np.full(shape, np.inf),
            latency=np.zeros(shape),
            limits=np.zeros((len(first), 3)),
            core_contention=np.ones((len(first), 2)),
            slowest=np.zeros(len(first), dtype=np.int64),
            wait_s=self.core_waits_s[order],
        )
        if len(first):
            self._fill(made, order)
        return made

    def _fill(self, made: Places, order: Index) -> None:
        """All stages of all places side by side, each a run of as many devices."""
        context, pp = self.context, made.pp
        # Of neighbours in one host one stands for all.
        each = np.gcd(self._alike[order], self.lengths[order] // pp)
        runs = _Runs.of(pp, self.lengths[order] // each)
        ids = self.ids[order[runs.place], runs.rank * each[runs.place]]
        kinds, memory = context.types_and_limits_of_runs(ids, runs.starts)
        made.types[runs.owner, runs.stage] = kinds
        beyond = np.arange(made.types.shape[1]) >= pp[:, None]
        made.types[:] = np.where(beyond, made.types[:, :1], made.types)
        head = runs.heads
        for column, stage in enumerate((0 * pp, np.minimum(1, pp - 1), pp - 1)):
            made.limits[:, column] = memory[head + stage]
        whole = runs.starts[head]
        made.slowest[:] = context.types_and_limits_of_runs(ids, whole)[0]
        bandwidth, latency = self._boundaries(made, order, each, runs, ids)
        deep = pp[runs.owner] > 1
        at = runs.owner[deep], runs.stage[deep]
        made.bandwidth[at], made.latency[at] = bandwidth[deep], latency[deep]
        if context.shares_cores:
            for row, (one, depth) in enumerate(
                zip(order.tolist(), pp.tolist(), strict=True)
            ):
                made.core_contention[row] = self.context_of(one).core_contention(depth)

    def _boundaries(
        self, made: Places, order: Index, each: Index, runs: _Runs, ids: Index
    ) -> tuple[Array, Array]:
        """Bandwidth and latency after each run, wrapping round. Shapes [runs]."""
        context = self.context
        if len(self.ids) == 1:
            found = [context.boundaries(depth) for depth in made.pp.tolist()]
            bandwidth, latency = (
                np.concatenate(part) for part in zip(*found, strict=True)
            )
            return bandwidth, latency
        links, length = context.cluster.topology.links, self.lengths[order] // each
        ahead = (runs.rank + (length // made.pp)[runs.place]) % length[runs.place]
        behind = self.ids[order[runs.place], ahead * each[runs.place]]
        there, back = links(ids, behind), links(behind, ids)
        many = each[runs.place]
        factor = flow_factor(context.cluster.topology, ids, behind, runs.place, many)
        slower = np.minimum(there[0], back[0]) * factor
        bandwidth = np.minimum.reduceat(slower, runs.starts)
        latency = np.maximum.reduceat(np.maximum(there[1], back[1]), runs.starts)
        return context.link_shares.reached(bandwidth), latency + made.wait_s[runs.owner]

    def pair_lines(self, places: Places) -> Array:
        """Fixed seconds, and seconds per byte, of an all-reduce between two pp ranks.

        As :meth:`planner.cost.context.PricingContext.pair_line`, for every place with a
        pipeline; 0 for the others. Shape [places, 2].
        """
        lines = np.zeros((len(places.pp), 2))
        deep = np.flatnonzero(places.pp > 1)
        if not len(deep):
            return lines
        context, wait = self.context, places.wait_s[deep]
        pairs = Groups(
            members=np.full((len(deep), 1), 2.0),
            bandwidth=places.bandwidth[deep].min(axis=1, keepdims=True),
            latency=places.latency[deep].max(axis=1, keepdims=True) - wait[:, None],
            which=np.arange(len(deep)),
        )
        both = lines_of("all_reduce", pairs, context.cluster.document.collectives)
        cheaper = both[:, :, 1].argmin(axis=1)
        lines[deep] = both[np.arange(len(deep)), cheaper]
        # A ring of two has two hops.
        lines[deep, 0] += 2 * wait
        return lines
