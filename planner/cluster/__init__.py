"""Devices, links, and what is occupied: the Cluster and where it comes from."""

from planner.cluster.cluster import Cluster
from planner.cluster.levels import AxisLevel
from planner.cluster.presets import cluster_names, device_type, device_type_names

__all__ = [
    "AxisLevel",
    "Cluster",
    "cluster_names",
    "device_type",
    "device_type_names",
]
