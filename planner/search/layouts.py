"""Orders of devices to begin with: neighbours side by side, grids laid over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.search.base import Request
from planner.search.dtfm import Communication, memetic_search
from planner.search.moves import Row
from planner.search.orders import device_orders

__all__ = ["Pool", "base_orders", "grid_orders", "near_order", "pools", "tour_order"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Bytes by which links are compared: where latency and bandwidth both count.
_MESSAGE_BYTES = 1e7
#: Devices up to which all pairs of links are looked at.
_MOST_PAIRED = 2048
#: Pieces up to which the memetic search is fast enough to be worth its time.
_MOST_PIECES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Devices to choose from.

    Attributes:
        devices: Their ids. Shape [at least count].
        count: How many are used.
        orders: Orders that others would try. Shapes [count].
    """

    devices: Index
    count: int
    orders: tuple[Index, ...]


def pools(request: Request) -> list[Pool]:
    """Return sets of devices to choose from: the most, single types, round numbers.

    As :func:`planner.search.orders.device_orders`: all free devices if any legal
    strategy uses them, or all of one type; with ``devices="any"``, or where the number
    does not divide, so many of all.
    """
    free = request.setting.order
    kinds = np.asarray(request.setting.cluster.type_index)
    found: dict[tuple[bytes, int], tuple[Index, list[Index]]] = {}
    for order in device_orders(request):
        of_types = free[np.isin(kinds[free], kinds[order])]
        whole = request.devices == "all" and len(order) == len(of_types)
        devices = of_types if whole else free
        key = (devices.tobytes(), len(order))
        found.setdefault(key, (devices, []))[1].append(order)
    made = [
        Pool(devices=devices, count=count, orders=tuple(orders))
        for (_, count), (devices, orders) in found.items()
    ]
    most = max((pool.count for pool in made), default=0)
    sizes = set(np.bincount(kinds[free]).tolist())

    def promise(pool: Pool) -> tuple[bool, bool, int]:
        rest = pool.count not in sizes
        return pool.count < most, rest, -(pool.count & -pool.count)

    return sorted(made, key=promise)


def near_order(cluster: Cluster, pool: Index) -> Index:
    """Devices such that those with fast links are side by side.

    In the order in which Prim's algorithm reaches them: it leaves a site only when all
    of the site is reached.
    """
    if len(pool) > _MOST_PAIRED:
        return pool
    apart = _apart(cluster, pool)
    reach, here = apart[0].copy(), 0
    made = [0]
    left = np.ones(len(pool), dtype=bool)
    left[0] = False
    for _ in range(len(pool) - 1):
        here = int(np.where(left, reach, np.inf).argmin())
        left[here] = False
        made.append(here)
        np.minimum(reach, apart[here], out=reach)
    return np.asarray(pool[made])


def _apart(cluster: Cluster, pool: Index) -> Array:
    """Seconds of one message between any two devices. Shape [n, n]."""
    bandwidth, latency = cluster.topology.links(pool[:, None], pool[None, :])
    return np.asarray(latency + _MESSAGE_BYTES / bandwidth)


def base_orders(cluster: Cluster, pool: Pool) -> list[Index]:
    """Orders of a pool's devices, each once.

    Its own; neighbours side by side; and neighbours side by side within each type.
    """
    near = near_order(cluster, pool.devices)
    kinds = np.asarray(cluster.type_index)
    types = cluster.device_types
    speed = np.array([max(kind.peak_flops_per_s.values()) for kind in types])[kinds]
    memory = np.array([kind.memory_bytes for kind in types])[kinds]
    sorted_by = [
        near[np.argsort(value[near], kind="stable")][: pool.count]
        for value in (np.zeros(len(kinds)), -speed, speed, -memory)
    ]
    found = [np.ascontiguousarray(order) for order in (*pool.orders, *sorted_by)]
    unique = {order.tobytes(): order for order in found}
    return list(unique.values())


def grid_orders(base: Index, row: Row) -> Iterator[Index]:
    """Each way of laying stages, copies and shards over neighbouring devices.

    The first axis of a way varies slowest along ``base``: stages first puts each stage
    on neighbours, stages last puts each pipeline on neighbours. What shares a layer
    stays together.

    Args:
        base: Device id of each place. Shape [ranks].
        row: Degrees multiply to the ranks.
    Yields:
        Device id of each rank; ways that come to the same are yielded once.
    """
    inner = row["tp"] * row["cp"]
    degrees = (row["pp"], row["dp_replicate"], row["dp_shard"])
    seen = set()
    for axes in itertools.permutations(range(3)):
        long = tuple(axis for axis in axes if degrees[axis] > 1)
        if long in seen:
            continue
        seen.add(long)
        blocks = base.reshape(*(degrees[axis] for axis in axes), inner)
        back = np.argsort(axes)
        yield np.ascontiguousarray(blocks.transpose(*back, 3).reshape(-1))


def tour_order(
    request: Request,
    base: Index,
    row: Row,
    *,
    dp_bytes: float,
    pp_bytes: float,
    mixing_s: float,
    trials: int,
    rng: np.random.Generator,
) -> Index | None:
    """Devices by the memetic search of DT-FM, on the real links.

    Args:
        request: Names the machines.
        base: Neighbouring places stay together where there are more devices than the
            search can take. Shape [ranks].
        row: Its pipeline gives the groups.
        dp_bytes: Of the gradients of one stage.
        pp_bytes: That a device sends on in a step.
        mixing_s: What a stage loses if its devices are of different types.
        trials: Divisions to price.
        rng: Of everything random.
    Returns:
        None where there is nothing to divide.
    """
    stage = len(base) // row["pp"]
    size = row["tp"] * row["cp"]
    while len(base) // size > _MOST_PIECES and size < stage:
        size = next(m for m in range(size + 1, stage + 1) if _fits(m, size, stage))
    count = len(base) // size
    if row["pp"] < 2 or stage == size or count > _MOST_PIECES:
        return None
    pieces = base.reshape(count, size)
    cluster = request.setting.cluster
    links = cluster.topology.links(pieces[:, None, :], pieces[None, :, :])
    made = Communication.between(
        np.where(np.isinf(links[0]), 1e30, links[0]).min(axis=-1),
        links[1].max(axis=-1),
        dp_bytes=dp_bytes,
        pp_bytes=pp_bytes,
        groups=row["pp"],
    )
    kinds = np.asarray(cluster.type_index)[pieces[:, 0]]
    mixed = kinds[:, None] != kinds[None, :]
    made.dp_s[mixed] += mixing_s / max(stage // size - 1, 1)
    # Not from nowhere: neighbours in one stage, and neighbours in one pipeline.
    groups = np.repeat(np.arange(row["pp"]), count // row["pp"])
    initial = np.stack([groups, np.tile(np.arange(row["pp"]), count // row["pp"])])
    population = max(4, trials // 5)
    found = memetic_search(
        made,
        population=population,
        offspring=trials - population,
        seed=rng,
        initial=initial,
    )
    return np.ascontiguousarray(pieces[found.best.grid.reshape(-1)].reshape(-1))


def _fits(size: int, inner: int, stage: int) -> bool:
    return stage % size == 0 and size % inner == 0
