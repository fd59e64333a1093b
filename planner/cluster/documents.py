"""Cluster documents made of matrices or of other documents."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.cluster.topology import FloatArray, require_all_links, topology_of
from planner.errors import ClusterError
from planner.schema.cluster import (
    ClusterDocument,
    DeviceType,
    HostGroup,
    Level,
    Link,
    Matrices,
)

__all__ = [
    "matrix_document",
    "mixed_document",
    "part_document",
    "part_of_host",
    "whole_number",
]


def whole_number(what: str, value: Any, least: int | None = 1) -> int:
    """Return a count as an int.

    Args:
        what: Name of the count in the message: ``"nodes"``.
        value: An int, also of numpy; no bool, and no float even if it is whole.
        least: Smallest that makes sense; None for any.

    Raises:
        ClusterError: If it is not a whole number, or below ``least``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ClusterError(f"{what}={value!r} is no whole number; give an int")
    if least is not None and number < least:
        raise ClusterError(f"{what}={number}; use at least {least}")
    return number


def matrix_document(
    bandwidth: npt.ArrayLike,
    latency: npt.ArrayLike,
    device: DeviceType | Sequence[DeviceType],
    hosts: Sequence[int] | None,
    *,
    name: str,
    source: str = "",
) -> ClusterDocument:
    """Describe every link; see :meth:`planner.cluster.Cluster.from_matrices`."""
    speed = _read_matrix("bandwidth", bandwidth)
    wait = _read_matrix("latency", latency)
    if wait.shape != speed.shape:
        raise ClusterError(
            f"latency has shape {wait.shape}, bandwidth {speed.shape}; give two "
            f"matrices with one row and one column a device each"
        )
    _require_possible("bandwidth", speed, "bytes/s")
    _require_possible("latency", wait, "seconds")
    speed[speed == 0] = np.nan
    require_all_links(speed, wait)
    count = len(speed)
    devices = [device] * count if isinstance(device, DeviceType) else list(device)
    for entry in devices:
        if not isinstance(entry, DeviceType):
            raise ClusterError(
                f"device {entry!r} is no DeviceType; give device_type(NAME)"
            )
    types, groups = _host_groups(devices, _host_list(hosts, count), speed, wait)
    return ClusterDocument(
        name=name,
        device_types=types,
        hosts=groups,
        topology="matrix",
        matrices=_matrices(speed, wait),
        source=source,
    )


