"""Closed forms over a whole table of strategies: what prunes the space."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import Combinations, PricingContext
from planner.cost.kernels.roofline import copy_seconds, optimizer_seconds
from planner.cost.learning import learning_pricing
from planner.cost.offload import (
    OffloadRows,
    host_bytes,
    host_limit_bytes,
    moving_seconds,
    update_on_host_seconds,
)
from planner.cost.optimizer_states import matrix_seconds
from planner.cost.pipelines import RowTimes, pipeline_pricing
from planner.cost.replicas import ReplicaRows, replica_pricing
from planner.cost.result import PARTS, CostTable
from planner.cost.table.memory import RULES, chunks_in_flight, table_memory
from planner.cost.table.orders import Orders, Places
from planner.cost.table.ranks import KEPT
from planner.cost.table.rows import Columns, columns_of, number_rows
from planner.cost.table.stages import TIMES, Pairs, Summaries, summarize
from planner.cost.traffic.collectives import Groups, replica_groups
from planner.cost.units import price_units
from planner.schema.schedules import schedule_name
from planner.schema.strategy import plain_replicas
from planner.simulate import schedule_columns
from planner.space.regime import Regime
from planner.space.table import StrategyTable

__all__ = ["price_table"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


def _look_up(
    orders: Orders, table: StrategyTable, order: Index, places: Places
) -> tuple[Summaries, Index, Array]:
    """Sum up the table's distinct cuts.

    Returns:
        The cuts; which of them each row uses, [n]; and what a microbatch saves in the
        host's memory on the mean rank, [n].
    """
    synchronisation = orders.context.regime.synchronisation
    tp = np.asarray(synchronisation.ways(table.tp, table.dp_replicate))
    depth = None
    if synchronisation.of_blocks:
        blocks = int(orders.context.facts.residual_blocks.sum())
        depth = np.asarray(synchronisation.depth(table.dp_replicate, blocks))
    first, combo = number_rows(
        order,
        tp if depth is None else depth,
        tp,
        table.cp,
        table.ep,
        table.microbatch_size,
        table.sequence_parallel,
    )
    combos = Combinations(
        tp=tp[first],
        cp=table.cp[first],
        ep=table.ep[first],
        microbatch=table.microbatch_size[first],
        sequence_parallel=table.sequence_parallel[first],
        order=order[first] if len(orders.ids) > 1 else None,
        depth=None if depth is None else depth[first],
    )
    if combos.order is not None:
        # Orders that see the same links share the prices of units.
        first, which = orders.distinct(combos)
        combos, combo = combos.take(first), which[combo]
    costs = price_units(orders.context, combos, orders.layer_lines(combos))
    folded = schedule_columns("folded")[table.schedule, 0]
    # A place has one degree.
    rows, pair = number_rows(combo, places.which, table.virtual_stages, folded)
    pairs = Pairs(
        combo=combo[rows],
        pp=table.pp[rows],
        virtual=table.virtual_stages[rows],
        folded=folded[rows],
        place=places.which[rows],
        types=places.types,
        bandwidth=places.bandwidth,
        latency=places.latency,
        ranks=places.ranks,
    )
    offloaded = costs.offloaded_bytes.sum(axis=-1)[table.recompute, combo] / table.pp
    return summarize(costs, pairs), pair, offloaded


def _pipelines(
    rows: Columns, summaries: Summaries, contention: Array, regime: Regime
) -> RowTimes:
    """Times of pipelines, each row's by the pricing that its schedule names."""
    used = np.flatnonzero(np.bincount(rows.schedule))
    of = learning_pricing(regime.learning).of
    pricings = [
        of(pipeline_pricing(schedule_name(int(code)), regime.asynchrony))
        for code in used
    ]
    if all(pricing is pricings[0] for pricing in pricings):
        return pricings[0].rows(rows, summaries, contention)
    count = len(rows.pp)
    parts_s, seconds = np.zeros((len(PARTS), count)), np.empty((2, count))
    for pricing in dict.fromkeys(pricings):
        own = [one is pricing for one in pricings]
        mine = np.isin(rows.schedule, used[own])
        found = pricing.rows(
            Columns(*(column[mine] for column in rows)), summaries, contention
        )
        parts_s[:, mine] = found.parts_s
        seconds[:, mine] = found.forward_s, found.backward_s
    return RowTimes(parts_s=parts_s, forward_s=seconds[0], backward_s=seconds[1])


