"""The links between some devices of a cluster, with what they share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.cluster.topology import (
    FloatArray,
    HierarchicalTopology,
    IntArray,
    Topology,
)
from planner.simulate.send_tables import Network, SharedLinks

__all__ = ["network_of"]


def network_of(topology: Topology, devices: Sequence[int] | IntArray) -> Network:
    """Return the network of a group of devices, in their order.

    Other groups send at the same time: what a host or a switch has towards others, the
    group has by the share of its members. A device that sends alone has more of it, up
    to an interface. Inside a host a device has one link, or a cable to each other.
    Where every pair's bandwidth is given, a device's messages take turns.

    Args:
        topology: The cluster's.
        devices: Device id of each rank.
    """
    ids = np.asarray(devices, dtype=np.int64)
    n = len(ids)
    source, destination = np.repeat(ids, n), np.tile(ids, n)
    bandwidth, latency = topology.links(source, destination)
    lone = np.minimum(topology.lone_factor[source], topology.lone_factor[destination])
    host = topology.domains[0]
    bandwidth = bandwidth * np.where(host[source] != host[destination], lone, 1.0)
    shared = (
        _levels(topology, ids)
        if isinstance(topology, HierarchicalTopology)
        else (SharedLinks(domain=np.arange(n)),)
    )
    return Network(
        bandwidth=bandwidth.reshape(n, n),
        latency=np.array(latency).reshape(n, n),
        shared=shared,
    )


def _levels(topology: HierarchicalTopology, ids: IntArray) -> tuple[SharedLinks, ...]:
    ends = topology.ends
    domains = [np.unique(d[ids], return_inverse=True)[1] for d in topology.domains]
    found = []
    # Inside hosts: a device's one link, unless it has a cable to each other.
    capacity = np.where(ends.mesh[ids], np.inf, ends.host_bandwidth[ids])
    if np.isfinite(capacity).any():
        found.append(
            SharedLinks(
                domain=np.arange(len(ids)), capacity=capacity, within=domains[0]
            )
        )
    # Between hosts, then between the switches of each level.
    outside = ends.level_bandwidth[1:2].max(initial=0.0)
    share = np.minimum(ends.nic_bandwidth[ids], outside)
    for level, domain in enumerate(domains[:-1]):
        if level:
            share = np.full(len(ids), ends.level_bandwidth[level + 1])
        found.append(SharedLinks(domain=domain, capacity=_sums(domain, share)))
    return tuple(found)


def _sums(domain: IntArray, share: FloatArray) -> FloatArray:
    return np.asarray(np.bincount(domain, weights=share), dtype=np.float64)
