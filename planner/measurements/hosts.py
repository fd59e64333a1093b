"""Hosts, links and named machines that measurements are taken on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from planner.cluster.presets import known_links
from planner.measurements.catalogues import read_rows
from planner.schema.cluster import Link

__all__ = ["HostKind", "KnownSystem", "known_systems", "usual_hosts"]

_HOP_S = 2e-6  # assumption: as NVLink and PCIe


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKind:
    """A host and its place in a network.

    Attributes:
        devices: Devices of one host when it is full.
        inside: Link between devices of a host, and of a domain.
        nics: Network interfaces of a host for computation.
        gbits: Rate of one of them, Gbit/s and direction.
        network: Name of the network.
        rdma: False for TCP.
        domain: Devices of all hosts that ``inside`` joins; None for one host, 0 for
            all that there are.
        source: Document that counts and rates are from.
    """

    devices: int
    inside: Link
    nics: int
    gbits: float
    network: str
    rdma: bool
    domain: int | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSystem:
    """A machine with a name.

    Attributes:
        name: For people.
        pattern: Finds it in the GPU's name or in the notes, in lower case; None if
            rows name it by their source alone.
        source_pattern: Finds it in the name of the source, in lower case; None if no
            source is known to have used it.
        devices: Device types that it comes with, the most common first.
        host: Its hosts.
    """

    name: str
    pattern: re.Pattern[str] | None
    source_pattern: re.Pattern[str] | None
    devices: tuple[str, ...]
    host: HostKind


@cache
def _links() -> Mapping[str, Link]:
    """Return links by name: those of presets, and those of ``links.csv``."""
    more = {
        row["key"]: Link(
            name=row["name"],
            bandwidth_bytes_per_s=float(row["bandwidth_gb_per_s"] + "e9"),
            latency_s=_HOP_S,
            mesh=row["mesh"] == "yes",
            source=row["source"],
        )
        for row in read_rows("links.csv")
    }
    return {**known_links(), **more}


def _host(row: Mapping[str, str]) -> HostKind:
    domain = row.get("domain")
    return HostKind(
        devices=int(row["devices"]),
        inside=_links()[row["inside"]],
        nics=int(row["nics"]),
        gbits=float(row["gbits"]),
        network=row["network"],
        rdma=row["rdma"] == "yes",
        domain=(0 if domain == "all" else int(domain)) if domain else None,
        source=row["source"],
    )


@cache
def usual_hosts() -> Mapping[str, HostKind]:
    """Return the usual host of each device type: ``hosts.csv``.

    It counts where a row names no machine.
    """
    return {row["device"]: _host(row) for row in read_rows("hosts.csv")}


@cache
def known_systems() -> tuple[KnownSystem, ...]:
    """Return the machines of ``systems.csv``; the first whose pattern fits counts."""
    return tuple(
        KnownSystem(
            name=row["name"],
            pattern=_pattern(row["pattern"]),
            source_pattern=_pattern(row["source_pattern"]),
            devices=tuple(row["device"].split()),
            host=_host(row),
        )
        for row in read_rows("systems.csv")
    )


def _pattern(text: str) -> re.Pattern[str] | None:
    return re.compile(text) if text else None
