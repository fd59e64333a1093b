"""A cluster for the job stream: hosts of some kinds below levels of switches.

A job gets equally many devices of each of some hosts, and is priced on the
*sub-cluster* of just those. Hosts that meet at a level are priced as if each were on a
switch of its own there, which never makes a price too low. A cluster of matrices is
reduced to its slowest links: inside each host, and between any two hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.cluster.documents import part_of_host
from planner.errors import ClusterError
from planner.schema.cluster import (
    ClusterDocument,
    DeviceType,
    HostGroup,
    Level,
    Link,
    MeasuredCollective,
)

__all__ = ["HostKind", "Shape", "StreamNetwork", "sub_cluster"]

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKind:
    """A kind of equal hosts.

    Attributes:
        device: Type of their devices.
        group: One of the hosts. Its name and its memory are left out.
    """

    device: DeviceType
    group: HostGroup

    @property
    def size(self) -> int:
        """Devices in each."""
        return self.group.devices_per_host

    @property
    def is_shared(self) -> bool:
        """True if a device has more of its host while others do nothing."""
        return self.group.compute_slots is not None or self.group.nics is not None

    def part(self, devices: int) -> HostKind:
        """Return hosts of so many of the devices, and their share of the rest."""
        return replace(self, group=part_of_host(self.group, devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a job: equally many devices on each of some hosts of one kind.

    Attributes:
        kind: Index into :attr:`StreamNetwork.kinds`.
        hosts: Number of hosts.
        per_host: Devices on each.
        frugal: True for a plan that sends little between hosts, False for the fastest.
        shift: Share of a step by which it begins to send later than at 0, from 0 to 1.
    """

    kind: int
    hosts: int
    per_host: int
    frugal: bool = False
    shift: float = 0.0

    @property
    def devices(self) -> int:
        """Devices on all hosts: the degree of a job."""
        return self.hosts * self.per_host


def sub_cluster(
    kind: HostKind,
    shape: Shape,
    between: Link | None,
    stretch: float = 1.0,
    collectives: tuple[MeasuredCollective, ...] = (),
) -> Cluster:
    """Make a cluster of the devices that a job of a shape runs on.

    Args:
        kind: Kind of the hosts.
        shape: Shape of the job.
        between: Link of the level at which the hosts meet; None for one host.
        stretch: Divisor of the bandwidth between hosts.
        collectives: Measured collectives; used for one host alone, because it is
            unknown how they would share links.
    """
    part = part_of_host(kind.group, shape.per_host)
    nic = None if shape.hosts == 1 else part.nic
    group = part.model_copy(
        update={"count": shape.hosts, "nic": nic and _divided(nic, stretch)}
    )
    levels: tuple[Level, ...] = ()
    if shape.hosts > 1:
        if between is None:
            raise ClusterError(
                f"{shape.hosts} hosts without a link between them; give one"
            )
        levels = (Level(name="between hosts", link=_divided(between, stretch)),)
    document = ClusterDocument(
        name=f"{shape.hosts} x {shape.per_host} {kind.device.name}",
        device_types=(kind.device,),
        hosts=(group,),
        levels=levels,
        collectives=collectives if shape.hosts == 1 else (),
    )
    return Cluster(document)


def _divided(link: Link, stretch: float) -> Link:
    bandwidth = link.bandwidth_bytes_per_s / stretch
    return link.model_copy(update={"bandwidth_bytes_per_s": bandwidth})


