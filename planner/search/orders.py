"""Orders of devices that are worth a search: which devices are used as which ranks."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.search.base import Request
from planner.search.launcher_limits import LauncherLimits
from planner.space import enumerate_meshes, enumerate_strategies, expand_meshes

__all__ = ["device_orders", "type_sets", "usable_counts"]

Index = NDArray[np.int64]

#: Largest tp of a model without named dimensions: powers of two up to this.
_ANY_TP = 64
#: Meshes that are looked at first for legal rows.
_FEW_MESHES = 16


def _sorted_by(request: Request, value: NDArray[np.float64]) -> Index:
    """Sort the request's devices by a value of each, stably."""
    order = request.context.order
    return np.asarray(order[np.argsort(value[order], kind="stable")])


def _by_type(request: Request) -> list[Index]:
    """Return orders of all devices by type: most memory, slowest or fastest first.

    Early stages hold most microbatches, so that devices with more memory in front help
    1F1B; the first stage and the one with the head gain from speed.
    """
    cluster = request.context.cluster
    types = np.asarray(cluster.type_index)
    memory = np.array([device.memory_bytes for device in cluster.device_types])[types]
    speed = np.array(
        [max(device.peak_flops_per_s.values()) for device in cluster.device_types]
    )[types]
    return [
        request.context.order,
        _sorted_by(request, -memory),
        _sorted_by(request, speed),
        _sorted_by(request, -speed),
    ]


def type_sets(cluster: Cluster, kinds: Index) -> list[Index]:
    """Return sets of device types that may be worth using without the others.

    Each type alone, and the fastest few: a slow type may hold the others up.

    Args:
        cluster: The machines.
        kinds: Indices of the types that there are. Shape [kinds].
    Returns:
        Indices of types, fewer than all; none of a single type.
    """
    every = np.unique(kinds)
    if len(every) < 2:
        return []
    speed = [max(one.peak_flops_per_s.values()) for one in cluster.device_types]
    fastest = every[np.argsort(-np.array(speed)[every], kind="stable")]
    alone = [every[at : at + 1] for at in range(len(every))]
    return [*alone, *(np.sort(fastest[:few]) for few in range(2, len(every)))]


def usable_counts(request: Request) -> tuple[Index, Index]:
    """Return numbers of devices that some mesh could use, and in how many ways.

    They are products of a pipeline degree, a divisor of the batch, one of the
    dimensions that tp splits and one of the sequence, or of the longest side of the
    samples, that cp splits: few enough to try one by one.

    Returns:
        The numbers, in order, and how many such products are each. Shapes [n].
    """
    facts, limit = request.facts, len(request.context.order)

    def divisors(number: int) -> Index:
        candidates = np.arange(1, min(number, limit) + 1, dtype=np.int64)
        return np.asarray(candidates[number % candidates == 0])

    dims = list(facts.tp_dims.values())
    found = np.arange(1, min(facts.num_units, limit) + 1, dtype=np.int64)
    ways = np.ones_like(found)
    factors = [divisors(facts.global_batch)]
    if facts.has_sharding:
        factors.append(divisors(math.gcd(*dims)) if dims else divisors(_ANY_TP))
    if facts.seq_len or facts.spatial:
        factors.append(divisors(facts.seq_len or max(facts.spatial_sizes, default=1)))
    for factor in factors:
        products = found[:, None] * factor
        kept = products <= limit
        found, which = np.unique(products[kept], return_inverse=True)
        ways = np.bincount(which, np.broadcast_to(ways[:, None], kept.shape)[kept])
    return found, ways.astype(np.int64)


def _reachable(request: Request) -> Index:
    """Return numbers of devices below all that some mesh could use, largest first."""
    found, _ = usable_counts(request)
    return found[found < len(request.context.order)][::-1]


def _has_legal(request: Request, count: int) -> bool:
    mesh = enumerate_meshes(request.facts, count, request.pins)
    # A few meshes of all kinds most often have rows; if not, all are looked at.
    few = mesh[:: max(1, len(mesh) // _FEW_MESHES)]
    if len(expand_meshes(few, request.facts, request.pins)):
        return True
    tables = enumerate_strategies(
        request.facts, num_devices=count, pins=request.pins, rows=50_000
    )
    return next(tables, None) is not None


def _fewer(request: Request) -> list[Index]:
    """Return the longest prefix of the order with a legal strategy."""
    for count in _reachable(request):
        if _has_legal(request, int(count)):
            return [request.context.order[:count]]
    return []


def _expressible(
    request: Request, limits: LauncherLimits, orders: list[Index]
) -> list[Index]:
    """Return the orders that a launcher can express, of fewer devices if necessary."""
    allowed, most = limits.allowed(orders), len(request.context.order)
    alike = limits.alike_hosts(request.context.order)
    if request.devices == "any":
        return [*allowed, *limits.allowed(alike)]
    if any(len(order) == most for order in allowed) and _has_legal(request, most):
        return allowed
    counts = {*_reachable(request).tolist(), *map(len, alike)}
    legal: dict[int, bool] = {}
    for count in sorted(counts, reverse=True):
        for devices in alike:
            first = devices[:count]
            if len(first) < count or not limits.allows_order(first):
                continue
            if count not in legal:
                legal[count] = _has_legal(request, count)
            if legal[count]:
                return [*(one for one in allowed if len(one) < most), first]
    return [one for one in allowed if len(one) < most]


def device_orders(request: Request) -> list[Index]:
    """Return the orders of devices that are worth a search of their own.

    A uniform cluster has one. If no legal strategy uses every device, because batch or
    heads do not divide, the largest number with a legal strategy is used. With
    ``devices="any"`` every smaller power of two is tried as well, and on small clusters
    every number.

    Returns:
        Device id by rank, for each order. Shapes [ranks].
    """
    order = request.context.order
    orders = [order] if request.context.cluster.is_uniform else _by_type(request)
    types = np.asarray(request.context.cluster.type_index)[order]
    orders += [
        order[np.isin(types, kinds)]
        for kinds in type_sets(request.context.cluster, types)
    ]
    if request.devices == "any":
        small = range(1, len(order)) if len(order) <= 64 else ()
        powers = [2**k for k in range(len(order).bit_length()) if 2**k < len(order)]
        orders += [order[:count] for count in sorted({*small, *powers}, reverse=True)]
    if request.launcher_limits is not None:
        orders = _expressible(request, request.launcher_limits, orders)
    elif request.devices == "all" and not _has_legal(request, len(order)):
        orders = [o for o in orders if len(o) < len(order)] + _fewer(request)
    unique = {tuple(o.tolist()): o for o in orders}
    return list(unique.values())
