"""Hosts of a cluster with mixed device types, and how jobs lie on them."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.errors import StrategyError, UnknownNameError

__all__ = ["HostPool", "Pools", "Room", "pools_of"]

Index = NDArray[np.int64]
#: Devices of a job: pairs of a host and a number of its devices.
Hosts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPool:
    """Equal hosts.

    Attributes:
        kind: Device type, as the throughputs name it.
        hosts: Number of hosts.
        devices: Devices of each host.
    """

    kind: str
    hosts: int
    devices: int

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.devices < 1:
            raise StrategyError(
                f"{self.hosts} hosts of {self.devices} {self.kind}; give at least one "
                "of each"
            )


Pools = tuple[HostPool, ...]


def pools_of(cluster: Cluster, kinds: Iterable[str]) -> Pools:
    """Return the hosts of a cluster by device type.

    Args:
        cluster: The cluster; a host has one type.
        kinds: Types that throughputs name. The cluster's are found among them without
            regard to case, by the longest that its name contains.

    Raises:
        UnknownNameError: If no throughput is known of a type.
    """
    kinds = tuple(kinds)
    found: list[HostPool] = []
    for group in cluster.document.hosts:
        name = group.device.lower()
        among = [kind for kind in kinds if kind.lower() in name]
        if not among:
            raise UnknownNameError("device type with throughputs", group.device, kinds)
        found.append(
            HostPool(
                kind=max(among, key=len),
                hosts=group.count,
                devices=group.devices_per_host,
            )
        )
    return tuple(found)


class Room:
    """Free devices of each host, and the devices that jobs hold.

    Attributes:
        kind: Type of each host, by its number among ``kinds``. Shape [hosts].
        size: Devices of each host. Shape [hosts].
        free: Devices that are free and alive. Shape [hosts].
        down: Devices that are dead. Shape [hosts].
        held: Devices of each job that holds any.
    """

    def __init__(self, pools: Pools, kinds: tuple[str, ...]) -> None:
        if not pools:
            raise StrategyError("a cluster without hosts; give at least one HostPool")
        for pool in pools:
            if pool.kind not in kinds:
                raise UnknownNameError("device type with throughputs", pool.kind, kinds)
        self.kind: Index = np.repeat(
            [kinds.index(pool.kind) for pool in pools], [pool.hosts for pool in pools]
        )
        self.size: Index = np.repeat(
            [pool.devices for pool in pools], [pool.hosts for pool in pools]
        )
        self._kinds: list[int] = self.kind.tolist()
        self.free: Index = self.size.copy()
        self.down: Index = np.zeros_like(self.size)
        self.held: dict[int, Hosts] = {}
        self._capacity: Index = np.bincount(
            self.kind, self.size, minlength=len(kinds)
        ).astype(np.int64)
        self._of_kind = [
            np.flatnonzero(self.kind == number) for number in range(len(kinds))
        ]

    def copy(self) -> Room:
        """Return a room that can be changed apart."""
        other = copy(self)
        other.free, other.down = self.free.copy(), self.down.copy()
        other.held, other._capacity = self.held.copy(), self._capacity.copy()
        return other

    def capacity(self) -> Index:
        """Devices of each type that are alive. Shape [kinds]."""
        return self._capacity.copy()

    @property
    def alive(self) -> int:
        """Devices of all types that are alive."""
        return int(self._capacity.sum())

    def fail(self, host: int) -> None:
        """Take a free device of a host out of service."""
        self.down[host] += 1
        self.free[host] -= 1
        self._capacity[self.kind[host]] -= 1

    def repair(self, host: int) -> None:
        """Take a dead device of a host back into service."""
        self.down[host] -= 1
        self.free[host] += 1
        self._capacity[self.kind[host]] += 1

    def release(self, job: int) -> None:
        """Take back the devices of a job, if it holds any."""
        for host, devices in self.held.pop(job, ()):
            self.free[host] += devices

    def place(self, jobs: list[tuple[int, int, int]]) -> tuple[set[int], list[int]]:
        """Give devices to jobs that hold none.

        The largest come first, each on the fewest hosts that hold it: whole hosts, and
        the host with the fewest free devices that suffice for the rest. If there is no
        such place for one, smaller jobs move until there is. Where that does not help,
        all jobs of its type are laid out anew, and what then still has no such place
        gets devices of the hosts with the most free.

        Args:
            jobs: Number, type and number of devices of each.
        Returns:
            Jobs of others that moved, and the jobs that got nothing.
        """
        moved: set[int] = set()
        unplaced: list[int] = []
        for job, kind, devices in sorted(jobs, key=lambda one: -one[2]):
            if self._packed(job, kind, devices):
                continue
            if int(self.free[self._of_kind[kind]].sum()) < devices:
                unplaced.append(job)
                continue
            moved |= self._moving_few(job, kind, devices)
        return moved - {job for job, *_ in jobs}, unplaced

    def spread(self, job: int) -> int:
        """Return 0 if the job lies on the fewest hosts that could hold it, else 1."""
        hosts = self.held[job]
        sizes = self.size[self._of_kind[int(self.kind[hosts[0][0]])]]
        devices = sum(count for _, count in hosts)
        return int(len(hosts) > -(-devices // int(sizes.max())))

    def _packed(self, job: int, kind: int, devices: int) -> bool:
        """Place a job on the fewest hosts; do nothing and return False without room."""
        hosts = self._of_kind[kind]
        free, size = self.free[hosts], int(self.size[hosts].max(initial=1))
        whole, rest = divmod(devices, size)
        full = hosts[free == size][:whole]
        if len(full) < whole:
            return False
        chosen = [(int(host), size) for host in full]
        if rest:
            able = np.where(free >= rest, free, size + 1)
            able[np.isin(hosts, full)] = size + 1
            best = int(able.argmin())
            if able[best] > size:
                return False
            chosen.append((int(hosts[best]), rest))
        self._hold(job, tuple(chosen))
        return True

    def _moving_few(self, job: int, kind: int, devices: int) -> set[int]:
        """Place a job and move smaller ones for it; return those that moved."""
        free, held = self.free.copy(), self.held.copy()
        moved = self._squeezed(job, kind, devices)
        if moved is not None:
            return moved
        self.free, self.held = free, held
        return self._again(job, kind, devices)

    def _squeezed(self, job: int, kind: int, devices: int) -> set[int] | None:
        """Place a job where the fewest devices of smaller jobs are in its way.

        These jobs are placed in the same way. Where sizes of hosts and jobs are powers
        of two and no device is dead, there always is such a place.

        Returns:
            Jobs that moved; None if there is no such place.
        """
        if self._packed(job, kind, devices):
            return set()
        on, movable = self._smaller(kind, devices)
        hosts = self._of_kind[kind]
        size = int(self.size[hosts].max())
        whole, rest = divmod(devices, size)
        able = hosts[self.free[hosts] + movable[hosts] >= size]
        able = able[np.argsort(movable[able], kind="stable")]
        if len(able) < whole:
            return None
        chosen = [(host, size) for host in able[:whole].tolist()]
        evicted = {other for host, _ in chosen for _, other in on.get(host, ())}
        if rest:
            others = np.setdiff1d(hosts, able[:whole], assume_unique=True)
            host, leaving = self._least_evicted(on, movable, others, rest)
            if host < 0:
                return None
            chosen.append((host, rest))
            evicted |= leaving
        wanted = [
            (sum(count for _, count in self.held[other]), other) for other in evicted
        ]
        for other in evicted:
            self.release(other)
        self._hold(job, tuple(chosen))
        for count, other in sorted(wanted, key=lambda one: (-one[0], one[1])):
            further = self._squeezed(other, kind, count)
            if further is None:
                return None
            evicted |= further
        return evicted

    def _smaller(
        self, kind: int, devices: int
    ) -> tuple[dict[int, list[tuple[int, int]]], Index]:
        """Jobs with fewer devices: devices and job on each host, and their sums."""
        on: dict[int, list[tuple[int, int]]] = {}
        # Items of lists are faster to read and write than those of arrays.
        movable, kinds = [0] * len(self.free), self._kinds
        for other, places in self.held.items():
            if kinds[places[0][0]] != kind:
                continue
            if len(places) == 1:
                (host, count), total = places[0], places[0][1]
            else:
                total = sum(count for _, count in places)
            if total >= devices:
                continue
            for host, count in places:
                movable[host] += count
                on.setdefault(host, []).append((count, other))
        return on, np.array(movable, dtype=np.int64)

    def _least_evicted(
        self,
        on: dict[int, list[tuple[int, int]]],
        movable: Index,
        hosts: Index,
        rest: int,
    ) -> tuple[int, set[int]]:
        """Return the host on which the fewest devices make way, and their jobs.

        Args:
            on: Devices and job of those that may move from each host.
            movable: Sum of these devices. Shape [hosts].
            hosts: Hosts to choose from.
            rest: Devices that are needed.
        Returns:
            The host, or -1 if there is none, and the jobs.
        """
        able = hosts[self.free[hosts] + movable[hosts] >= rest]
        best, leaving, least = -1, set[int](), np.inf
        for host in able[np.argsort(-self.free[able], kind="stable")].tolist():
            short = rest - int(self.free[host])
            if short >= least:
                break
            found, freed = set(), 0
            for count, other in sorted(on.get(host, ()), reverse=True):
                # The smallest job that suffices, or the largest and then more.
                if freed < short:
                    found.add(other)
                    freed += count
            alone = [one for one in on.get(host, ()) if one[0] >= short]
            if alone and min(alone)[0] <= freed:
                freed, found = min(alone)[0], {min(alone)[1]}
            if freed < least:
                best, leaving, least = host, found, freed
        return best, leaving

    def _again(self, job: int, kind: int, devices: int) -> set[int]:
        """Lay out all jobs of a type anew, with one more; return those that moved."""
        before = {
            other: hosts
            for other, hosts in self.held.items()
            if self.kind[hosts[0][0]] == kind
        }
        wanted = {
            other: sum(count for _, count in hosts) for other, hosts in before.items()
        }
        for other in before:
            self.release(other)
        wanted[job] = devices
        for other, count in sorted(wanted.items(), key=lambda one: -one[1]):
            if not self._packed(other, kind, count):
                self._anywhere(other, kind, count)
        return {other for other, hosts in before.items() if self.held[other] != hosts}

    def _anywhere(self, job: int, kind: int, devices: int) -> None:
        hosts = self._of_kind[kind]
        chosen = []
        for host in hosts[np.argsort(-self.free[hosts], kind="stable")].tolist():
            taken = min(devices, int(self.free[host]))
            chosen.append((host, taken))
            devices -= taken
            if devices == 0:
                break
        self._hold(job, tuple(chosen))

    def _hold(self, job: int, hosts: Hosts) -> None:
        for host, devices in hosts:
            self.free[host] -= devices
        self.held[job] = hosts
