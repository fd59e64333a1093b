"""Clusters and devices by name."""

from __future__ import annotations

from planner.cluster.counts import whole_number
from planner.cluster.presets.devices import device_type, device_type_names
from planner.cluster.presets.dtfm import DTFM_NAMES, dtfm_document
from planner.cluster.presets.systems import (
    ALIASES,
    SYSTEMS,
    internet_pcs,
    ramp,
    system_document,
)
from planner.errors import ClusterError, UnknownNameError
from planner.schema.cluster import ClusterDocument

__all__ = ["cluster_names", "device_type", "device_type_names", "preset_document"]

_FIXED = ("ramp", *DTFM_NAMES)


def cluster_names() -> tuple[str, ...]:
    """Names that :meth:`planner.cluster.Cluster.from_preset` knows, sorted."""
    return tuple(sorted((*SYSTEMS, *ALIASES, "internet-pcs", *_FIXED)))


def preset_document(name: str, nodes: int) -> ClusterDocument:
    """The document of a preset.

    Raises:
        UnknownNameError: If there is no such preset; suggests the nearest.
        ClusterError: If ``nodes`` is below 1, or is given for a cluster of fixed size.
    """
    if name not in cluster_names():
        raise UnknownNameError("cluster preset", name, cluster_names())
    nodes = whole_number(f"{name}: nodes", nodes)
    if name in _FIXED:
        if nodes != 1:
            raise ClusterError(
                f"{name}:{nodes}: {name} is one cluster of fixed size; write {name}"
            )
        return ramp() if name == "ramp" else dtfm_document(name)
    if name == "internet-pcs":
        return internet_pcs(nodes)
    return system_document(ALIASES.get(name, name), nodes)
