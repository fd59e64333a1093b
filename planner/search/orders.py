"""In which order devices become ranks, and how many of them are used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.search.base import Request
from planner.space import enumerate_strategies

__all__ = ["device_orders"]

Index = NDArray[np.int64]


def _host_sorted(request: Request, value: NDArray[np.float64]) -> Index:
    """Devices of ``setting.order`` with their hosts sorted by a value, stably."""
    order = request.setting.order
    return np.asarray(order[np.argsort(value[order], kind="stable")])


def _by_type(request: Request) -> list[Index]:
    """Whole orders for mixed clusters: roomy first, slow first, fast first.

    Early stages hold most microbatches, so memory in front helps 1F1B; the stage that
    starts the step and the one with the head gain from speed.
    """
    cluster = request.setting.cluster
    types = np.asarray(cluster.type_index)
    memory = np.array([device.memory_bytes for device in cluster.device_types])[types]
    speed = np.array(
        [max(device.peak_flops_per_s.values()) for device in cluster.device_types]
    )[types]
    return [
        request.setting.order,
        _host_sorted(request, -memory),
        _host_sorted(request, speed),
        _host_sorted(request, -speed),
    ]


def _single_types(request: Request) -> list[Index]:
    """Only the devices of one type: a slow minority may not be worth waiting for."""
    order = request.setting.order
    types = np.asarray(request.setting.cluster.type_index)[order]
    return [order[types == kind] for kind in np.unique(types)]


def _has_legal(request: Request, count: int) -> bool:
    tables = enumerate_strategies(
        request.facts, num_devices=count, pins=request.pins, rows=50_000
    )
    return next(tables, None) is not None


def _fewer(request: Request) -> list[Index]:
    """Prefixes of the order, largest first, until one has any legal strategy."""
    order = request.setting.order
    for count in range(len(order) - 1, 0, -1):
        if _has_legal(request, count):
            return [order[:count]]
    return []


def device_orders(request: Request) -> list[Index]:
    """Device id by rank, for every order worth a search of its own.

    A uniform cluster has one. If no legal strategy uses every device, because batch or
    heads do not divide, the largest number that does is used. With ``devices="any"``
    every power of two below is tried as well, and on small clusters every number.
    """
    order = request.setting.order
    orders = [order] if request.setting.cluster.is_uniform else _by_type(request)
    if len(np.unique(np.asarray(request.setting.cluster.type_index)[order])) > 1:
        orders += _single_types(request)
    if request.devices == "any":
        small = range(1, len(order)) if len(order) <= 64 else ()
        powers = [2**k for k in range(len(order).bit_length()) if 2**k < len(order)]
        orders += [order[:count] for count in sorted({*small, *powers}, reverse=True)]
    elif not _has_legal(request, len(order)):
        orders = [o for o in orders if len(o) < len(order)] + _fewer(request)
    unique = {tuple(o.tolist()): o for o in orders}
    return list(unique.values())
