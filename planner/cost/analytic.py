"""Closed forms over a whole table of strategies: what prunes the space."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.data_parallel import optimizer_seconds, replica_traffic
from planner.cost.memory import chunks_in_flight, memory_parts
from planner.cost.result import PARTS, CostTable
from planner.cost.setting import Setting
from planner.cost.summaries import KEPT, PEAKS, TIMES, Pairs, Summaries, summarize
from planner.cost.unit_costs import Combinations, price_units
from planner.schema import SCHEDULES, V_SCHEDULES
from planner.simulate import closed_form_makespan
from planner.space.table import StrategyTable, distinct

__all__ = ["analytic_costs"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

_SLICE = 32_768
_FOLDED = np.array([name in V_SCHEDULES for name in SCHEDULES])
#: Schedules whose makespan is M x slowest rank + fill, whatever the stages.
_TEXTBOOK = np.array(
    [name in {"GPipe", "1F1B", "Interleaved1F1B"} for name in SCHEDULES]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lookup:
    """Summaries of the distinct pairs of a table, and which one each row uses."""

    summaries: Summaries
    pair: Index

    def load(self, name: str) -> Array:
        return np.asarray(self.summaries.load[self.pair, TIMES.index(name)])

    def whole(self, name: str) -> Array:
        return np.asarray(self.summaries.whole[self.pair, TIMES.index(name)])

    def kept(self, name: str, place: int) -> Array:
        return np.asarray(self.summaries.kept[self.pair, place, KEPT.index(name)])

    def peak(self, name: str, place: int) -> Array:
        return np.asarray(self.summaries.peaks[self.pair, place, PEAKS.index(name)])


def _look_up(setting: Setting, table: StrategyTable) -> _Lookup:
    first, combo = distinct(
        table.tp, table.cp, table.ep, table.microbatch_size, table.sequence_parallel
    )
    combos = Combinations(
        tp=table.tp[first],
        cp=table.cp[first],
        ep=table.ep[first],
        microbatch=table.microbatch_size[first],
        sequence_parallel=table.sequence_parallel[first],
    )
    costs = price_units(setting, combos)
    folded = _FOLDED[table.schedule].astype(np.int64)
    rows, pair = distinct(combo, table.pp, table.virtual_stages, folded)
    most = int(table.pp.max())
    types = np.zeros((len(rows), most), dtype=np.int64)
    bandwidth = np.full((len(rows), most), np.inf)
    latency = np.zeros((len(rows), most))
    for pp in np.unique(table.pp[rows]):
        same = table.pp[rows] == pp
        types[same, :pp] = setting.types_of_ranks(int(pp))
        bandwidth[same, :pp], latency[same, :pp] = setting.boundaries(int(pp))
    pairs = Pairs(
        combo=combo[rows],
        pp=table.pp[rows],
        virtual=table.virtual_stages[rows],
        folded=folded[rows],
        types=types,
        bandwidth=bandwidth,
        latency=latency,
    )
    return _Lookup(summaries=summarize(costs, pairs), pair=pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Seconds of one microbatch, split by cause. Shapes [n]."""

    forward: Array
    backward: Array
    weight: Array
    again: Array
    tensor: Array
    context: Array
    expert: Array

    @property
    def total(self) -> Array:
        return (
            self.forward
            + self.backward
            + self.again
            + self.tensor
            + self.context
            + self.expert
        )

    @property
    def forward_total(self) -> Array:
        """With its share of communication: a half, of context a third."""
        return self.forward + self.tensor / 2 + self.expert / 2 + self.context / 3


def _work(lookup: _Lookup, table: StrategyTable, part: str) -> _Work:
    def of(name: str) -> Array:
        return lookup.load(name) if part == "load" else lookup.whole(name)

    full = table.recompute == 2
    again = np.where(
        full, of("full"), np.where(table.recompute == 1, of("selective"), 0)
    )
    passes = np.where(full, 3.0, 2.0)
    return _Work(
        forward=of("forward"),
        backward=of("backward"),
        weight=of("weight"),
        again=again,
        tensor=passes * of("tp"),
        context=of("cp") * np.where(full, 4 / 3, 1.0),
        expert=passes * of("ep"),
    )


def _crowding(setting: Setting, table: StrategyTable) -> tuple[Array, Array]:
    degrees, inverse = np.unique(table.pp, return_inverse=True)
    factors = np.array([setting.crowding(int(pp)) for pp in degrees])
    found = factors[inverse.reshape(-1)]
    return found[:, 0], found[:, 1]