class StreamNetwork:
    """Hosts, kinds, levels and unusable devices of a cluster.

    Args:
        cluster: Any cluster; its occupied devices stay occupied.

    Raises:
        ClusterError: If all devices are occupied.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        document = cluster.document
        self.num_devices = cluster.num_devices
        self.host_of_device: Index = np.asarray(cluster.host_of_device)
        self.usable = np.zeros(self.num_devices, dtype=np.bool_)
        self.usable[cluster.free] = True
        if not self.usable.any():
            raise ClusterError(
                f"all {self.num_devices} devices of {cluster.name} are occupied; free "
                f"some for jobs to run on"
            )
        types = {device.name: device for device in cluster.device_types}
        made = [
            HostKind(
                device=types[group.device],
                group=group.model_copy(
                    update={"name": "host", "count": 1, "memory_bytes": None}
                ),
            )
            for group in document.hosts
        ]
        self.kinds: tuple[HostKind, ...] = tuple(
            kind for index, kind in enumerate(made) if kind not in made[:index]
        )
        self.kind_of_host: Index = np.repeat(
            [self.kinds.index(kind) for kind in made],
            [group.count for group in document.hosts],
        ).astype(np.int64)
        self.levels: tuple[Link, ...] = self._levels(document)

    def _levels(self, document: ClusterDocument) -> tuple[Link, ...]:
        if document.matrices is None:
            return tuple(level.link for level in document.levels)
        if len(self.kind_of_host) == 1:
            return ()
        a, b = np.nonzero(self.host_of_device[:, None] != self.host_of_device[None, :])
        bandwidth, latency = self.cluster.topology.links(a, b)
        slowest = Link(
            bandwidth_bytes_per_s=float(bandwidth.min()),
            latency_s=float(latency.max()),
            source="slowest entries of the matrices between hosts",
        )
        return (slowest,)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(self.kind_of_host)

    @cached_property
    def switches(self) -> Index:
        """Switch of each host at each level; row 0 is the host. Shape [levels + 1, h].

        The last level joins all hosts, also where a document names no level.
        """
        document, count = self.cluster.document, self.num_hosts
        rows = [list(range(count))]
        if document.matrices is not None:
            rows += [[0] * count] * len(self.levels)
        else:
            rows += [level.switch_of_host(count) for level in document.levels]
        return np.array(rows, dtype=np.int64)

    def usable_per_host(self) -> Index:
        """Return the usable devices of each host. Shape [hosts]."""
        return np.bincount(
            self.host_of_device, weights=self.usable, minlength=self.num_hosts
        ).astype(np.int64)

    def shapes(
        self, max_degree: int, spread: int, *, frugal: bool = False, shifts: int = 1
    ) -> tuple[Shape, ...]:
        """List the shapes: powers of two of devices, on few hosts and on more.

        Sorted by degree, then by hosts, then the fastest plan first, then by kind, then
        by shift.

        Args:
            max_degree: Most devices of a job.
            spread: Number of times that the least number of hosts is doubled.
            frugal: Whether shapes of several hosts come with a frugal plan as well.
            shifts: Equal offsets in a step at which shapes of several hosts come.

        Raises:
            ClusterError: If ``max_degree`` is not a number of the cluster's devices,
                or ``spread`` is negative.
        """
        free = self.usable_per_host()
        if not 1 <= max_degree <= int(free.sum()) or spread < 0:
            raise ClusterError(
                f"max_degree={max_degree} and spread={spread}: jobs have from 1 to "
                f"{int(free.sum())} devices, which is what {self.cluster.name} offers, "
                f"and spread is at least 0"
            )
        found: list[Shape] = []
        for kind, host in enumerate(self.kinds):
            mine = free[self.kind_of_host == kind]
            degree = 1
            while degree <= max_degree:
                hosts = 1
                while degree > hosts * host.size:
                    hosts *= 2
                most = min(hosts << spread, degree)
                while hosts <= most:
                    per_host = degree // hosts
                    if (mine >= per_host).sum() >= hosts:
                        found.append(Shape(kind=kind, hosts=hosts, per_host=per_host))
                    hosts *= 2
                degree *= 2
        if frugal:
            found += [replace(shape, frugal=True) for shape in found if shape.hosts > 1]
        found += [
            replace(shape, shift=turn / shifts)
            for shape in found
            if shape.hosts > 1
            for turn in range(1, shifts)
        ]
        return tuple(
            sorted(found, key=lambda s: (s.devices, s.hosts, s.frugal, s.kind, s.shift))
        )
