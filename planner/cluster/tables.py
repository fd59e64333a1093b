"""A cluster as rows of a table, for people."""

from __future__ import annotations

from planner.schema.cluster import ClusterDocument, DeviceType, Link
from planner.schema.plan import ClusterReference
from planner.units import format_bytes, format_count, format_seconds

__all__ = ["describe"]


def describe(
    document: ClusterDocument, reference: ClusterReference, num_free: int
) -> dict[str, str]:
    """See :meth:`planner.cluster.Cluster.describe`."""
    rows = {"name": document.name}
    num_hosts = sum(group.count for group in document.hosts)
    rows["devices"] = f"{reference.num_devices:,} on {num_hosts:,} hosts"
    if num_free < reference.num_devices:
        rows["free"] = f"{num_free:,}"
    for device in document.device_types:
        count = reference.device_types.get(device.name, 0)
        dtype, peak = _headline(device)
        rows[device.name] = (
            f"{count:,} x {format_bytes(device.memory_bytes)}, "
            f"{format_bytes(device.memory_bandwidth_bytes_per_s)}/s, "
            f"{format_count(peak)}FLOP/s {dtype}"
        )
    if document.matrices is None:
        for group in document.hosts:
            if group.devices_per_host > 1:
                rows[f"inside {group.name}"] = _link_text(group.link)
            if group.compute_slots is not None:
                rows[f"cores of {group.name}"] = f"{group.compute_slots:g}"
        for level in document.levels:
            rows[level.name] = _link_text(level.link)
    else:
        rows["links"] = f"{reference.num_devices} x {reference.num_devices} matrices"
    if document.collectives:
        rows["collectives"] = f"{len(document.collectives)} measured"
    rows["numbers from"] = document.calibration
    return rows


def _headline(device: DeviceType) -> tuple[str, float]:
    for dtype in ("bfloat16", "float16", "float32"):
        if dtype in device.peak_flops_per_s:
            return dtype, device.peak_flops_per_s[dtype]
    return next(iter(device.peak_flops_per_s.items()))


def _link_text(link: Link) -> str:
    text = f"{format_bytes(link.bandwidth_bytes_per_s)}/s, "
    text += format_seconds(link.latency_s)
    return f"{text} ({link.name})" if link.name else text