def _makespan(
    table: StrategyTable, load: _Work, whole: _Work, send: Array
) -> tuple[Array, Array]:
    """Seconds of the pipeline without and with its transfers.

    M x slowest rank + (all - slowest rank) / virtual stages: the fill passes one
    virtual stage of each rank. Exact for GPipe and 1F1B, whatever the stages; exact
    for Interleaved1F1B with equal ones and whole rounds of pp microbatches; the rest
    goes by chains. Source: Narayanan et al. 2021, section 2.2.
    """
    virtual = table.virtual_stages.astype(float)
    slowest, everything = load.total, whole.total
    fill = (everything - slowest) / virtual
    plain = table.num_microbatches * slowest + fill
    sent = plain + 2 * send + _waits(table, load, whole, send)
    odd_rounds = (table.num_microbatches % table.pp > 0) & (virtual > 1)
    rows = np.flatnonzero(~_TEXTBOOK[table.schedule] | odd_rounds)
    if len(rows):
        stages = (table.pp * table.virtual_stages)[rows]
        # A V turns on the last rank, where nothing is sent.
        boundaries = np.maximum(stages - 1 - _FOLDED[table.schedule[rows]], 1)
        forward = whole.forward_total[rows] / stages
        weight = whole.weight[rows] / stages
        backward = everything[rows] / stages - forward - weight
        keys = (
            table.schedule[rows],
            table.pp[rows],
            table.virtual_stages[rows],
            table.num_microbatches[rows],
        )
        for hop, result in ((0.0, plain), (send[rows] / boundaries, sent)):
            result[rows] = closed_form_makespan(
                *keys, forward, backward, weight, hop, hop, slowest_rank_s=slowest[rows]
            )
    return plain, sent


def _waits(table: StrategyTable, load: _Work, whole: _Work, send: Array) -> Array:
    """What transfers add beyond one way down the pipeline and back. Shape [n].

    1F1B lets pp microbatches in, so that each round of pp waits for the first of them
    to come back: (all + 2 send) / pp is the least time of a microbatch. Interleaved
    stages hide transfers under a forward or a backward unless those are shorter. Counts
    of hops are those of :func:`planner.simulate.bubble_coefficients` for equal stages.
    """
    pp, virtual, many = table.pp, table.virtual_stages, table.num_microbatches
    hops = np.maximum(pp - 1, 1)
    rounds = (pp - 1) * many // np.maximum(pp, 1) - 1 + (many % pp == 1)
    late = np.maximum((whole.total + 2 * send) / pp - load.total, 0.0)
    one_by_one = late * pp / hops * rounds
    stages = pp * virtual
    hop = send / np.maximum(stages - 1, 1)
    forward = whole.forward_total / stages
    shorter = np.minimum(forward, whole.total / stages - forward)
    looped = (many - pp) * (virtual - 1) * np.maximum(hop - shorter, 0.0)
    waits = np.where(table.schedule == SCHEDULES.index("1F1B"), one_by_one, 0.0)
    interleaved = table.schedule == SCHEDULES.index("Interleaved1F1B")
    waits = np.where(interleaved, looped, waits)
    return np.asarray(np.where(pp > 1, np.maximum(waits, 0.0), 0.0))


def _sharded(table: StrategyTable, dense: Array, expert: Array) -> Array:
    """Scalars that ZeRO leaves on one device: all of dp_shard x cp share a copy."""
    ways = np.where(table.zero_stage > 0, table.dp_shard * table.cp, 1)
    return np.asarray(dense / ways + expert * table.ep / np.maximum(ways, table.ep))


def _memory(
    setting: Setting, table: StrategyTable, lookup: _Lookup
) -> tuple[Array, Array]:
    """Bytes of the fullest of ranks 0, 1 and last; and most bytes over a limit."""
    worst = np.zeros(len(table))
    excess = np.full(len(table), -np.inf)
    limits = {int(pp): setting.limits_of_ranks(int(pp)) for pp in np.unique(table.pp)}
    ranks = (np.zeros_like(table.pp), np.minimum(1, table.pp - 1), table.pp - 1)
    first_kept, first_peak = KEPT.index("none"), PEAKS.index("none")
    for place, rank in enumerate(ranks):
        chunks = chunks_in_flight(
            table.schedule, table.pp, table.virtual_stages, table.num_microbatches, rank
        )
        kept = lookup.summaries.kept[lookup.pair, place, first_kept + table.recompute]
        peak = lookup.summaries.peaks[lookup.pair, place, first_peak + table.recompute]
        dense, expert = lookup.kept("dense", place), lookup.kept("expert", place)
        total = memory_parts(
            parameters=dense + expert,
            sharded=_sharded(table, dense, expert),
            largest_unit=lookup.peak("largest_unit", place),
            zero_stage=table.zero_stage,
            pp=table.pp,
            num_microbatches=table.num_microbatches,
            kept_bytes=kept * chunks / table.virtual_stages,
            transient_bytes=peak,
            receive_bytes=lookup.summaries.receive_bytes[lookup.pair, place],
            precision=setting.precision,
            optimizer=setting.optimizer,
            recipe=setting.recipe,
            on_gpu=setting.on_gpu,
        ).total
        limit = np.empty(len(table))
        for pp, values in limits.items():
            same = table.pp == pp
            limit[same] = values[rank[same]]
        worst = np.maximum(worst, total)
        excess = np.maximum(excess, total - limit)
    return worst, excess


