"""Groups of devices that stay together in an order: the devices of one host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost import PricingContext
from planner.simulate.compiled import compiled

__all__ = ["DeviceGroups", "group_devices"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@compiled
def _expand(
    ids: Index, starts: Index, sequences: Index, counts: Index, orders: Index
) -> None:
    """Fill in the devices of each sequence's groups, in order, up to its count."""
    for row in range(len(sequences)):
        rank, count = 0, counts[row]
        for place in range(sequences.shape[1]):
            group = sequences[row, place]
            if group < 0 or rank == count:
                break
            for at in range(starts[group], starts[group + 1]):
                if rank == count:
                    break
                orders[row, rank] = ids[at]
                rank += 1


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class DeviceGroups:
    """Free devices by host, and the links between hosts.

    Attributes:
        ids: Device ids, group by group. Shape [devices].
        starts: Start of each group in ``ids``, then the number of devices. Shape
            [groups + 1].
        kinds: Device type of each group. Shape [groups].
        bandwidth: Bytes/s between devices of two groups, on the diagonal inside one.
            Shape [groups, groups].
        latency: Seconds between devices of two groups, likewise. Shape
            [groups, groups].
    """

    ids: Index
    starts: Index
    kinds: Index
    bandwidth: Array
    latency: Array

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def sizes(self) -> Index:
        """Devices in each group. Shape [groups]."""
        return np.diff(self.starts)

    def orders(self, sequences: Index, count: int | Index) -> Index:
        """Return the device id by rank of sequences of groups.

        Args:
            sequences: Groups in order, -1 after the last. Shape [n, most].
            count: Number of devices that are used, the last ones are left out. One
                number, or one for each sequence. Shape [n].
        Returns:
            Device id by rank, -1 after the last. Shape [n, largest count].
        """
        counts = np.broadcast_to(np.asarray(count, dtype=np.int64), len(sequences))
        most = int(counts.max(initial=0))
        orders = np.full((len(sequences), most), -1, dtype=np.int64)
        flat = np.ascontiguousarray(sequences)
        _expand(self.ids, self.starts, flat, np.ascontiguousarray(counts), orders)
        return orders

    def sequence_of(self, order: Index) -> Index:
        """Return groups in the order of their first devices in ``order``. [groups]."""
        group = np.empty(int(self.ids.max()) + 1, dtype=np.int64)
        group[self.ids] = np.repeat(np.arange(len(self)), self.sizes)
        found, first = np.unique(group[order], return_index=True)
        return np.asarray(found[np.argsort(first)])

    def by_links(self, start: int, usable: NDArray[np.bool_] | None = None) -> Index:
        """Order groups from one on: next comes the group nearest to any before it.

        Groups that are close to each other come side by side, whatever their numbers.
        Source: Prim 1957, "Shortest connection networks and some generalizations": the
        order in which a minimum spanning tree takes its vertices.

        Args:
            start: First group.
            usable: Mask of the groups that take part; all if None. Shape [groups].
        Returns:
            Shape [usable groups].
        """
        seconds = self.seconds()
        left = np.ones(len(self), dtype=bool) if usable is None else np.array(usable)
        order, near = [start], seconds[start].copy()
        left[start] = False
        while left.any():
            chosen = int(np.where(left, near, np.inf).argmin())
            order.append(chosen)
            left[chosen] = False
            near = np.minimum(near, seconds[chosen])
        return np.array(order, dtype=np.int64)

    def seconds(self, size_bytes: float = 16e6) -> Array:
        """Return the seconds of a message between groups. Shape [groups, groups]."""
        return self.latency + size_bytes / self.bandwidth


def group_devices(context: PricingContext) -> DeviceGroups:
    """Group the free devices of a request by host, in the order of their ids."""
    cluster = context.cluster
    ids = np.sort(context.order)
    hosts = np.asarray(cluster.host_of_device)[ids]
    starts = np.append(np.flatnonzero(np.diff(hosts, prepend=-1)), len(ids))
    first, last = ids[starts[:-1]], ids[starts[1:] - 1]
    # Both directions count, as collectives and pipelines use both.
    bandwidth, latency = cluster.topology.links(first[:, None], first[None, :])
    inside = [cluster.topology.links(*ends) for ends in ((first, last), (last, first))]
    np.fill_diagonal(bandwidth, np.minimum(inside[0][0], inside[1][0]))
    np.fill_diagonal(latency, np.maximum(inside[0][1], inside[1][1]))
    bandwidth, latency = (
        np.minimum(bandwidth, bandwidth.T),
        np.maximum(latency, latency.T),
    )
    return DeviceGroups(
        ids=ids,
        starts=starts.astype(np.int64),
        kinds=np.asarray(cluster.type_index)[first].astype(np.int64),
        bandwidth=bandwidth,
        latency=latency,
    )
