"""Clusters that published measurements were taken on.

A row names a GPU and a count. Hosts and links that it leaves open are the usual ones of
such devices, and every such assumption is written down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from planner.cluster import Cluster
from planner.errors import CalibrationError
from planner.measurements.device_names import (
    chips_named,
    plain_device_name,
    read_device,
)
from planner.measurements.hosts import (
    HostKind,
    KnownSystem,
    known_systems,
    usual_hosts,
)
from planner.measurements.networks import Rate, stated_rate
from planner.measurements.points import Point
from planner.schema.cluster import (
    ClusterDocument,
    DeviceType,
    HostGroup,
    Level,
    Link,
)

__all__ = ["Machine", "machine_of", "of_one_kind"]

_PER_HOST = re.compile(
    r"(?<![\w.])([1-9]\d?) ?[x×]? ?(?:[a-z][\w-]*)?(?: gpus?)? ?(?:per |/ ?|a )"
    r"(?:node|host|server|machine)",
    re.IGNORECASE,
)
_NETWORK_S = 4.0e-6  # NCCL 2.18 tuning.cc, 2023: NET ring LL128
_USED = 64  # Megatron-Bridge performance summary 2026: runs of 64, 128, 256, 512
_BETWEEN = re.compile(r"\s*(?:[+&,;/]|\band\b)\s*")
_IN_FRONT = re.compile(r"^\(?(\d+)\s*(?:[x×*]|gpus? of)?\s*(.*)")
_BEHIND = re.compile(r"(?:(?<![a-z])[x×*]\s*|\()(\d+)\)?$")
_ETHERNET_S = 20e-6  # Hurwitz and Feng 2003: TCP over 10 GbE, between applications


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that a row was measured on.

    Attributes:
        cluster: Exactly as many devices as the row has.
        device: Name of their type; of the first, where there are several.
        hosts: Number of hosts.
        devices_per_host: Devices in each, of the first type.
        domain: Devices that the link inside hosts joins: those of one host, or more
            where it also joins hosts.
        assumed: Assumptions where the row states nothing, in plain words.
    """

    cluster: Cluster
    device: str
    hosts: int
    devices_per_host: int
    domain: int
    assumed: tuple[str, ...]


def machine_of(point: Point) -> Machine:
    """Return the machine of a row.

    Args:
        point: ``gpu`` and ``n_gpus`` say most; ``source`` and ``notes`` are read for
            systems and network rates that they name.

    Raises:
        CalibrationError: If the GPU is not known; names the nearest.
    """
    rows, shares = of_one_kind(point)
    parts = [_part(row) for row in rows]
    notes = [note for part in parts for note in part.assumed]
    first, hosts = parts[0], sum(part.hosts for part in parts)
    if len(parts) > 1:
        notes += [*shares, "ranks go over the kinds in the order of their names"]
        if first.hosts == 1:
            notes += first.network_notes
    return Machine(
        cluster=_cluster(parts),
        device=first.device.name,
        hosts=hosts,
        devices_per_host=first.per_host,
        domain=min(first.domain, point.n_gpus),
        assumed=tuple(dict.fromkeys(notes)),
    )


def of_one_kind(point: Point) -> tuple[tuple[Point, ...], tuple[str, ...]]:
    """Split a row into rows of one kind each, in the order in which it names them.

    Kinds stand apart by ``+``, ``&``, ``/``, a comma or "and"; each may say how many
    there are, for all of them or in proportion. Where none does, there are as many of
    each.

    Returns:
        The row itself where it names one kind; and what had to be assumed.
    Raises:
        CalibrationError: If the counts do not add up to ``n_gpus``.
    """
    parts = [part for part in _BETWEEN.split(point.gpu.lower()) if chips_named(part)]
    kinds = {read_device(part, None)[0].name for part in parts}
    if len(kinds) < 2:
        return (point,), ()
    counts = [_count(part) for part in parts]
    if any(count is None for count in counts):
        counts = [1] * len(parts)
    shares = [count or 1 for count in counts]
    times, rest = divmod(point.n_gpus, sum(shares))
    if rest:
        raise CalibrationError(
            f"point {point.point_id}: gpu={point.gpu!r} and n_gpus={point.n_gpus} do "
            "not say how many there are of each kind; write both, as in "
            "'16xA100 + 8xV100'"
        )
    rows = tuple(
        replace(point, gpu=part, n_gpus=count * times)
        for part, count in zip(parts, shares, strict=True)
    )
    words = ", ".join(f"{row.n_gpus} of {row.gpu}" for row in rows)
    return rows, () if times == 1 else (f"{words}: shares of n_gpus={point.n_gpus}",)


def _count(part: str) -> int | None:
    front = _IN_FRONT.search(part)
    # The number in "2080 ti" is the chip's.
    if front and chips_named(front[2]) == chips_named(part):
        return int(front[1])
    behind = _BEHIND.search(part)
    return int(behind[1]) if behind else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """All devices of one kind."""

    device: DeviceType
    kind: HostKind
    per_host: int
    hosts: int
    domain: int
    network: Link
    network_notes: tuple[str, ...]
    assumed: tuple[str, ...]