def _replicas(
    orders: Orders, table: StrategyTable, order: Index
) -> tuple[Groups, Groups]:
    """Devices that share a copy, and those that hold the same part of one."""
    sharded = table.zero_stage > 0
    ways = np.where(sharded, table.dp_shard * table.cp, 1)
    copies = np.where(sharded, table.dp_replicate, table.dp_replicate * table.cp)
    shard = orders.groups(ways, table.tp, order)
    return shard, orders.groups(copies, table.tp * ways, order)


def _near(orders: Orders, table: StrategyTable, order: Index) -> Groups | None:
    """Devices that share a second copy of the weights; None if there is none."""
    second = orders.context.regime.communication.shards.second_copy
    if second == 1:
        return None
    return orders.groups(np.full(len(order), second), table.tp, order)


def _replica_rows(
    orders: Orders,
    table: StrategyTable,
    rows: Columns,
    summaries: Summaries,
    times: RowTimes,
) -> ReplicaRows:
    """Describe the copies of each row on its first rank."""
    context, memory = orders.context, summaries.memory
    names = ("dense", "expert", "trained_dense", "trained_experts", "tensors")
    dense, expert, trained, trained_experts, tensors = (
        memory.kept[:, 0, KEPT.index(name)] for name in names
    )
    shards = rows.dp_shard * rows.cp
    whole = plain_replicas(rows.pp, table.tp, rows.zero_stage, shards)
    return ReplicaRows(
        scalars=(dense + expert)[rows.pair],
        trained=(trained + trained_experts)[rows.pair],
        experts=expert[rows.pair],
        trained_experts=trained_experts[rows.pair],
        ep=rows.ep,
        tp=rows.tp,
        units=np.maximum(1.0, len(context.graph.units) / rows.pp),
        zero_stage=rows.zero_stage,
        shards=np.where(rows.zero_stage > 0, rows.dp_shard * rows.cp, 1),
        copies=table.dp_replicate * np.where(rows.zero_stage > 0, 1, rows.cp),
        pp=rows.pp,
        num_microbatches=rows.num_microbatches,
        virtual_stages=rows.virtual_stages,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        whole=whole & (table.dp_replicate * rows.cp > 1),
        compression=context.regime.gradient_compression,
        tensors=tensors[rows.pair],
        hooks_s=summaries.whole[rows.pair, TIMES.hooks],
    )


def _replica_seconds(
    orders: Orders,
    replicas: tuple[Groups, Groups, Groups | None],
    places: Places,
    rows: Columns,
    owed: ReplicaRows,
    summaries: Summaries,
) -> Array:
    """Exposed seconds of data parallelism on the first rank. Shape [n]."""
    context, memory = orders.context, summaries.memory
    shard, replicate, near = replicas
    groups = replica_groups(
        shard,
        replicate,
        context.recipe,
        measured=context.cluster.document.collectives,
        on_gpu=context.on_gpu,
        core_wait_s=places.wait_s[rows.place],
        sum_share=context.sum_share,
        near=near,
    )
    pricing = replica_pricing(context.regime.synchronisation)
    exposed = pricing.seconds(owed, groups, context)
    if not memory.tied.any():
        return exposed
    ways = np.where(rows.zero_stage > 0, rows.dp_shard * rows.cp, 1)
    size = context.scalar_bytes.stored / ways
    payload, sums = memory.tied[rows.pair].T
    fixed, per_byte = orders.pair_lines(places)[rows.place].T
    return np.asarray(exposed + fixed * sums + per_byte * payload * size)


def _update_seconds(
    context: PricingContext,
    rows: Columns,
    places: Places,
    shards: Array,
    tensors: Array,
) -> Array:
    """Seconds of a step's updates on the first rank. Shape [n].

    Args:
        context: The request.
        rows: The table.
        places: Where they are.
        shards: Trained scalars of that rank. Shape [n].
        tensors: Tensors they are in. Shape [n].
    """
    types, devices = places.slowest[rows.place], context.cluster.device_types
    if context.regime.offload.states != "none" and context.on_gpu:
        clip = context.grad_clip_norm is not None
        seconds = update_on_host_seconds(shards, context, clip=clip)
        return np.asarray(seconds * places.core_contention[rows.place, 1])
    update = optimizer_seconds(
        shards,
        tensors,
        types,
        devices,
        context.optimizer,
        clip=context.grad_clip_norm is not None,
    )
    ways = rows.tp * np.where(rows.zero_stage > 0, rows.dp_shard * rows.cp, 1)
    update += matrix_seconds(shards * ways, types, context)
    asynchrony = context.regime.asynchrony
    if asynchrony.update_interval:
        # Weights that microbatches under way began with are left to them.
        update += copy_seconds(shards * context.scalar_bytes.stored, types, devices)
    update *= asynchrony.updates(rows.num_microbatches)
    return np.asarray(update * places.core_contention[rows.place, 1])


