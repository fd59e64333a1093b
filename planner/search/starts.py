"""Where searches over orders and rows begin."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.search.base import Request
from planner.search.campaign import Campaign
from planner.search.ladder import ladder
from planner.search.layouts import base_orders, grid_orders, pools, tour_order
from planner.search.moves import Row, Solution
from planner.space import StrategyTable, enumerate_strategies, legal
from planner.units import dtype_bytes

__all__ = ["begin"]

Index = NDArray[np.int64]

#: Rows of a pool that are tried under several orders; of one mesh at most so many.
_ROWS, _PER_MESH = 48, 2
#: Rows with a pipeline for which DT-FM divides the devices, and how long it tries.
_TOURS, _TRIALS = 3, 36
#: Solutions priced at once.
_BATCH = 400
#: Rows priced at once, without a clock and between two looks at one.
_ROWS_AT_ONCE, _ROWS_TIMED = 100_000, 25_000
#: Shares of the time after which beginning stops, part by part.
_LOOKED, _LAID, _TOURED = 0.2, 0.35, 0.5
#: Pools that are looked into: with any number of devices there may be very many.
_POOLS = 24


def begin(campaign: Campaign) -> None:
    """Price what is worth starting from.

    Rules of thumb; the best rows of the whole space by closed forms; those rows with
    their grids laid over neighbouring devices in every way; the best of them with
    devices divided by DT-FM's search.
    Tells the campaign which devices may be left out.
    """
    request = campaign.request
    started: list[tuple[list[Index], list[Row]]] = []
    for pool in pools(request)[:_POOLS]:
        if started and campaign.is_late(_LOOKED):
            break
        orders = base_orders(request.setting.cluster, pool)
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
            campaign.leave_out(pool.devices, pool.count)
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


def _rules_of_thumb(request: Request, count: int) -> list[Row]:
    table = ladder(request, count)
    if table is None:
        return []
    table = table[np.flatnonzero(legal(table, request.facts))]
    return [table.row(index) for index in range(min(len(table), _ROWS))]


def _best_rows(campaign: Campaign, order: Index, count: int) -> list[Row]:
    """The best of the whole space, few of one mesh; then the closest misses."""
    request = campaign.request
    model = CostModel(request.setting.reordered(order))
    tables: list[StrategyTable] = []
    scores: list[NDArray[np.float64]] = []
    for table in _tables(campaign, count):
        costs = model.table(table)
        value = campaign.objective(
            costs.step_time_s, costs.memory_bytes, table.num_devices
        )
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
    """The whole space; if time is short, first a little of every mesh."""
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
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    mesh = np.stack([getattr(table, axis) for axis in axes], axis=1)
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
    """The best with more than one stage, one of a mesh."""
    seen: set[tuple[int, ...]] = set()
    for one in campaign.best(400):
        if one.row["pp"] > 1 and one.mesh not in seen:
            seen.add(one.mesh)
            yield one
        if len(seen) == _TOURS:
            return


def _stage_weights(campaign: Campaign, start: Solution) -> tuple[float, float, float]:
    """Bytes of a stage's gradients, bytes sent on, seconds lost by mixing types."""
    setting, row = campaign.request.setting, start.row
    costs = CostModel(setting.reordered(start.order)).unit_costs(
        tp=row["tp"],
        cp=row["cp"],
        ep=row["ep"],
        microbatch=row["microbatch_size"],
        sequence_parallel=bool(row["sequence_parallel"]),
    )
    scalars = float((costs.trained_dense + costs.trained_experts).sum()) / row["pp"]
    sent = float(costs.sent_bytes.mean()) if costs.sent_bytes.size else 0.0
    many = row["num_microbatches"]
    kinds = np.unique(np.asarray(setting.cluster.type_index)[start.order])
    work = (costs.forward_s + costs.backward_s)[kinds, 0].sum(axis=1)
    lost = float(work.max() - work.min()) * many / row["pp"]
    return scalars * dtype_bytes(setting.precision.reduce), sent * many, lost
