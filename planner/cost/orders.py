"""Many orders of the same devices: what a table's rows see of ranks and links.

A row of the strategy table says how devices are divided, an order says which device is
which rank. Rows of one table may each have an order of their own; everything that
depends on it is found here, for all orders at once. With a single order the answers are
those of :class:`planner.cost.setting.Setting`, which keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost.collectives import Groups, lines_of
from planner.cost.group_levels import LevelTables, group_levels, level_tables
from planner.cost.numbering import number_rows
from planner.cost.setting import Setting

__all__ = ["Orders", "Places"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


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
        crowding: See :meth:`planner.cost.setting.Setting.crowding`. [places, 2].
        slowest: Slowest device type of all ranks. Shape [places].
    """

    which: Index
    pp: Index
    types: Index
    bandwidth: Array
    latency: Array
    limits: Array
    crowding: Array
    slowest: Index


@dataclass(frozen=True)
class Orders:
    """Orders that a table's rows refer to by number.

    Attributes:
        setting: Everything else; its own order is not read where ``ids`` has several.
        ids: Device id of each rank. Shape [orders, ranks].
    """

    setting: Setting
    ids: Index

    @classmethod
    def of(cls, setting: Setting) -> Orders:
        """The one order of a setting."""
        return cls(setting=setting, ids=setting.order[None, :])

    @property
    def ranks(self) -> int:
        """Devices in each order."""
        return int(self.ids.shape[1])

    @cached_property
    def _net(self) -> LevelTables | None:
        return level_tables(self.setting.cluster.topology)

    def setting_of(self, order: int) -> Setting:
        """The setting with one of the orders."""
        return self.setting.reordered(self.ids[order])

    def groups(self, degree: Index, stride: Index, which: Index) -> Groups:
        """Communication groups of (order, degree, stride). Shapes [n]."""
        if len(self.ids) == 1:
            return self.setting.groups(degree, stride)
        first, index = number_rows(which, degree, stride)
        if self._net is None:
            return self._one_by_one(degree, stride, which)
        members, bandwidth, latency = group_levels(
            self._net, self.ids, which[first], degree[first], stride[first]
        )
        return Groups(
            members=members,
            bandwidth=self.setting.reached(bandwidth),
            latency=latency,
            which=index,
            rings=self.setting.calibration is not None and self.setting.on_gpu,
        )

    def _one_by_one(self, degree: Index, stride: Index, which: Index) -> Groups:
        """For networks whose arrays are not known."""
        first, index = number_rows(which, degree, stride)
        levels = [
            self.setting.cluster.axis_levels(
                int(degree[i]), int(stride[i]), self.ids[which[i]].tolist()
            )
            for i in first
        ]
        rings = self.setting.calibration is not None and self.setting.on_gpu
        found = Groups.from_levels(levels, index, rings=rings)
        return replace(found, bandwidth=self.setting.reached(found.bandwidth))

    def places(self, which: Index, pp: Index) -> Places:
        """What pipelines see of their orders.

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
            crowding=np.ones((len(first), 2)),
            slowest=np.zeros(len(first), dtype=np.int64),
        )
        for depth in np.unique(degree).tolist():
            rows = np.flatnonzero(degree == depth)
            self._fill(made, rows, self.ids[order[rows]], depth)
        return made

    def _fill(self, made: Places, rows: Index, ids: Index, pp: int) -> None:
        setting = self.setting
        kinds, memory = setting.types_and_limits(ids.reshape(len(rows), pp, -1))
        made.types[rows, :pp], made.types[rows, pp:] = kinds, kinds[:, :1]
        made.limits[rows] = memory[:, [0, min(1, pp - 1), pp - 1]]
        made.slowest[rows] = setting.types_and_limits(ids[:, None, :])[0][:, 0]
        if pp > 1:
            bandwidth, latency = self._boundaries(ids.reshape(len(rows), pp, -1))
            made.bandwidth[rows, :pp], made.latency[rows, :pp] = bandwidth, latency
        if setting.shares_cores:
            for row, order in zip(rows.tolist(), ids, strict=True):
                made.crowding[row] = setting.reordered(order).crowding(pp)

    def _boundaries(self, stages: Index) -> tuple[Array, Array]:
        """As :meth:`planner.cost.setting.Setting.boundaries`. [orders, pp] each."""
        setting, pp = self.setting, stages.shape[1]
        if len(self.ids) == 1:
            bandwidth, latency = setting.boundaries(pp)
            return bandwidth[None], latency[None]
        links = setting.cluster.topology.links
        behind = np.roll(stages, -1, axis=1)
        there, back = links(stages, behind), links(behind, stages)
        bandwidth = np.minimum(there[0], back[0]).min(axis=2)
        latency = np.maximum(there[1], back[1]).max(axis=2)
        return setting.reached(bandwidth), latency + setting.core_wait_s

    def pair_lines(self, places: Places) -> Array:
        """Fixed seconds, and seconds per byte, of an all-reduce between two pp ranks.

        As :meth:`planner.cost.setting.Setting.pair_line`, for every place with a
        pipeline; 0 for the others. Shape [places, 2].
        """
        lines = np.zeros((len(places.pp), 2))
        deep = np.flatnonzero(places.pp > 1)
        if not len(deep):
            return lines
        setting, wait = self.setting, self.setting.core_wait_s
        pairs = Groups(
            members=np.full((len(deep), 1), 2.0),
            bandwidth=places.bandwidth[deep].min(axis=1, keepdims=True),
            latency=places.latency[deep].max(axis=1, keepdims=True) - wait,
            which=np.arange(len(deep)),
        )
        both = lines_of("all_reduce", pairs, setting.cluster.document.collectives)
        cheaper = both[:, :, 1].argmin(axis=1)
        lines[deep] = both[np.arange(len(deep)), cheaper]
        # A ring of two has two hops.
        lines[deep, 0] += 2 * wait
        return lines