def _offloaded(
    rows: Columns, owed: ReplicaRows, trained: Array, saved_bytes: Array
) -> OffloadRows:
    """Describe what lies in the host's memory for a device of the first rank.

    Args:
        rows: The table.
        owed: Copies of the same rank.
        trained: Its trained scalars. Shape [n].
        saved_bytes: Saved by a microbatch. Shape [n].
    """
    ways = np.where(rows.zero_stage > 0, rows.dp_shard * rows.cp, 1)
    rules = schedule_columns(*RULES)
    columns = (rows.schedule, rows.pp, rows.virtual_stages, rows.num_microbatches)
    flying = [
        chunks_in_flight(rules, int(code), int(pp), int(virtual), int(many), 0)
        / int(virtual)
        for code, pp, virtual, many in zip(*columns, strict=True)
    ]
    frozen = np.maximum(owed.scalars - owed.trained, 0.0) / ways
    return OffloadRows(
        shards=trained + frozen,
        trained=trained,
        saved_bytes=saved_bytes,
        in_flight=np.array(flying),
        zero_stage=rows.zero_stage,
        num_microbatches=rows.num_microbatches,
        forward_s=np.asarray(owed.forward_s),
        backward_s=np.asarray(owed.backward_s),
    )


def price_table(
    context: PricingContext,
    table: StrategyTable,
    orders: Orders | None = None,
    order: Index | None = None,
) -> CostTable:
    """Time and memory of every row, in a few compiled passes.

    Args:
        context: The request.
        table: Legal rows; each must use as many devices as its order has.
        orders: Orders of devices; None for the context's own.
        order: Which of them each row is priced under; None for the first. Shape [n].
    """
    orders = orders or Orders.of(context)
    if order is None:
        order = np.zeros(len(table), dtype=np.int64)
    if not len(table):
        return CostTable(
            step_time_s=np.zeros(0),
            parts_s=np.zeros((0, len(PARTS))),
            memory_bytes=np.zeros(0),
            excess_bytes=np.zeros(0),
        )
    places = orders.places(order, table.pp)
    summaries, pair, offloaded = _look_up(orders, table, order, places)
    rows = columns_of(table, pair, places.which)
    regime = context.regime
    memory = table_memory(
        rows,
        summaries.memory,
        places.ranks,
        places.limits,
        context.scalar_bytes,
        regime.asynchrony.update_interval,
        sums=not regime.synchronisation.between_steps,
    )
    times = _pipelines(rows, summaries, places.core_contention, regime)
    tensors = summaries.memory.kept[pair, 0, KEPT.index("tensors")]
    parts = times.parts_s
    replicas = (*_replicas(orders, table, order), _near(orders, table, order))
    owed = _replica_rows(orders, table, rows, summaries, times)
    parts[PARTS.index("data_parallel")] = _replica_seconds(
        orders, replicas, places, rows, owed, summaries
    )
    trained = memory.parameter_shards
    parts[PARTS.index("optimizer")] = _update_seconds(
        context, rows, places, trained, tensors
    )
    excess = memory.excess_bytes
    if regime.offload:
        there = _offloaded(rows, owed, trained, offloaded)
        parts[PARTS.index("optimizer")] += moving_seconds(there, context)
        lying = host_bytes(there, context)
        # Of CPU processes it is the same memory.
        excess = excess if context.on_gpu else excess + lying
        excess = np.maximum(excess, lying - host_limit_bytes(context))
    # Held beside that of the fullest rank, as much on any.
    kept = replica_pricing(context.regime.synchronisation).held(owed, context).total
    return CostTable(
        step_time_s=parts.sum(axis=0),
        parts_s=parts.T,
        memory_bytes=memory.memory_bytes + kept,
        excess_bytes=excess + kept,
        efficiency=context.regime.efficiency or 1.0,
    )
