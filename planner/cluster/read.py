"""Cluster documents from what people type, from files and from probes."""

from __future__ import annotations

import os
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from planner.cluster.detect import detect_document
from planner.cluster.presets import (
    cluster_names,
    device_type,
    known_type,
    preset_document,
)
from planner.errors import ClusterError, UnknownNameError
from planner.reading import parse_json, read_text
from planner.schema.base import first_problem
from planner.schema.cluster import (
    ClusterDocument,
    DeviceType,
    HostGroup,
    Level,
    Link,
)
from planner.schema.probe import ProbeDocument
from planner.yaml_reading import parse_yaml

__all__ = ["named_types", "parse_cluster", "probed_document", "read_cluster"]

_SUFFIXES = (".json", ".yaml", ".yml")


def parse_cluster(text: str) -> tuple[ClusterDocument, str]:
    """Read what people type; see :meth:`planner.cluster.Cluster.parse`.

    Returns:
        The document, and the ``ref`` of the cluster.
    """
    try:
        return _parsed(text.strip())
    except ValidationError as error:
        problem = first_problem(error, "cluster")
        raise ClusterError(f"cluster {text.strip()!r}: {problem}") from error


def _parsed(asked: str) -> tuple[ClusterDocument, str]:
    if asked.lower().endswith(_SUFFIXES) or os.sep in asked:
        return read_cluster(asked), asked
    name, colon, number = asked.partition(":")
    if colon and not (number.isascii() and number.isdigit() and int(number) > 0):
        raise ClusterError(
            f"cluster {asked!r}: {number!r} is not a number of at least 1; "
            f"write for example {name}:4"
        )
    count = int(number) if colon else None
    if name.lower() == "local":
        return detect_document(count), "local" if count is None else f"local:{count}"
    if Path(asked).is_file():
        return read_cluster(asked), asked
    known = name.lower()
    if known not in cluster_names():
        raise UnknownNameError("cluster preset", name, (*cluster_names(), "local"))
    ref = known if count in (None, 1) else f"{known}:{count}"
    return preset_document(known, count or 1), ref


def read_cluster(path: str | os.PathLike[str]) -> ClusterDocument:
    """Read a file; see :meth:`planner.cluster.Cluster.from_file`."""
    where = os.fspath(path)
    text = read_text(path, "cluster", pipe=True)
    as_yaml = where.lower().endswith((".yaml", ".yml"))
    parse = parse_yaml if as_yaml else parse_json
    data = parse(text, where, "cluster")
    if isinstance(data, dict) and data.get("document") == "probe":
        return probed_document(ProbeDocument.from_data(data, where=where))
    return ClusterDocument.from_data(named_types(data), where=where)


def named_types(data: Any) -> Any:
    """Replace names of known device types (``["h100-80"]``) by their numbers."""
    if not isinstance(data, dict) or not isinstance(data.get("device_types"), list):
        return data
    types = [
        device_type(entry).model_dump() if isinstance(entry, str) else entry
        for entry in data["device_types"]
    ]
    return {**data, "device_types": types}


def probed_document(probe: ProbeDocument) -> ClusterDocument:
    """Describe the process group that a probe measured, one device a rank."""
    links = {link.scope: link for link in probe.links}
    inside = links.get("host", links.get("network"))
    outside = links.get("network", links.get("host"))
    device = _probed_type(probe)
    groups: list[HostGroup] = []
    for index, run in groupby(probe.host_of_rank):
        count = len(list(run))
        if groups and groups[-1].devices_per_host == count:
            last = groups.pop()
            groups.append(last.model_copy(update={"count": last.count + 1}))
            continue
        groups.append(
            HostGroup(
                name=f"host{index}",
                count=1,
                devices_per_host=count,
                device=device.name,
                link=Link(
                    # A lone rank has nobody to talk to: any link will do.
                    bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s
                    if inside
                    else 1e12,
                    latency_s=inside.alpha_s if inside else 0.0,
                    source=f"measured by probe {probe.name}" if inside else "unused",
                ),
                compute_slots=probe.compute_slots
                if probe.compute_slots < count
                else None,
            )
        )
    levels: tuple[Level, ...] = ()
    if outside and probe.host_of_rank[-1] > 0:
        link = Link(
            bandwidth_bytes_per_s=outside.bandwidth_bytes_per_s,
            latency_s=outside.alpha_s,
            source=f"measured by probe {probe.name}",
        )
        levels = (Level(name="network", link=link),)
    return ClusterDocument(
        name=probe.name,
        device_types=(device,),
        hosts=tuple(groups),
        levels=levels,
        collectives=probe.collectives,
        calibration=probe.name,
        source=f"probe of {probe.world_size} ranks, torch "
        f"{probe.environment.torch_version}, {probe.environment.date or 'undated'}",
    )


def _probed_type(probe: ProbeDocument) -> DeviceType:
    """Return the measured type; a known chip keeps its name and its datasheet peaks."""
    known = known_type(probe.device_name, probe.memory_bytes)
    peaks = dict(probe.peak_flops_per_s)
    efficiency = 1.0
    if known is not None:
        shares = [
            rate / known.peak_flops_per_s[dtype]
            for dtype, rate in peaks.items()
            if dtype in known.peak_flops_per_s and dtype != "float32"
        ]
        efficiency = min(1.0, max(shares, default=known.matmul_efficiency))
        peaks = dict(known.peak_flops_per_s)
    return DeviceType(
        name=known.name if known else probe.device_name,
        peak_flops_per_s=peaks,
        memory_bytes=probe.memory_bytes,
        memory_bandwidth_bytes_per_s=probe.memory_bandwidth_bytes_per_s,
        matmul_efficiency=efficiency,
        half_efficiency_flops=probe.half_efficiency_flops,
        kernel_overhead_s=probe.kernel_overhead_s,
        processors=known.processors if known else None,
        backend=probe.backend,
        measured=True,
        source=f"measured by probe {probe.name}",
    )