def analytic_costs(setting: Setting, table: StrategyTable) -> CostTable:
    """Time and memory of every row, in a few array passes.

    Args:
        setting: The request; every row must use ``len(setting.order)`` devices.
        table: Legal rows.
    """
    parts = np.zeros((len(PARTS), len(table))).T
    memory, excess = np.zeros(len(table)), np.zeros(len(table))
    if len(table):
        lookup = _look_up(setting, table)
        # In slices whose temporaries stay in the processor's cache.
        for start in range(0, len(table), _SLICE):
            rows = slice(start, start + _SLICE)
            own = _Lookup(summaries=lookup.summaries, pair=lookup.pair[rows])
            _price(setting, table[rows], own, parts[rows])
            memory[rows], excess[rows] = _memory(setting, table[rows], own)
    return CostTable(
        step_time_s=parts.sum(axis=1),
        parts_s=parts,
        memory_bytes=memory,
        excess_bytes=excess,
    )


def _price(
    setting: Setting, table: StrategyTable, lookup: _Lookup, parts: Array
) -> None:
    """Fill in the parts of the step. Shape [n, PARTS]."""
    load, whole = _work(lookup, table, "load"), _work(lookup, table, "whole")
    crowd, everyone = _crowding(setting, table)
    plain, sent = _makespan(table, load, whole, lookup.summaries.send_s[lookup.pair])
    many = table.num_microbatches
    flow = many * load.total * crowd
    # Processes that share cores can at best keep all cores busy all the time.
    cores = many * whole.total / table.pp * everyone
    plain, sent = (np.maximum(x * crowd, cores) for x in (plain, sent))
    _parts(setting, table, lookup, load, crowd, parts)
    parts[:, PARTS.index("pipeline_bubble")] = np.maximum(plain - flow, 0.0)
    parts[:, PARTS.index("pipeline_transfer")] = sent - plain


def _parts(
    setting: Setting,
    table: StrategyTable,
    lookup: _Lookup,
    load: _Work,
    crowd: Array,
    parts: Array,
) -> None:
    """Parts of the step but for the pipeline's own. Shape [n, PARTS]."""
    many = table.num_microbatches * crowd

    def put(name: str, value: Array) -> None:
        parts[:, PARTS.index(name)] = value

    put("compute", many * (load.forward + load.backward))
    put("recompute", many * load.again)
    put("tensor", many * load.tensor)
    put("context", many * load.context)
    put("expert", many * load.expert)
    dense, expert = lookup.kept("dense", 0), lookup.kept("expert", 0)
    forward = load.forward_total * crowd
    shard_ways = np.where(table.zero_stage > 0, table.dp_shard * table.cp, 1)
    copies = np.where(
        table.zero_stage > 0, table.dp_replicate, table.dp_replicate * table.cp
    )
    units = np.maximum(1.0, len(setting.graph.units) / table.pp)
    traffic = replica_traffic(
        scalars=dense + expert,
        units=units,
        zero_stage=table.zero_stage,
        pp=table.pp,
        num_microbatches=table.num_microbatches,
        forward_s=forward,
        backward_s=load.total * crowd - forward,
        shard=setting.groups(shard_ways, table.tp),
        replicate=setting.groups(copies, table.tp * shard_ways),
        precision=setting.precision,
        recipe=setting.recipe,
        measured=setting.cluster.document.collectives,
        on_gpu=setting.on_gpu,
    )
    put("data_parallel", traffic.exposed_s)
    update = optimizer_seconds(
        _sharded(table, dense, expert),
        lookup.kept("tensors", 0),
        setting.slowest_device,
        setting.optimizer,
        clip=setting.grad_clip_norm is not None,
    )
    _, everyone = _crowding(setting, table)
    put("optimizer", update * everyone)