def _part(point: Point) -> _Part:
    system, named = _system(point)
    device, assumed = read_device(point.gpu, system)
    notes = list(assumed)
    if re.search(r"\?|not stated", point.gpu):
        notes.append(f"the source does not state the GPU for sure: {device.name}")
    kind = system.host if system is not None else _usual_host(device)
    kind = _as_stated(kind, point)
    per_host, hosts, domain = _layout(point.n_gpus, kind, notes)
    rate = stated_rate(point.gpu, point.notes)
    link, network_notes = _network(kind, per_host, rate)
    if system is not None and not named:
        notes.append(f"{system.name}, which its source used: {kind.source}")
    elif system is None and "dgx" not in point.gpu.lower():
        notes.append(f"hosts and links as usual for {device.name}: {kind.source}")
    if hosts * per_host > domain:
        notes += network_notes
    return _Part(
        device=device,
        kind=kind,
        per_host=per_host,
        hosts=hosts,
        domain=domain,
        network=link,
        network_notes=tuple(network_notes),
        assumed=tuple(notes),
    )


def _system(point: Point) -> tuple[KnownSystem | None, bool]:
    """Return the system that a row names (True), or that its source used (False)."""
    for text in (point.gpu.lower(), plain_device_name(point.gpu), point.notes.lower()):
        for system in known_systems():
            if _matches(system.pattern, text) and _stands_in(point.gpu, system):
                return system, True
    for system in known_systems():
        named = _matches(system.source_pattern, point.source.lower())
        if named and _stands_in(point.gpu, system):
            return system, False
    return None, False


def _matches(pattern: re.Pattern[str] | None, text: str) -> bool:
    return pattern is not None and pattern.search(text) is not None


def _stands_in(gpu: str, system: KnownSystem) -> bool:
    """Say if a GPU may be in a system; one that is not named is the system's own."""
    device, _ = read_device(gpu, system)
    chips = {name.rpartition("-")[0] for name in system.devices}
    return device.name.rpartition("-")[0] in chips


def _usual_host(device: DeviceType) -> HostKind:
    if device.name in usual_hosts():
        return usual_hosts()[device.name]
    chip = device.name.rpartition("-")[0]
    return next(
        kind for name, kind in usual_hosts().items() if name.rpartition("-")[0] == chip
    )


def _as_stated(kind: HostKind, point: Point) -> HostKind:
    """Return a host with the devices that the row gives it, NICs in proportion."""
    match = _PER_HOST.search(point.gpu) or _PER_HOST.search(point.notes)
    if match is None:
        return kind
    count = int(match[1])
    nics = max(1, kind.nics * count // kind.devices)
    return replace(kind, devices=count, nics=nics)


def _layout(count: int, kind: HostKind, notes: list[str]) -> tuple[int, int, int]:
    """Return the devices of a host, the hosts and the devices of a domain."""
    per_host = max(n for n in range(1, kind.devices + 1) if count % n == 0)
    if count < kind.devices:
        per_host = count
        notes.append(f"{count} of the {kind.devices} devices of one host")
    elif per_host < kind.devices:
        notes.append(
            f"{count} devices are no multiple of {kind.devices}: {per_host} a host"
        )
    hosts = count // per_host
    if kind.domain is None or hosts == 1:
        return per_host, hosts, per_host
    if kind.domain == 0 or count <= kind.domain:
        return per_host, hosts, count
    domain = kind.domain - kind.domain % per_host
    # NVIDIA's published runs take 64 of the 72 GPUs of a rack.
    if count % kind.domain and _USED % per_host == 0:
        domain = _USED
        notes.append(f"{domain} of the {kind.domain} devices of each domain are used")
    return per_host, hosts, domain


def _network(
    kind: HostKind, per_host: int, rate: Rate | None
) -> tuple[Link, list[str]]:
    """Return the share of its host's network that each of the devices used has."""
    notes = []
    name, rdma, source = kind.network, kind.rdma, kind.source
    total = kind.nics * kind.gbits
    if rate is not None:
        name, source = rate.text, f"stated by the row: {rate.text}"
        rdma = kind.rdma if rate.rdma is None else rate.rdma
        total = rate.total_gbits(nics=kind.nics, devices=kind.devices)
        if rate.guessed:
            notes.append(f"{rate.text} is taken as {total:g} Gbit/s a host")
    # A device has one interface at most, or its part of several.
    sharing = max(per_host, min(kind.nics, kind.devices))
    link = Link(
        name=name,
        bandwidth_bytes_per_s=total * 1.25e8 / sharing,  # 1 Gbit/s
        latency_s=_NETWORK_S if rdma else _ETHERNET_S,
        source=source,
    )
    return link, notes


def _cluster(parts: list[_Part]) -> Cluster:
    """Return the hosts of all kinds, and the links that join them.

    Kinds meet in one network, as fast as the slowest device's share of it.
    """
    first, alone = parts[0], len(parts) == 1
    inside, network = first.kind.inside, first.network
    if not alone:
        network = min(
            (part.network for part in parts),
            key=lambda link: link.bandwidth_bytes_per_s,
        )
    levels = []
    if alone and first.domain > first.per_host:
        levels.append(
            Level(
                name=f"{inside.name} domain",
                hosts=first.domain // first.per_host,
                link=inside,
            )
        )
    count = sum(part.hosts * part.per_host for part in parts)
    if not alone or count > first.domain:
        levels.append(Level(name=network.name, link=network))
    document = ClusterDocument(
        name=" + ".join(f"{p.hosts * p.per_host} x {p.device.name}" for p in parts),
        device_types=tuple({p.device.name: p.device for p in parts}.values()),
        hosts=tuple(
            HostGroup(
                name=part.device.name if alone else f"{part.device.name} {place}",
                count=part.hosts,
                devices_per_host=part.per_host,
                device=part.device.name,
                link=part.kind.inside,
                nics=part.kind.nics if part.kind.nics < part.per_host else None,
            )
            for place, part in enumerate(parts)
        ),
        levels=tuple(levels),
        source="; ".join(dict.fromkeys(part.kind.source for part in parts)),
    )
    return Cluster.from_document(document)
