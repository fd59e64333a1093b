"""The networks of a cluster: devices, the levels they meet at, and link speeds.

In a *hierarchical* network devices sit in hosts, hosts on switches, switches on
switches: two devices meet at the innermost level they share and nothing of size n x n
is stored. In a *matrix* every pair has its own link.

Both number their levels from the inside: level 0 is the host, the last level joins
everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from planner.errors import TopologyError
from planner.schema.cluster import ClusterDocument

__all__ = [
    "Ends",
    "FloatArray",
    "HierarchicalTopology",
    "IntArray",
    "MatrixTopology",
    "Topology",
    "host_of_device",
    "require_all_links",
    "topology_of",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Entries of one block of pairwise links; bounds the memory of an enumeration.
_PAIRS_AT_ONCE = 1 << 21


class Topology(Protocol):
    """Arrays and questions that :mod:`planner.cluster.levels` has for a network."""

    @property
    def num_devices(self) -> int:
        """Devices in the network."""

    @property
    def level_names(self) -> tuple[str, ...]:
        """Names of the levels, innermost first."""

    @property
    def aggregates(self) -> tuple[bool, ...]:
        """True for the levels whose switches add up what hosts send."""

    @property
    def domains(self) -> tuple[IntArray, ...]:
        """Switch of each device, one array of shape [n] a level."""

    @property
    def level_sizes(self) -> tuple[int, ...] | None:
        """Devices under one switch of each level; None if they differ anywhere."""

    @property
    def has_equal_links(self) -> bool:
        """True if at each level all links are alike."""

    @property
    def lone_factor(self) -> FloatArray:
        """Shares of its host's network that a device has which sends alone: [n]."""

    def links(self, a: IntArray, b: IntArray) -> tuple[FloatArray, FloatArray]:
        """Bandwidth (bytes/s) and latency (s) from devices a to devices b.

        Args:
            a: Device ids. Shape [...].
            b: Device ids, of the same shape.
        """

    def slowest_by_level(
        self, groups: IntArray, in_host: int
    ) -> tuple[FloatArray, FloatArray]:
        """Slowest link between two members of one group, at each level.

        Args:
            groups: Device ids, one group a row. Shape [g, d].
            in_host: Members that join inside a host: where its devices are meshed,
                that decides how many cables each uses at a time.

        Returns:
            Bandwidth and latency, shape [levels]; infinite bandwidth and zero latency
            where no two members meet.
        """


def host_of_device(document: ClusterDocument) -> IntArray:
    """Host index of every device. Shape [n]."""
    counts = [group.count for group in document.hosts]
    sizes = np.repeat([group.devices_per_host for group in document.hosts], counts)
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)


