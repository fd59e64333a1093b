"""Clusters on which the order of devices matters, and requests on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.cluster import Cluster
from planner.search import Request
from tests.cost.made import device, hosts, request_for, uniform_graph

__all__ = ["CLUSTERS", "cluster_of", "matrix", "request_on"]

SLOW = device("slow", peak_flops_per_s={"bfloat16": 3e13}, memory_bytes=40e9)


def matrix(
    sites: Sequence[int], *, seed: int = 0, slow: Sequence[int] = (), each: int = 1
) -> Cluster:
    """Hosts of ``each`` devices, shuffled over sites with slow links between them.

    Args:
        sites: Hosts of each site.
        seed: Of the shuffle.
        slow: Hosts (after the shuffle) with slow devices.
        each: Devices of a host.
    """
    site = np.repeat(np.arange(len(sites)), sites)
    np.random.default_rng(seed).shuffle(site)
    host = np.repeat(np.arange(len(site)), each)
    same_host = host[:, None] == host[None, :]
    same_site = site[host][:, None] == site[host][None, :]
    return Cluster.from_matrices(
        np.where(same_host, 1e11, np.where(same_site, 1e10, 5e8)),
        np.where(same_host, 1e-6, np.where(same_site, 1e-5, 5e-3)),
        [SLOW if index in slow else device() for index in host.tolist()],
        hosts=host.tolist(),
    )


CLUSTERS = (
    "uniform",
    "mixed",
    "uneven",
    "occupied",
    "matrix",
    "mixed matrix",
    "one device",
)


def cluster_of(name: str) -> Cluster:
    """A small cluster of each kind."""
    made = {
        "uniform": lambda: hosts((2, 4, device())),
        "mixed": lambda: hosts((1, 4, device()), (1, 4, SLOW)),
        "uneven": lambda: hosts((1, 4, device()), (2, 2, device()), (1, 1, device())),
        "occupied": lambda: hosts((3, 4, device())).with_occupied([1, 2, 11]),
        "matrix": lambda: matrix([4, 4], seed=3),
        "mixed matrix": lambda: matrix([3, 2, 1], seed=1, slow=(1, 4), each=2),
        "one device": lambda: hosts((1, 1, device())),
    }
    return made[name]()


def request_on(name: str, batch: int = 36, units: int = 9, **changes: Any) -> Request:
    """A request on one of :data:`CLUSTERS`."""
    return request_for(uniform_graph(units), cluster_of(name), batch, **changes)