def _read_matrix(title: str, values: npt.ArrayLike) -> FloatArray:
    try:
        array = np.array(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise ClusterError(
            f"{title} is no matrix of numbers ({error}); give one row and one column a "
            f"device"
        ) from error
    if array.ndim != 2 or len(set(array.shape)) > 1 or not array.size:
        raise ClusterError(
            f"{title} has shape {array.shape}; give a square matrix, one row and one "
            f"column a device"
        )
    return array


def _require_possible(title: str, array: FloatArray, unit: str) -> None:
    """Refuse infinite and negative entries off the diagonal; NaN is a missing link."""
    wrong = np.isinf(array) | (array < 0)
    np.fill_diagonal(wrong, False)
    if wrong.any():
        first, second = (int(i) for i in np.argwhere(wrong)[0])
        more = int(wrong.sum()) - 1
        raise ClusterError(
            f"{title} from device {first} to device {second} is "
            f"{float(array[first, second])}{f' (and {more} more)' if more else ''}; it "
            f"is finite and must not be negative: give it in {unit}"
        )


def _matrices(speed: FloatArray, wait: FloatArray) -> Matrices:
    rows = [
        [[None if i == j else x for j, x in enumerate(row)] for i, row in enumerate(m)]
        for m in (speed.tolist(), wait.tolist())
    ]
    return Matrices.model_validate(
        {"bandwidth_bytes_per_s": rows[0], "latency_s": rows[1]}
    )


def _host_list(hosts: Sequence[int] | None, count: int) -> list[int]:
    given = range(count) if hosts is None else hosts
    ids = [whole_number("host of a device", host, least=0) for host in given]
    if len(ids) != count:
        raise ClusterError(f"hosts names {len(ids)} devices, the matrices {count}")
    runs = [host for host, _ in itertools.groupby(ids)]
    if len(set(runs)) != len(runs):
        twice = next(host for host in runs if runs.count(host) > 1)
        raise ClusterError(
            f"devices of host {twice} do not lie side by side; reorder the rows and "
            f"columns of both matrices so that each host's devices follow one another"
        )
    return ids


def _host_groups(
    devices: Sequence[DeviceType],
    hosts: Sequence[int],
    speed: FloatArray,
    wait: FloatArray,
) -> tuple[tuple[DeviceType, ...], tuple[HostGroup, ...]]:
    if len(devices) != len(hosts):
        raise ClusterError(
            f"device names {len(devices)} types, the matrices {len(hosts)} devices; "
            f"give one type for all or one a device"
        )
    types = _distinct_types(devices)
    made: list[HostGroup] = []
    start = 0
    for host, members in itertools.groupby(hosts):
        stop = start + len(list(members))
        names = {device.name for device in devices[start:stop]}
        if len(names) > 1:
            raise ClusterError(
                f"host {host} has devices of types {', '.join(sorted(names))}; a host "
                f"has one type: call it two hosts, the matrices keep their links"
            )
        link = _slowest_inside(
            speed[start:stop, start:stop], wait[start:stop, start:stop]
        )
        last = made[-1] if made else None
        kind = (stop - start, devices[start].name, link)
        if last and (last.devices_per_host, last.device, last.link) == kind:
            made[-1] = last.model_copy(update={"count": last.count + 1})
        else:
            made.append(
                HostGroup(
                    name=f"host{host}",
                    count=1,
                    devices_per_host=kind[0],
                    device=kind[1],
                    link=link,
                )
            )
        start = stop
    return types, tuple(made)


def _slowest_inside(speed: FloatArray, wait: FloatArray) -> Link:
    off = ~np.eye(len(speed), dtype=bool)
    if not off.any():
        # A lone device has nobody to talk to in its host: any link will do.
        return Link(bandwidth_bytes_per_s=1e12, latency_s=0.0, source="unused")
    return Link(
        bandwidth_bytes_per_s=float(speed[off].min()),
        latency_s=float(wait[off].max()),
        source="slowest entry of the matrices inside the host",
    )


def _distinct_types(devices: Sequence[DeviceType]) -> tuple[DeviceType, ...]:
    types: dict[str, DeviceType] = {}
    for device in devices:
        if types.setdefault(device.name, device) != device:
            raise ClusterError(
                f"two device types are called {device.name!r} but differ in their "
                f"numbers; rename one"
            )
    return tuple(types.values())


def mixed_document(
    documents: Sequence[ClusterDocument], level: Link, name: str
) -> ClusterDocument:
    """Join clusters; see :meth:`planner.cluster.Cluster.mixed`."""
    if len(documents) < 2:
        raise ClusterError(f"{len(documents)} clusters to join; give at least two")
    title = name or "+".join(document.name for document in documents)
    types = _distinct_types([t for d in documents for t in d.device_types])
    offsets = np.cumsum([0, *(d.num_devices for d in documents)]).tolist()
    occupied = tuple(
        (start + offset, stop + offset)
        for document, offset in zip(documents, offsets, strict=False)
        for start, stop in document.occupied
    )
    if any(document.topology == "matrix" for document in documents):
        joined = _mixed_matrices(documents, level, offsets)
        hosts = tuple(group for d in documents for group in d.hosts)
        return ClusterDocument(
            name=title,
            device_types=types,
            hosts=hosts,
            topology="matrix",
            matrices=joined,
            occupied=occupied,
        )
    hosts, inner = _mixed_levels(documents)
    outer = Level(name=level.name or "between clusters", link=level)
    return ClusterDocument(
        name=title,
        device_types=types,
        hosts=hosts,
        levels=(*inner, outer),
        occupied=occupied,
    )


def _mixed_matrices(
    documents: Sequence[ClusterDocument], level: Link, offsets: Sequence[int]
) -> Matrices:
    shape = (offsets[-1], offsets[-1])
    speed = np.full(shape, level.bandwidth_bytes_per_s)
    wait = np.full(shape, level.latency_s)
    for document, start in zip(documents, offsets, strict=False):
        ids = np.arange(document.num_devices)
        stop = start + document.num_devices
        a, b = np.broadcast_arrays(ids[:, None], ids[None, :])
        inside = topology_of(document).links(a, b)
        speed[start:stop, start:stop], wait[start:stop, start:stop] = inside
    return _matrices(speed, wait)


def _mixed_levels(
    documents: Sequence[ClusterDocument],
) -> tuple[tuple[HostGroup, ...], tuple[Level, ...]]:
    """Put the levels of all clusters side by side; NICs take up their differences.

    A level of the joined network has the fastest link of any cluster at that depth,
    and the hosts of a slower cluster a NIC that holds them back to their own.
    """
    depth = max(len(document.levels) for document in documents)
    hosts: list[HostGroup] = []
    best: list[Link] = []
    for index in range(depth):
        links = [d.levels[index].link for d in documents if index < len(d.levels)]
        fast = max(link.bandwidth_bytes_per_s for link in links)
        soon = min(link.latency_s for link in links)
        first = next(x for x in links if x.bandwidth_bytes_per_s == fast)
        best.append(first.model_copy(update={"latency_s": soon}))
    for document in documents:
        hosts.extend(_with_nic(document, best))
    levels = []
    for index, link in enumerate(best):
        sizes: list[int] = []
        names = []
        for document in documents:
            count = sum(group.count for group in document.hosts)
            if index < len(document.levels):
                switches = document.levels[index].switch_of_host(count)
                sizes += [len(list(run)) for _, run in itertools.groupby(switches)]
                names.append(document.levels[index].name)
            else:
                sizes.append(count)
        title = "/".join(dict.fromkeys(names))
        levels.append(Level(name=title, hosts=tuple(sizes), link=link))
    return tuple(hosts), tuple(levels)


def _with_nic(document: ClusterDocument, best: Sequence[Link]) -> list[HostGroup]:
    """Hosts of one cluster with the NIC that makes the joined levels its own."""
    own = [level.link for level in document.levels]
    if all(_same_speed(a, b) for a, b in zip(own, best, strict=False)):
        return list(document.hosts)
    if len(own) > 1 and not all(_same_speed(link, own[0]) for link in own):
        raise ClusterError(
            f"cluster {document.name!r} has levels of different speeds that the others "
            f"do not share; join such networks with Cluster.from_matrices"
        )
    cap = own[0]
    return [
        group.model_copy(
            update={"nic": cap if group.nic is None else _slower(group.nic, cap)}
        )
        for group in document.hosts
    ]


def _same_speed(a: Link, b: Link) -> bool:
    return (a.bandwidth_bytes_per_s, a.latency_s) == (
        b.bandwidth_bytes_per_s,
        b.latency_s,
    )


def _slower(a: Link, b: Link) -> Link:
    slow = min(a, b, key=lambda link: link.bandwidth_bytes_per_s)
    return slow.model_copy(update={"latency_s": max(a.latency_s, b.latency_s)})


def part_document(
    document: ClusterDocument, ids: Sequence[int], name: str
) -> ClusterDocument:
    """Describe some devices of a cluster; see :meth:`planner.cluster.Cluster.part`."""
    chosen = set(ids)
    groups: list[HostGroup] = []
    kept: list[int] = []
    first = host = 0
    for group in document.hosts:
        for _ in range(group.count):
            stop = first + group.devices_per_host
            count = len(chosen.intersection(range(first, stop)))
            if count:
                kept.append(host)
                _append_host(groups, part_of_host(group, count))
            first, host = stop, host + 1
    used = {group.device for group in groups}
    fields: dict[str, Any] = {
        "name": name,
        "device_types": tuple(t for t in document.device_types if t.name in used),
        "hosts": tuple(groups),
        "collectives": tuple(
            one for one in document.collectives if one.group_size <= len(ids)
        ),
        "calibration": document.calibration,
        "source": document.source,
    }
    if document.matrices is not None:
        ordered = sorted(ids)
        matrices = {
            field: tuple(
                tuple(getattr(document.matrices, field)[i][j] for j in ordered)
                for i in ordered
            )
            for field in Matrices.model_fields
        }
        fields |= {"topology": "matrix", "matrices": Matrices(**matrices)}
    elif len(kept) > 1:
        fields["levels"] = _part_of_levels(document, kept, host)
    return ClusterDocument(**fields)


def _append_host(groups: list[HostGroup], group: HostGroup) -> None:
    """Add a host to runs of equal ones."""
    last = groups[-1] if groups else None
    if last is not None and last.model_copy(update={"count": 1}) == group:
        groups[-1] = last.model_copy(update={"count": last.count + 1})
    else:
        groups.append(group)


def part_of_host(group: HostGroup, count: int) -> HostGroup:
    """Return one host of a group with so many devices, and their share of the rest."""
    share = count / group.devices_per_host
    return group.model_copy(
        update={
            "count": 1,
            "devices_per_host": count,
            "compute_slots": group.compute_slots and group.compute_slots * share,
            "memory_bytes": group.memory_bytes and group.memory_bytes * share,
            "nics": group.nics and min(group.nics, count),
        }
    )


def _part_of_levels(
    document: ClusterDocument, kept: Sequence[int], num_hosts: int
) -> tuple[Level, ...]:
    """Return the levels of some hosts, with switches that join none left out."""
    levels = []
    for level in document.levels:
        switches = level.switch_of_host(num_hosts)
        runs = itertools.groupby(switches[host] for host in kept)
        sizes = tuple(len(list(run)) for _, run in runs)
        levels.append(level.model_copy(update={"hosts": sizes}))
    return tuple(levels)
