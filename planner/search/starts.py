"""Solutions from which searches over orders and rows begin."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.cluster.topology import HierarchicalTopology
from planner.cost import CostModel
from planner.search.base import Request, scores_of
from planner.search.campaign import Campaign
from planner.search.dtfm import memetic_search
from planner.search.dtfm.partitioner import communication_between, stage_bytes
from planner.search.expert import ladder
from planner.search.moves import Row, Solution
from planner.search.orders import device_orders
from planner.space import MESH_COLUMNS, StrategyTable, enumerate_strategies, legal

__all__ = [
    "Pool",
    "base_orders",
    "begin",
    "grid_orders",
    "lay",
    "near_order",
    "pools",
    "tour_order",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Rows of a pool that are tried under several orders, and most with one mesh.
_ROWS, _PER_MESH = 48, 2
#: Rows with a pipeline for which DT-FM divides the devices, and its trials for each.
_TOURS, _TRIALS = 3, 36
#: Solutions of a race that are laid over the devices in every way.
_LAID_ROWS = 64
#: Solutions priced at once: ranks of all together, at most and at least so many.
_RANKS, _BATCH, _LEAST = 800_000, 400, 16
#: Rows priced at once without a time budget, and with one.
_ROWS_AT_ONCE, _ROWS_TIMED = 100_000, 25_000
#: Shares of the time budget after which the parts of :func:`begin` end: pricing rows,
#: laying grids over devices, searching tours.
_LOOKED, _LAID, _TOURED = 0.2, 0.35, 0.5
#: Pools that are searched: with any number of devices there may be very many.
_POOLS = 24
#: Size of the message by which links are compared: latency and bandwidth both count.
_MESSAGE_BYTES = 1e7
#: Most devices for a comparison of all links, and most where switches join hosts in
#: the order of their numbers.
_MOST_PAIRED, _MOST_SWITCHED = 2048, 1024
#: Most pieces for which the memetic search is fast enough.
_MOST_PIECES = 128


def begin(campaign: Campaign) -> None:
    """Price the solutions to start from.

    Rules of thumb; the best rows of the whole space by closed forms; those rows with
    their grids laid over neighbouring devices in every way; the best of them with
    devices divided by DT-FM's search. The campaign learns which devices may be left
    out.
    """
    request = campaign.request
    started: list[tuple[list[Index], list[Row]]] = []
    for pool in pools(request)[:_POOLS]:
        if started and campaign.is_late(_LOOKED):
            break
        orders = base_orders(request.context.cluster, pool)
        rows = _rules_of_thumb(request, pool.count)
        campaign.price([Solution(order=orders[0], row=row) for row in rows])
        rows += _best_rows(campaign, orders[0], pool.count)
        campaign.price([Solution(order=orders[0], row=row) for row in rows])
        if not rows:
            continue
        if not started:
            campaign.simulate_best(2)
        started.append((orders, rows))
        if pool.count < len(pool.devices):
            campaign.allow_choice(pool.devices, pool.count)
    laid = (
        Solution(order=made, row=row)
        for orders, rows in started
        for row in rows
        for base in orders
        for made in grid_orders(base, row)
    )
    while not campaign.is_late(_LAID) and (batch := list(islice(laid, _BATCH))):
        campaign.price(batch)
    _tours(campaign)


def lay(campaign: Campaign) -> Iterator[None]:
    """Lay the best solutions of a campaign over neighbouring devices in every way.

    The campaign learns which devices may be left out. Yields after each batch and each
    tour of DT-FM's search. Where nothing is known, rules of thumb are priced first.
    """
    request = campaign.request
    there = pools(request)[:_POOLS]
    bases: dict[int, list[Index]] = {}
    for pool in there:
        if pool.count < len(pool.devices):
            campaign.allow_choice(pool.devices, pool.count)
        orders = base_orders(request.context.cluster, pool)
        bases.setdefault(pool.count, []).extend(orders)
        if not campaign.best(1):
            rows = _rules_of_thumb(request, pool.count)
            campaign.price([Solution(order=orders[0], row=row) for row in rows])
    yield
    laid = (
        Solution(order=made, row=one.row)
        for one in campaign.best(_LAID_ROWS)
        for base in [one.order, *bases.get(len(one.order), [])]
        for made in grid_orders(base, one.row)
    )
    longest = max((pool.count for pool in there), default=1)
    size = min(_BATCH, max(_LEAST, _RANKS // longest))
    while batch := list(islice(laid, size)):
        campaign.price(batch)
        yield
    for start in _pipelines(campaign):
        _tour(campaign, start)
        yield


def _rules_of_thumb(request: Request, count: int) -> list[Row]:
    table = ladder(request, count)
    if table is None:
        return []
    table = table[np.flatnonzero(legal(table, request.facts))]
    return [table.row(index) for index in range(min(len(table), _ROWS))]


def _best_rows(campaign: Campaign, order: Index, count: int) -> list[Row]:
    """Return the best rows of the whole space, few with one mesh."""
    request = campaign.request
    model = CostModel(request.context.reordered(order))
    tables: list[StrategyTable] = []
    scores: list[NDArray[np.float64]] = []
    for table in _tables(campaign, count):
        costs = model.table(table)
        value = scores_of(costs, table, request.objective, fitting=False)
        value = np.where(costs.fits, value, 1e12 + np.maximum(costs.excess_bytes, 0))
        kept = _few_of_a_mesh(table, value)
        tables.append(table[kept])
        scores.append(value[kept])
    campaign.count(model)
    if not tables:
        return []
    joined = StrategyTable.concatenate(tables)
    kept = _few_of_a_mesh(joined, np.concatenate(scores))
    return [joined.row(index) for index in kept.tolist()]


def _tables(campaign: Campaign, count: int) -> Iterator[StrategyTable]:
    """Yield the whole space; if time is short, first a few rows of every mesh."""
    request, pins = campaign.request, campaign.request.pins
    found = False
    timed = request.time_budget_s is not None
    rows = _ROWS_TIMED if timed else _ROWS_AT_ONCE
    for recompute in (0, 2) if timed else ():
        few = {"recompute": recompute, "virtual_stages": 1, **pins}
        for table in enumerate_strategies(
            request.facts, num_devices=count, pins=few, rows=rows
        ):
            found = True
            yield table
            if campaign.is_late(_LOOKED):
                break
    if found and campaign.is_late(_LOOKED / 2):
        return
    for table in enumerate_strategies(
        request.facts, num_devices=count, pins=pins, rows=rows
    ):
        yield table
        if campaign.is_late(_LOOKED):
            return


def _few_of_a_mesh(table: StrategyTable, value: NDArray[np.float64]) -> Index:
    taken: dict[tuple[int, ...], int] = {}
    rows: list[int] = []
    mesh = np.stack([getattr(table, name) for name in MESH_COLUMNS], axis=1)
    seen: set[tuple[int, ...]] = set()
    for row in np.argsort(value, kind="stable").tolist():
        key = tuple(mesh[row].tolist())
        if taken.get(key, 0) == _PER_MESH:
            continue
        whole = tuple(table.row(row).values())
        if whole not in seen:
            seen.add(whole)
            taken[key] = taken.get(key, 0) + 1
            rows.append(row)
        if len(rows) == _ROWS:
            break
    return np.array(rows, dtype=np.int64)


def _tours(campaign: Campaign) -> None:
    for start in _pipelines(campaign):
        if campaign.is_late(_TOURED):
            return
        _tour(campaign, start)


def _tour(campaign: Campaign, start: Solution) -> None:
    """Price a pipeline with its devices divided by DT-FM's search."""
    row = start.row
    weights = _stage_weights(campaign, start)
    made = tour_order(
        campaign.request,
        start.order,
        row,
        dp_bytes=weights[0],
        pp_bytes=weights[1],
        mixing_s=weights[2],
        trials=_TRIALS,
        rng=campaign.rng,
    )
    if made is not None:
        campaign.price([Solution(order=made, row=row)])