def topology_of(document: ClusterDocument) -> Topology:
    """Build the network that a document describes.

    Raises:
        TopologyError: If two devices have no link.
    """
    if document.topology == "matrix":
        return MatrixTopology(document)
    return HierarchicalTopology(document)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Bandwidths and latencies at the ends of links; arrays of shape [devices].

    Attributes:
        host_bandwidth: Inside the device's host (bytes/s); likewise host_latency (s).
        mesh: True if the host's devices have cables to each other.
        nic_bandwidth: Infinite without a NIC; likewise nic_latency, then 0.
        level_bandwidth: Of each level; infinite for the host's. Shape [levels];
            likewise level_latency.
    """

    host_bandwidth: FloatArray
    host_latency: FloatArray
    mesh: npt.NDArray[np.bool_]
    nic_bandwidth: FloatArray
    nic_latency: FloatArray
    level_bandwidth: FloatArray
    level_latency: FloatArray


class HierarchicalTopology:
    """Devices in hosts, hosts on switches, in as many levels as the document has."""

    def __init__(self, document: ClusterDocument) -> None:
        self._document = document
        self._hosts = host_of_device(document)
        num_hosts = sum(group.count for group in document.hosts)
        switches = [
            np.asarray(level.switch_of_host(num_hosts), dtype=np.int64)
            for level in document.levels
        ]
        self._domains = (self._hosts, *(hosts[self._hosts] for hosts in switches))
        group = np.repeat(
            np.arange(len(document.hosts)),
            [g.count * g.devices_per_host for g in document.hosts],
        )
        inside = document.hosts
        nics = [g.nic for g in document.hosts]
        self._host_bandwidth = np.array(
            [g.link.bandwidth_bytes_per_s for g in inside], dtype=float
        )[group]
        self._host_latency = np.array([g.link.latency_s for g in inside])[group]
        self._mesh = np.array([g.link.mesh for g in inside])[group]
        self._nic_bandwidth = np.array(
            [nic.bandwidth_bytes_per_s if nic else np.inf for nic in nics]
        )[group]
        self._nic_latency = np.array([nic.latency_s if nic else 0.0 for nic in nics])[
            group
        ]
        self._level_bandwidth = np.array(
            [np.inf, *(lv.link.bandwidth_bytes_per_s for lv in document.levels)]
        )
        self._level_latency = np.array(
            [0.0, *(lv.link.latency_s for lv in document.levels)]
        )
        self._lone_factor = self._find_lone_factor()[group]
        for domain in self._domains:
            domain.setflags(write=False)
        self._sizes = self._equal_sizes()

    def _find_lone_factor(self) -> FloatArray:
        """Devices per interface of each host group, at most what leaves a device."""
        fastest = self._level_bandwidth[1:].max(initial=0.0)
        factors = []
        for group in self._document.hosts:
            share = min(
                fastest, group.nic.bandwidth_bytes_per_s if group.nic else np.inf
            )
            sharing = group.devices_per_host / (group.nics or group.devices_per_host)
            leaves = group.link.bandwidth_bytes_per_s / share if share else 1.0
            factors.append(max(1.0, min(sharing, leaves)))
        return np.array(factors)

    def _equal_sizes(self) -> tuple[int, ...] | None:
        sizes = []
        for domain in self._domains:
            counts = np.bincount(domain)
            if counts.min() != counts.max():
                return None
            sizes.append(int(counts[0]))
        return tuple(sizes)

    @property
    def num_devices(self) -> int:
        """Devices in the network."""
        return len(self._hosts)

    @property
    def ends(self) -> Ends:
        """Bandwidths and latencies by device and by level."""
        return Ends(
            host_bandwidth=self._host_bandwidth,
            host_latency=self._host_latency,
            mesh=self._mesh,
            nic_bandwidth=self._nic_bandwidth,
            nic_latency=self._nic_latency,
            level_bandwidth=self._level_bandwidth,
            level_latency=self._level_latency,
        )

    @property
    def level_names(self) -> tuple[str, ...]:
        """``host`` or the name of its link, then the levels of the document."""
        names = {group.link.name for group in self._document.hosts}
        inside = names.pop() if len(names) == 1 else ""
        return (inside or "host", *(level.name for level in self._document.levels))

    @property
    def aggregates(self) -> tuple[bool, ...]:
        """Levels whose switches add up, as the document says; hosts have none."""
        return (False, *(level.aggregates for level in self._document.levels))

    @property
    def domains(self) -> tuple[IntArray, ...]:
        """Host, then switch per level, of each device."""
        return self._domains

    @property
    def level_sizes(self) -> tuple[int, ...] | None:
        """Devices under one switch of each level; None if they differ."""
        return self._sizes

    @property
    def has_equal_links(self) -> bool:
        """True if all hosts have the same link inside and the same NIC."""
        first = self._document.hosts[0]
        return all(
            (g.link.bandwidth_bytes_per_s, g.link.latency_s, g.nic)
            == (first.link.bandwidth_bytes_per_s, first.link.latency_s, first.nic)
            for g in self._document.hosts
        )

    @property
    def lone_factor(self) -> FloatArray:
        """Devices that share an interface, at most what leaves a device: [n]."""
        return self._lone_factor

    def links(self, a: IntArray, b: IntArray) -> tuple[FloatArray, FloatArray]:
        """Bandwidth and latency at the innermost level that a and b share."""
        bandwidth = np.asarray(
            np.minimum(self._nic_bandwidth[a], self._nic_bandwidth[b])
        )
        latency = np.asarray(np.maximum(self._nic_latency[a], self._nic_latency[b]))
        level = np.full(bandwidth.shape, len(self._domains) - 1, dtype=np.int8)
        for index in range(len(self._domains) - 2, -1, -1):
            domain = self._domains[index]
            np.copyto(level, index, where=domain[a] == domain[b])
        np.minimum(bandwidth, self._level_bandwidth.take(level), out=bandwidth)
        np.maximum(latency, self._level_latency.take(level), out=latency)
        inside, same = level == 0, a == b
        np.copyto(bandwidth, self._host_bandwidth[a], where=inside)
        np.copyto(latency, self._host_latency[a], where=inside)
        np.copyto(bandwidth, np.inf, where=same)
        np.copyto(latency, 0.0, where=same)
        return bandwidth, latency

    def slowest_by_level(
        self, groups: IntArray, in_host: int
    ) -> tuple[FloatArray, FloatArray]:
        """Slowest link at each level, from the ends of the links alone."""
        count = len(self._domains)
        bandwidth = np.full(count, np.inf)
        latency = np.zeros(count)
        below = groups
        for index, domain in enumerate(self._domains):
            here = domain[groups]
            meets = _meets(here, below)
            below = here
            if not meets.any():
                continue
            members = groups[meets]
            if index == 0:
                cables = np.where(self._mesh[members], max(1, in_host - 1), 1)
                bandwidth[0] = (self._host_bandwidth[members] * cables).min()
                latency[0] = self._host_latency[members].max()
                continue
            slowest = self._nic_bandwidth[members].min()
            bandwidth[index] = min(self._level_bandwidth[index], slowest)
            latest = self._nic_latency[members].max()
            latency[index] = max(self._level_latency[index], latest)
        return bandwidth, latency


def _meets(switch: IntArray, below: IntArray) -> npt.NDArray[np.bool_]:
    """Members that share a switch with a member of another switch below it.

    Args:
        switch: Switch of each member. Shape [g, d].
        below: Switch one level further in, or the device itself. Shape [g, d].
    """
    rows = np.arange(len(switch), dtype=np.int64)[:, None]
    keys = rows * (int(switch.max()) + 1) + switch
    _, inverse = np.unique(keys, return_inverse=True)
    inverse = inverse.reshape(-1)
    low = np.full(inverse.max() + 1, np.iinfo(np.int64).max)
    high = np.full(inverse.max() + 1, -1)
    np.minimum.at(low, inverse, below.reshape(-1))
    np.maximum.at(high, inverse, below.reshape(-1))
    meets: npt.NDArray[np.bool_] = (low != high)[inverse].reshape(switch.shape)
    return meets


class MatrixTopology:
    """Every pair of devices has its own link; hosts are recognised as level 0."""

    def __init__(self, document: ClusterDocument) -> None:
        matrices = document.matrices
        if matrices is None:
            raise TopologyError(
                f"cluster {document.name!r} has topology 'matrix' but no matrices"
            )
        self._bandwidth = np.array(matrices.bandwidth_bytes_per_s, dtype=float)
        self._latency = np.array(matrices.latency_s, dtype=float)
        require_all_links(self._bandwidth, self._latency)
        np.fill_diagonal(self._bandwidth, np.inf)
        np.fill_diagonal(self._latency, 0.0)
        hosts = host_of_device(document)
        self._domains: tuple[IntArray, ...] = (hosts, np.zeros_like(hosts))
        for array in (self._bandwidth, self._latency, *self._domains):
            array.setflags(write=False)

    @property
    def num_devices(self) -> int:
        """Devices in the network."""
        return len(self._bandwidth)

    @property
    def matrices(self) -> tuple[FloatArray, FloatArray]:
        """Bandwidth (bytes/s) and latency (s) of every pair. Shapes [n, n]."""
        return self._bandwidth, self._latency

    @property
    def level_names(self) -> tuple[str, ...]:
        """``host`` and ``network``."""
        return ("host", "network")

    @property
    def aggregates(self) -> tuple[bool, ...]:
        """No level: nothing is known of switches."""
        return (False, False)

    @property
    def domains(self) -> tuple[IntArray, ...]:
        """Host of each device, and one network over all."""
        return self._domains

    @property
    def level_sizes(self) -> tuple[int, ...] | None:
        """None: a matrix is always enumerated."""
        return None

    @property
    def has_equal_links(self) -> bool:
        """True if every pair has the same link."""
        off = ~np.eye(self.num_devices, dtype=bool)
        if not off.any():
            return True
        bandwidth, latency = self._bandwidth[off], self._latency[off]
        return bool(np.ptp(bandwidth) == 0 and np.ptp(latency) == 0)

    @property
    def lone_factor(self) -> FloatArray:
        """All 1: a link given for a pair is what the pair has."""
        return np.ones(self.num_devices)

    def links(self, a: IntArray, b: IntArray) -> tuple[FloatArray, FloatArray]:
        """Entries [a][b] of the matrices."""
        return self._bandwidth[a, b], self._latency[a, b]

    def slowest_by_level(
        self, groups: IntArray, in_host: int
    ) -> tuple[FloatArray, FloatArray]:
        """Slowest link at each level over all pairs of each group, block by block."""
        hosts = self._domains[0]
        bandwidth, latency = np.full(2, np.inf), np.zeros(2)
        for a, b in _pairs(groups):
            band, wait = self.links(a, b)
            inside = hosts[a] == hosts[b]
            for level, chosen in enumerate((inside & (a != b), ~inside)):
                if chosen.any():
                    bandwidth[level] = min(bandwidth[level], band[chosen].min())
                    latency[level] = max(latency[level], wait[chosen].max())
        return bandwidth, latency


def _pairs(groups: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    count, degree = groups.shape
    rows = max(1, _PAIRS_AT_ONCE // (degree * degree))
    columns = max(1, min(degree, _PAIRS_AT_ONCE // degree))
    for start in range(0, count, rows):
        block = groups[start : start + rows]
        for left in range(0, degree, columns):
            a = block[:, left : left + columns, None]
            shape = (len(block), a.shape[1], degree)
            yield (
                np.broadcast_to(a, shape),
                np.broadcast_to(block[:, None, :], shape),
            )


def require_all_links(bandwidth: FloatArray, latency: FloatArray) -> None:
    """Check that every ordered pair of devices has a link.

    Args:
        bandwidth: Bytes/s; NaN is a missing link, the diagonal is not read.
            Shape [n, n].
        latency: Seconds, likewise.

    Raises:
        TopologyError: Naming the first pair without one.
    """
    holes = np.isnan(bandwidth) | np.isnan(latency)
    np.fill_diagonal(holes, False)
    if holes.any():
        first, second = (int(i) for i in np.argwhere(holes)[0])
        more = int(holes.sum()) - 1
        raise TopologyError(
            f"missing link from device {first} to device {second}"
            f"{f' (and {more} more)' if more else ''}: give its "
            f"bandwidth_bytes_per_s and latency_s"
        )
