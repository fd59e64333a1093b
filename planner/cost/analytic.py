"""Closed forms over a whole table of strategies: what prunes the space."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.collectives import Groups
from planner.cost.columns import Columns, columns_of
from planner.cost.data_parallel import exposed_seconds, optimizer_seconds
from planner.cost.fullest import fullest_ranks
from planner.cost.numbering import number_rows
from planner.cost.rank_memory import KEPT
from planner.cost.result import PARTS, CostTable
from planner.cost.row_times import RowTimes, row_times
from planner.cost.setting import Setting
from planner.cost.summaries import Pairs, Summaries, summarize
from planner.cost.tied import tied_seconds
from planner.cost.unit_costs import Combinations, price_units
from planner.schema import SCHEDULES, V_SCHEDULES
from planner.space.table import StrategyTable
from planner.units import dtype_bytes

__all__ = ["analytic_costs"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

_FOLDED = np.array([name in V_SCHEDULES for name in SCHEDULES], dtype=np.int64)


def _look_up(setting: Setting, table: StrategyTable) -> tuple[Summaries, Index]:
    """Sum up the table's distinct cuts; and which of them each row uses. [n]."""
    first, combo = number_rows(
        table.tp, table.cp, table.ep, table.microbatch_size, table.sequence_parallel
    )
    combos = Combinations(
        tp=table.tp[first],
        cp=table.cp[first],
        ep=table.ep[first],
        microbatch=table.microbatch_size[first],
        sequence_parallel=table.sequence_parallel[first],
    )
    rows, pair = number_rows(
        combo, table.pp, table.virtual_stages, _FOLDED[table.schedule]
    )
    degrees, degree = np.unique(table.pp[rows], return_inverse=True)
    most = int(degrees[-1])
    types = np.zeros((len(degrees), most), dtype=np.int64)
    bandwidth = np.full((len(degrees), most), np.inf)
    latency = np.zeros((len(degrees), most))
    for row, pp in enumerate(degrees.tolist()):
        of_ranks = setting.types_of_ranks(pp)
        types[row, :pp], types[row, pp:] = of_ranks, of_ranks[0]
        bandwidth[row, :pp], latency[row, :pp] = setting.boundaries(pp)
    pairs = Pairs(
        combo=combo[rows],
        pp=table.pp[rows],
        virtual=table.virtual_stages[rows],
        folded=_FOLDED[table.schedule[rows]],
        degree=degree.reshape(-1),
        types=types,
        bandwidth=bandwidth,
        latency=latency,
    )
    return summarize(price_units(setting, combos), pairs), pair


def _by_pp(setting: Setting, rows: Columns) -> tuple[Array, Array]:
    """Crowding, and limits of ranks 0, 1 and last, in the row of their pp.

    Returns:
        Shapes [most pp + 1, 2] and [most pp + 1, 3].
    """
    present = np.flatnonzero(np.bincount(rows.pp))
    crowding = np.ones((int(present[-1]) + 1, 2))
    limits = np.zeros((len(crowding), 3))
    for pp in present.tolist():
        crowding[pp] = setting.crowding(pp)
        limits[pp] = setting.limits_of_ranks(pp)[[0, min(1, pp - 1), pp - 1]]
    return crowding, limits


def _replicas(setting: Setting, table: StrategyTable) -> tuple[Groups, Groups]:
    """Devices that share a copy, and those that hold the same part of one."""
    sharded = table.zero_stage > 0
    ways = np.where(sharded, table.dp_shard * table.cp, 1)
    copies = np.where(sharded, table.dp_replicate, table.dp_replicate * table.cp)
    return setting.groups(ways, table.tp), setting.groups(copies, table.tp * ways)


def _replica_seconds(
    setting: Setting,
    table: StrategyTable,
    rows: Columns,
    summaries: Summaries,
    times: RowTimes,
) -> Array:
    """Exposed seconds of data parallelism on the first rank. Shape [n]."""
    shard, replicate = _replicas(setting, table)
    memory = summaries.memory
    dense, expert, trained, trained_experts = (
        memory.kept[:, 0, KEPT.index(name)]
        for name in ("dense", "expert", "trained_dense", "trained_experts")
    )
    exposed = exposed_seconds(
        scalars=(dense + expert)[rows.pair],
        trained=(trained + trained_experts)[rows.pair],
        units=np.maximum(1.0, len(setting.graph.units) / rows.pp),
        zero_stage=rows.zero_stage,
        pp=rows.pp,
        num_microbatches=rows.num_microbatches,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        shard=shard,
        replicate=replicate,
        precision=setting.precision,
        recipe=setting.recipe,
        measured=setting.cluster.document.collectives,
        on_gpu=setting.on_gpu,
        core_wait_s=setting.core_wait_s,
    )
    if not memory.tied.any():
        return exposed
    ways = np.where(rows.zero_stage > 0, rows.dp_shard * rows.cp, 1)
    size = dtype_bytes(setting.precision.parameter) / ways
    payload, sums = memory.tied[rows.pair].T
    return exposed + tied_seconds(setting, rows.pp, payload * size, sums)


def analytic_costs(setting: Setting, table: StrategyTable) -> CostTable:
    """Time and memory of every row, in a few compiled passes.

    Args:
        setting: The request; every row must use ``len(setting.order)`` devices.
        table: Legal rows.
    """
    if not len(table):
        return CostTable(
            step_time_s=np.zeros(0),
            parts_s=np.zeros((0, len(PARTS))),
            memory_bytes=np.zeros(0),
            excess_bytes=np.zeros(0),
        )
    summaries, pair = _look_up(setting, table)
    rows = columns_of(table, pair)
    crowding, limits = _by_pp(setting, rows)
    memory = fullest_ranks(
        rows,
        summaries.memory,
        limits,
        precision=setting.precision,
        optimizer=setting.optimizer,
        recipe=setting.recipe,
        on_gpu=setting.on_gpu,
    )
    times = row_times(rows, summaries, crowding)
    update = optimizer_seconds(
        memory.owned,
        summaries.memory.kept[pair, 0, KEPT.index("tensors")],
        setting.slowest_device,
        setting.optimizer,
        clip=setting.grad_clip_norm is not None,
    )
    parts = times.parts_s
    parts[PARTS.index("data_parallel")] = _replica_seconds(
        setting, table, rows, summaries, times
    )
    parts[PARTS.index("optimizer")] = update * crowding[rows.pp, 1]
    return CostTable(
        step_time_s=parts.sum(axis=0),
        parts_s=parts.T,
        memory_bytes=memory.memory_bytes,
        excess_bytes=memory.excess_bytes,
    )
