"""Many orders of the same devices: what a table's rows see of ranks and links.

A row of the strategy table says how devices are divided, an order says which device is
which rank. Rows of one table may each have an order of their own; everything that
depends on it is found here, for all orders at once. With a single order the answers are
those of :class:`planner.cost.context.PricingContext`, which keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cluster.levels import flow_factor
from planner.cluster.topology import HierarchicalTopology
from planner.cost.context import Combinations, PricingContext
from planner.cost.table.levels import (
    LevelTables,
    equal_runs,
    group_levels,
    level_tables,
)
from planner.cost.table.rows import number_rows
from planner.cost.traffic.collectives import Groups, LayerLines, layer_lines, lines_of

__all__ = ["Orders", "Places"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


#: Attributes of groups by which they differ.
_OF_GROUPS = ("members", "bandwidth", "latency", "alone", "aggregates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Distinct pairs of an order and a pipeline degree.

    Attributes:
        which: Place of each row. Shape [n].
        pp: Pipeline degree. Shape [places].
        types: Slowest device type of each pp rank, padded. Shape [places, most pp].
        bandwidth: Of the boundary after each rank, wrapping. [places, most pp].
        latency: The same in seconds.
        ranks: Ranks whose memory is priced: 0, 1, the last, and where devices differ
            in memory the first behind 0 with each limit, or the last again. Shape
            [places, watched].
        limits: Bytes that they may use. Shape [places, watched].
        core_contention: As :meth:`PricingContext.core_contention`. [places, 2].
        slowest: Slowest device type of all ranks. Shape [places].
        wait_s: What a message waits for a core at its receiver. Shape [places].
    """

    which: Index
    pp: Index
    types: Index
    bandwidth: Array
    latency: Array
    ranks: Index
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
        return equal_runs(topology.domains[0] if by_host else None, ids, self.lengths)

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

    def distinct(self, combos: Combinations) -> tuple[Index, Index]:
        """Number combinations that differ in more than their order of devices.

        Returns:
            First of each kind, [kinds], and the kind of each, [combinations].
        """
        order = combos.orders
        waits = combos.tp_waits_s(self.lengths[order], self.core_waits_s[order])
        links = [np.unique(waits, return_inverse=True)[1]]
        for degree, stride in combos.strides():
            groups = self.groups(degree, stride, order)
            parts = (getattr(groups, name) for name in _OF_GROUPS)
            seen = np.hstack([part for part in parts if part is not None])
            _, kind = np.unique(seen, axis=0, return_inverse=True)
            links.append(kind.reshape(-1)[groups.which])
        degrees = (combos.tp, combos.cp, combos.ep, combos.microbatch)
        depth = [] if combos.depth is None else [combos.depth]
        return number_rows(*degrees, combos.sequence_parallel, *depth, *links)

    def places(self, which: Index, pp: Index) -> Places:
        """Find the places of rows: device types, boundaries and limits of pipelines.

        Args:
            which: Order of each row. Shape [n].
            pp: Pipeline degree of each row, a divisor of the ranks. Shape [n].
        """
        first, place = number_rows(which, pp)
        order, degree = which[first], pp[first]
        shape = (len(first), int(degree.max(initial=1)))
        sizes = len(np.unique(self.context.facts.memory_bytes))
        watched = (len(first), 3 + (sizes if sizes > 1 else 0))
        made = Places(
            which=place,
            pp=degree,
            types=np.zeros(shape, dtype=np.int64),
            bandwidth=np.full(shape, np.inf),
            latency=np.zeros(shape),
            ranks=np.zeros(watched, dtype=np.int64),
            limits=np.zeros(watched),
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
        made.ranks[:] = (pp - 1)[:, None]
        made.ranks[:, 0], made.ranks[:, 1] = 0, np.minimum(1, pp - 1)
        behind = np.where(runs.stage > 0, memory, np.nan)
        sizes = np.unique(memory)[: made.ranks.shape[1] - 3]
        for column, size in enumerate(sizes.tolist(), start=3):
            own = np.flatnonzero(behind == size)
            place, earliest = np.unique(runs.owner[own], return_index=True)
            made.ranks[place, column] = runs.stage[own[earliest]]
        made.limits[:] = memory[head[:, None] + made.ranks]
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
