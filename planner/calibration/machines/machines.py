"""The cluster that a published measurement was taken on.

A row names a GPU and a count. What it leaves open is filled by what such devices
usually stand in, and every such step is written down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from planner.calibration.machines.gpu_names import normal, read_device
from planner.calibration.machines.hosts import HOSTS_OF_DEVICES, HostKind
from planner.calibration.machines.mixed import of_one_kind
from planner.calibration.machines.networks import Rate, stated_rate
from planner.calibration.machines.systems import SYSTEMS, KnownSystem
from planner.calibration.points import Point
from planner.cluster import Cluster
from planner.schema.cluster import (
    ClusterDocument,
    DeviceType,
    HostGroup,
    Level,
    Link,
)

__all__ = ["Machine", "machine_of"]

_PER_HOST = re.compile(
    r"(?<![\w.])([1-9]\d?) ?[x×]? ?(?:[a-z][\w-]*)?(?: gpus?)? ?(?:per |/ ?|a )"
    r"(?:node|host|server|machine)",
    re.IGNORECASE,
)
_NETWORK_S = 4.0e-6  # NCCL 2.18 tuning.cc, 2023: NET ring LL128
_USED = 64  # Megatron-Bridge performance summary 2026: runs of 64, 128, 256, 512
_ETHERNET_S = 20e-6  # Hurwitz and Feng 2003: TCP over 10 GbE, between applications


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a row was measured on.

    Attributes:
        cluster: Exactly as many devices as the row has.
        device: Name of their type; of the first, where there are several.
        hosts: How many.
        devices_per_host: Devices in each, of the first type.
        domain: Devices that the link inside hosts joins: those of one host, or more
            where it also joins hosts.
        assumed: What the row does not say, in plain words.
    """

    cluster: Cluster
    device: str
    hosts: int
    devices_per_host: int
    domain: int
    assumed: tuple[str, ...]


def machine_of(point: Point) -> Machine:
    """The machine of a row.

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
            notes += first.network_said
    return Machine(
        cluster=_cluster(parts),
        device=first.device.name,
        hosts=hosts,
        devices_per_host=first.per_host,
        domain=min(first.domain, point.n_gpus),
        assumed=tuple(dict.fromkeys(notes)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """All devices of one kind."""

    device: DeviceType
    kind: HostKind
    per_host: int
    hosts: int
    domain: int
    network: Link
    network_said: tuple[str, ...]
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
    link, said = _network(kind, stated_rate(point.gpu, point.notes))
    if system is not None and not named:
        notes.append(f"{system.name}, which its source used: {kind.source}")
    elif system is None and "dgx" not in point.gpu.lower():
        notes.append(f"hosts and links as usual for {device.name}: {kind.source}")
    if hosts * per_host > domain:
        notes += said
    return _Part(
        device=device,
        kind=kind,
        per_host=per_host,
        hosts=hosts,
        domain=domain,
        network=link,
        network_said=tuple(said),
        assumed=tuple(notes),
    )


def _system(point: Point) -> tuple[KnownSystem | None, bool]:
    """The system that a row names (True), or that its source used (False)."""
    for text in (point.gpu.lower(), normal(point.gpu)):
        for system in SYSTEMS:
            if system.pattern.search(text) and _stands_in(point.gpu, system):
                return system, True
    for system in SYSTEMS:
        if system.pattern.search(point.notes.lower()) and _stands_in(point.gpu, system):
            return system, True
    for system in SYSTEMS:
        pattern = system.source_pattern
        if pattern is None or not pattern.search(point.source.lower()):
            continue
        if _stands_in(point.gpu, system):
            return system, False
    return None, False


def _stands_in(gpu: str, system: KnownSystem) -> bool:
    """Whether a GPU may be in a system; one that is not named is the system's own."""
    device, _ = read_device(gpu, system)
    chips = {name.rpartition("-")[0] for name in system.devices}
    return device.name.rpartition("-")[0] in chips


def _usual_host(device: DeviceType) -> HostKind:
    if device.name in HOSTS_OF_DEVICES:
        return HOSTS_OF_DEVICES[device.name]
    chip = device.name.rpartition("-")[0]
    return next(
        kind
        for name, kind in HOSTS_OF_DEVICES.items()
        if name.rpartition("-")[0] == chip
    )


def _as_stated(kind: HostKind, point: Point) -> HostKind:
    """A kind of host with the devices that the row gives one, NICs in proportion."""
    match = _PER_HOST.search(point.gpu) or _PER_HOST.search(point.notes)
    if match is None:
        return kind
    count = int(match[1])
    nics = max(1, kind.nics * count // kind.devices)
    return replace(kind, devices=count, nics=nics)


def _layout(count: int, kind: HostKind, notes: list[str]) -> tuple[int, int, int]:
    """Devices of a host, hosts, devices of a domain."""
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


def _network(kind: HostKind, rate: Rate | None) -> tuple[Link, list[str]]:
    """The share that one device of a full host has of what leaves the host."""
    notes = []
    name, rdma, source = kind.network, kind.rdma, kind.source
    total = kind.nics * kind.gbits
    if rate is not None:
        name, source = rate.text, f"stated by the row: {rate.text}"
        rdma = kind.rdma if rate.rdma is None else rate.rdma
        total = rate.total_gbits(nics=kind.nics, devices=kind.devices)
        if rate.guessed:
            notes.append(f"{rate.text} is taken as {total:g} Gbit/s a host")
    link = Link(
        name=name,
        bandwidth_bytes_per_s=total * 1.25e8 / kind.devices,  # 1 Gbit/s
        latency_s=_NETWORK_S if rdma else _ETHERNET_S,
        source=source,
    )
    return link, notes


def _cluster(parts: list[_Part]) -> Cluster:
    """Hosts of all kinds, and the links that join them.

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
            )
            for place, part in enumerate(parts)
        ),
        levels=tuple(levels),
        source="; ".join(dict.fromkeys(part.kind.source for part in parts)),
    )
    return Cluster.from_document(document)
