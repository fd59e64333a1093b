"""Arrangers of clusters small enough for every arrangement to be looked at."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.cluster import Cluster
from planner.search import Request
from planner.search.device_order.groups import DeviceGroups, group_devices
from planner.search.device_order.pricer import OrderPricer, open_order_pricer
from planner.search.device_order.subsets import Choices, list_choices
from tests.cost.made import device, hosts, request_for, uniform_graph

__all__ = ["far_sites", "mixed_hosts", "opened", "prepared"]


def mixed_hosts() -> Cluster:
    """Hosts of 4, 4, 2 and 3 devices, those of the third slow and small."""
    peaks = {"float32": 2e13, "bfloat16": 4e13}
    slow = device("slow", memory_bytes=40e9, peak_flops_per_s=peaks)
    quick = device("quick")
    return hosts((2, 4, quick), (1, 2, slow), (1, 3, quick), latency=1e-5)


def far_sites(devices: int, sites: int, seed: int = 0) -> Cluster:
    """Lone devices of several sites in shuffled order; no two links are alike."""
    rng = np.random.default_rng(seed)
    site = rng.permutation(np.arange(devices) % sites)
    near = site[:, None] == site[None, :]
    rate = np.where(near, 1e10, 1e8) * rng.uniform(0.5, 1.0, (devices, devices))
    wait = np.where(near, 1e-4, 1e-2) * rng.uniform(0.5, 1.0, (devices, devices))
    rate, wait = np.minimum(rate, rate.T), np.maximum(wait, wait.T)
    return Cluster.from_matrices(rate, wait, device())


def prepared(
    cluster: Cluster, *, units: int = 6, global_batch: int = 12, **changes: Any
) -> tuple[Request, DeviceGroups, Choices]:
    """A request for a chain of equal layers, its groups and its meshes."""
    graph = changes.pop("graph", None) or uniform_graph(units)
    request = request_for(graph, cluster, global_batch=global_batch, **changes)
    groups = group_devices(request.context)
    return request, groups, list_choices(request, groups)


def opened(cluster: Cluster, **changes: Any) -> tuple[OrderPricer, Choices]:
    """An pricer of all meshes of a request."""
    request, groups, choices = prepared(cluster, **changes)
    pricer = open_order_pricer(request, choices, groups, np.arange(len(choices)))
    assert pricer is not None
    return pricer, choices
