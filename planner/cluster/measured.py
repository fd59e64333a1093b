"""The cluster that a probe measured."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from planner.cluster.detect import known_type
from planner.schema.cluster import (
    ClusterDocument,
    DeviceType,
    HostGroup,
    Level,
    Link,
)
from planner.schema.probe import ProbeDocument

if TYPE_CHECKING:
    from planner.cluster.cluster import Cluster

__all__ = ["cluster_from_probe", "probed_document"]


def cluster_from_probe(probe: ProbeDocument) -> Cluster:
    """The cluster that a probe measured; its calibration is the probe's name."""
    from planner.cluster.cluster import Cluster

    return Cluster.from_probe(probe)


def probed_document(probe: ProbeDocument) -> ClusterDocument:
    """Document of the measured process group, one device a rank."""
    links = {link.scope: link for link in probe.links}
    inside = links.get("host", links.get("network"))
    outside = links.get("network", links.get("host"))
    device = _device(probe)
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


def _device(probe: ProbeDocument) -> DeviceType:
    """Measured rates; a known chip keeps its name and its other datasheet peaks."""
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
