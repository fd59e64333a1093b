"""Which devices of which hosts the ranks have: what launchers number by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from planner.targets.base import Case, Refusal

__all__ = ["Placement", "placement_of", "same_on_every_host", "whole_hosts"]

#: Devices of one machine with one operating system, where a cluster counts more as one
#: host because NVLink joins them. Source: NVIDIA, GB200 and GB300 NVL72: a rack has 18
#: compute trays of four GPUs.
_DEVICES_PER_MACHINE = {"gb200-186": 4, "gb300-279": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the ranks are.

    Attributes:
        hosts: Indices of the hosts that are used, ascending.
        local: Devices of each of them, by their number inside the host.
        whole: Whether these are all the devices of every host that is used.
    """

    hosts: tuple[int, ...]
    local: tuple[int, ...]
    whole: bool


def placement_of(case: Case) -> Placement | Refusal:
    """Where the ranks are, or why a launcher that counts host by host cannot say it."""
    ids = case.strategy.device_ids()
    value = str([list(run) for run in case.strategy.device_ranges] or "in order")
    if list(ids) != sorted(ids):
        return Refusal(
            field="device_ranges",
            value=value,
            why="ranks are out of the order of devices, and the launcher numbers ranks "
            "host by host",
            remedy="plan again with devices in order, or start one process per device "
            "yourself, with RANK set",
        )
    sizes = _machines(case)
    if not sizes:
        return Refusal(
            field="cluster.hosts",
            value="()",
            why="it is not known which ranks share a host",
            remedy="plan again with this version of Meshwright",
        )
    place = [(h, i) for h, size in enumerate(sizes) for i in range(size)]
    local: dict[int, list[int]] = {}
    for device in ids:
        host, index = place[device]
        local.setdefault(host, []).append(index)
    counts = sorted({len(devices) for devices in local.values()})
    if len(counts) > 1:
        return Refusal(
            field="device_ranges",
            value=value,
            why=f"hosts hold {counts[0]} to {counts[-1]} of the {len(ids)} ranks, and "
            f"the launcher wants the same number on each",
            remedy="plan for equal hosts, or write one command a host yourself",
        )
    first, *others = local.values()
    if any(devices != first for devices in others):
        return Refusal(
            field="device_ranges",
            value=value,
            why="hosts use different devices (some are occupied), and one script "
            "cannot name them for all",
            remedy="plan with the same devices free on each",
        )
    return Placement(
        hosts=tuple(local),
        local=tuple(first),
        whole=all(len(first) == sizes[host] for host in local),
    )


def _machines(case: Case) -> list[int]:
    """Devices of each host that has an operating system of its own."""
    sizes = [size for count, size in case.hosts for _ in range(count)]
    kind = case.device_types[0] if len(case.device_types) == 1 else ""
    each = _DEVICES_PER_MACHINE.get(kind, 0)
    if not each or any(size % each for size in sizes):
        return sizes
    return [each for size in sizes for _ in range(size // each)]


def same_on_every_host(case: Case) -> Refusal | None:
    """A rule: ranks are numbered host by host, the same devices on each."""
    if not case.placed:
        return None
    found = placement_of(case)
    return found if isinstance(found, Refusal) else None


def whole_hosts(case: Case) -> Refusal | None:
    """A rule: all devices of every host, or one host alone.

    For launchers that fill a host before they go on to the next.
    """
    if not case.placed:
        return None
    found = placement_of(case)
    if isinstance(found, Refusal) or found.whole or len(found.hosts) == 1:
        return None
    return Refusal(
        field="device_ranges",
        value=str([list(run) for run in case.strategy.device_ranges]),
        why=f"the plan has {len(found.local)} ranks on each of {len(found.hosts)} "
        f"hosts with more devices, and the launcher would put all ranks on as few "
        f"hosts as hold them",
        remedy="plan for whole hosts",
    )
