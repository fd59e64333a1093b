"""Groups of devices that stay together in an order: those of a host, or of several.

Where there are very many hosts, those of a kind that are close to each other are one
group, so that a search for orders has few groups to put in order. A stage may still
take a part of a group: the devices of a group follow each other host by host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cluster.topology import HierarchicalTopology
from planner.cost import PricingContext
from planner.simulate.compiled import compiled

__all__ = ["DeviceGroups", "group_devices"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Number of hosts above which hosts are joined, and of the groups that are aimed at.
_MOST_HOSTS, _JOINED = 128, 64


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
    """Free devices by host or by several hosts alike, and the links between groups.

    Attributes:
        ids: Device ids, group by group. Shape [devices].
        starts: Start of each group in ``ids``, then the number of devices. Shape
            [groups + 1].
        hosts: Number of hosts in each group, with equally many free devices. Shape
            [groups].
        kinds: Device type of each group. Shape [groups].
        bandwidth: Bytes/s between devices of two groups, on the diagonal inside a
            host of one. Shape [groups, groups].
        latency: Seconds between devices of two groups, likewise. Shape
            [groups, groups].
    """

    ids: Index
    starts: Index
    hosts: Index
    kinds: Index
    bandwidth: Array
    latency: Array

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def sizes(self) -> Index:
        """Devices in each group. Shape [groups]."""
        return np.diff(self.starts)

    @property
    def host_sizes(self) -> Index:
        """Free devices of each host of a group. Shape [groups]."""
        return np.asarray(self.sizes // self.hosts)

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

    def links_differ(self, among: Index | None = None) -> bool:
        """Return True if not all pairs of groups are equally far apart.

        Args:
            among: Groups to look at; all if None.
        """
        seconds = self.seconds()
        if among is not None:
            seconds = seconds[np.ix_(among, among)]
        off = seconds[~np.eye(len(seconds), dtype=bool)]
        return bool(len(off) and np.ptp(off) > 1e-9 * off.max())

    def seconds(self, size_bytes: float = 16e6) -> Array:
        """Return the seconds of a message between groups. Shape [groups, groups]."""
        return self.latency + size_bytes / self.bandwidth


def group_devices(context: PricingContext, *, join: bool = False) -> DeviceGroups:
    """Group the free devices of a request by host, in the order of their ids.

    Args:
        context: What the request has in common with others; its devices.
        join: Whether to join hosts where there are more than 128: those with one
            device type, equally many free devices and equal links, first of one
            switch and then of switches that are close, until there are about 64
            groups. Hosts whose links are given pair by pair stay apart.
    """
    cluster = context.cluster
    ids = np.sort(context.order)
    hosts = np.asarray(cluster.host_of_device)[ids]
    starts = np.append(np.flatnonzero(np.diff(hosts, prepend=-1)), len(ids))
    first, last = ids[starts[:-1]], ids[starts[1:] - 1]
    parts = [[host] for host in range(len(first))]
    if join and len(first) > _MOST_HOSTS:
        parts = _joined_hosts(context, first, np.diff(starts))
        blocks = np.split(ids, starts[1:-1])
        ids = np.concatenate([blocks[host] for part in parts for host in part])
        sizes = [sum(len(blocks[host]) for host in part) for part in parts]
        starts = np.cumsum([0, *sizes])
        heads = [part[0] for part in parts]
        first, last = first[heads], last[heads]
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
        hosts=np.array([len(part) for part in parts], dtype=np.int64),
        kinds=np.asarray(cluster.type_index)[first].astype(np.int64),
        bandwidth=bandwidth,
        latency=latency,
    )


def _joined_hosts(
    context: PricingContext, first: Index, sizes: Index
) -> list[list[int]]:
    """Join hosts that are alike and close to each other.

    Args:
        context: The request's.
        first: First free device of each host. Shape [hosts].
        sizes: Free devices of each host. Shape [hosts].
    Returns:
        Hosts of each part, in order; parts in the order of their first hosts.
    """
    parts = [[host] for host in range(len(first))]
    topology = context.cluster.topology
    if not isinstance(topology, HierarchicalTopology):
        return parts
    ends = topology.ends
    alike = np.unique(
        np.stack(
            [
                np.asarray(context.cluster.type_index)[first],
                sizes,
                ends.host_bandwidth[first],
                ends.host_latency[first],
                ends.mesh[first],
                ends.nic_bandwidth[first],
                ends.nic_latency[first],
            ],
            axis=1,
        ),
        axis=0,
        return_inverse=True,
    )[1].reshape(-1)
    most = -(-len(first) // _JOINED)
    for switch in topology.domains[1:]:
        if len(parts) <= _JOINED:
            break
        # The part that each kind of hosts on each switch grows at present.
        open_parts: dict[tuple[int, int], list[int]] = {}
        made: list[list[int]] = []
        for part in parts:
            key = int(switch[first[part[0]]]), int(alike[part[0]])
            grown = open_parts.get(key)
            if grown is None or len(grown) + len(part) > most:
                open_parts[key] = grown = []
                made.append(grown)
            grown += part
        parts = made
    return parts