def _pipelines(campaign: Campaign) -> Iterator[Solution]:
    """Yield the best solutions with more than one stage, one for each mesh."""
    seen: set[tuple[int, ...]] = set()
    for one in campaign.best(400):
        if one.row["pp"] > 1 and one.mesh not in seen:
            seen.add(one.mesh)
            yield one
        if len(seen) == _TOURS:
            return


def _stage_weights(campaign: Campaign, start: Solution) -> tuple[float, float, float]:
    """Return a stage's gradient bytes, bytes sent on, seconds lost by mixed types."""
    context, row = campaign.request.context, start.row
    model = CostModel(context.reordered(start.order))
    costs = model.unit_costs(
        tp=row["tp"],
        cp=row["cp"],
        ep=row["ep"],
        microbatch=row["microbatch_size"],
        sequence_parallel=bool(row["sequence_parallel"]),
    )
    kinds = np.unique(np.asarray(context.cluster.type_index)[start.order])
    work = (costs.forward_s + costs.backward_s)[kinds, 0].sum(axis=1)
    lost = float(work.max() - work.min()) * row["num_microbatches"] / row["pp"]
    return *stage_bytes(model, row), lost


# -- Orders of devices to begin with ---------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Devices to choose from, and the number that is used.

    Attributes:
        devices: Ids of the devices. Shape [at least count].
        count: Number of devices that are used.
        orders: Orders of the exhaustive search. Shapes [count].
    """

    devices: Index
    count: int
    orders: tuple[Index, ...]


def pools(request: Request) -> list[Pool]:
    """Return sets of devices to choose from: the most, single types, round numbers.

    The numbers are those of :func:`planner.search.orders.device_orders`: all free
    devices if any legal strategy uses them, or all of one type; with
    ``devices="any"``, or if the number does not divide, fewer of all.
    """
    free = request.context.order
    kinds = np.asarray(request.context.cluster.type_index)
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
    """Sort devices so that those with fast links are side by side.

    It is the order in which Prim's algorithm reaches them: a site is left only when all
    of it is reached.
    """
    numbered = isinstance(cluster.topology, HierarchicalTopology)
    if len(pool) > (_MOST_SWITCHED if numbered else _MOST_PAIRED):
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
    """Return the seconds of one message between any two devices. Shape [n, n]."""
    bandwidth, latency = cluster.topology.links(pool[:, None], pool[None, :])
    return np.asarray(latency + _MESSAGE_BYTES / bandwidth)


def base_orders(cluster: Cluster, pool: Pool) -> list[Index]:
    """Return orders of a pool's devices, each once.

    The pool's own; neighbours side by side; neighbours side by side within each type.
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
    """Yield every way of laying stages, replicas and shards over neighbouring devices.

    The first axis of a way varies slowest along ``base``: stages first puts each stage
    on neighbours, stages last puts each pipeline on neighbours. Ranks that share a
    layer stay together.

    Args:
        base: Device id of each place. Shape [ranks].
        row: A row with as many ranks.
    Yields:
        Device id of each rank; equal orders once.
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
    """Order devices by the memetic search of DT-FM, on the real links.

    Args:
        request: The question, with its machines.
        base: Device id of each place; neighbouring places stay together if there are
            more devices than the search can take. Shape [ranks].
        row: A row; the stages of its pipeline are the groups.
        dp_bytes: Bytes of the gradients of one stage.
        pp_bytes: Bytes that a device sends on in a step.
        mixing_s: Seconds that a stage loses if its devices are of different types.
        trials: Divisions to price.
        rng: Generator of all random draws.
    Returns:
        Device id of each rank; None if there is nothing to divide.
    """
    stage = len(base) // row["pp"]
    size = row["tp"] * row["cp"]
    while len(base) // size > _MOST_PIECES and size < stage:
        size = next(m for m in range(size + 1, stage + 1) if _fits(m, size, stage))
    count = len(base) // size
    if row["pp"] < 2 or stage == size or count > _MOST_PIECES:
        return None
    pieces = base.reshape(count, size)
    made = communication_between(
        request, pieces, dp_bytes=dp_bytes, pp_bytes=pp_bytes, groups=row["pp"]
    )
    kinds = np.asarray(request.context.cluster.type_index)[pieces[:, 0]]
    mixed = kinds[:, None] != kinds[None, :]
    made.dp_s[mixed] += mixing_s / max(stage // size - 1, 1)
    # It starts from neighbours in one stage, and from neighbours in one pipeline.
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
