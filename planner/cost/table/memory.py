"""Peak memory of every row of a strategy table, by closed forms: what prunes.

Bounds :mod:`planner.cost.strategy.memory` from above for the same stages, and equals it
where the order of a schedule leaves no doubt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import ScalarBytes
from planner.cost.table.peak import (
    Degrees,
    Held,
    Scalars,
    is_alone,
    peak_of_device,
    units_in_flight,
)
from planner.cost.table.ranks import CROSSING, RankMemory
from planner.cost.table.rows import Columns
from planner.simulate.actions import schedule_columns
from planner.simulate.compiled import compiled, inlined

__all__ = [
    "RULES",
    "TableMemory",
    "chunks_between_halves",
    "chunks_in_flight",
    "table_memory",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


_DENSE, _EXPERT, _TRAINED_DENSE, _TRAINED_EXPERTS, _WEIGHT_GRAD = range(5)
_TENSORS, _NONE = 5, 6

_RECEIVED, _SHARED, _RETURNED, _SENT, _OUTPUT = range(len(CROSSING))

#: Columns of schedules that compiled code here takes.
RULES = (
    "folded",
    "splits_backward",
    "waits_for_sends",
    "holds_all",
    "per_pp",
    "constant",
    "fewer_per_rank",
    "in_rounds",
    "more_waiting_per_rank",
)

_FOLDED, _SPLITS, _WAITS_FOR_SENDS, _HOLDS_ALL = range(4)

_PER_PP, _CONSTANT, _FEWER, _IN_ROUNDS, _MORE_WAITING = range(4, len(RULES))


class _Order(NamedTuple):
    """Microbatches that a row's schedule holds, and how ranks differ in them.

    Attributes:
        virtual: Stages of each rank.
        many: Microbatches in a step.
        chunks: Of all microbatches on one rank.
        flying, fewer: In flight on rank 0, and how many fewer on each rank after it.
        waiting, more: Between the halves of a backward on rank 0, and how many more on
            each rank after it; -1 and 0 if the schedule does not split it.
        last: Rank of the last stage.
        keeps: Whether what is sent is kept up to the end of the step.
        frees: Whether what is sent back and returned goes with the first half.
    """

    virtual: int
    many: int
    chunks: int
    flying: int
    fewer: int
    waiting: int
    more: int
    last: int
    keeps: bool
    frees: bool


@inlined
def _order(
    rules: Index,
    schedule: int,
    pp: int,
    virtual: int,
    many: int,
    keeps_sent: bool,
    keeps_graph: bool,
) -> _Order:
    chunks = virtual * many
    flying, fewer, waiting, more = chunks, 0, -1, 0
    if not rules[schedule, _HOLDS_ALL]:
        flying = rules[schedule, _PER_PP] * pp + rules[schedule, _CONSTANT]
        fewer = rules[schedule, _FEWER]
        if rules[schedule, _IN_ROUNDS]:
            # Microbatches that a rank takes through one virtual stage before the next.
            flying += (virtual - 1) * (many // max(many // pp, 1))
    if pp == 1:
        flying, fewer = virtual, 0
    elif rules[schedule, _SPLITS]:
        # The one at work counts as waiting where that holds more.
        waiting, more = 1 if keeps_graph else 0, rules[schedule, _MORE_WAITING]
    keeps = keeps_sent and pp > 1 and not rules[schedule, _WAITS_FOR_SENDS]
    last = 0 if rules[schedule, _FOLDED] else pp - 1
    frees = not keeps_graph
    return _Order(
        virtual, many, chunks, flying, fewer, waiting, more, last, keeps, frees
    )


@compiled
def chunks_in_flight(
    rules: Index,
    schedule: int,
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    rank: int,
) -> int:
    """Microbatch activations that a pp rank holds at once, counted in virtual stages.

    Closed forms of torch's schedules, for pruning, whatever has to wait for its weight
    gradient included: exact but for ZBVZeroBubble with fewer than 2 pp microbatches,
    where it is an upper bound; the finalists are counted on their action tables.

    Args:
        rules: Columns :data:`RULES` of each schedule. Shape [codes, columns].
        schedule: Code, see :mod:`planner.schema.schedules`.
        pp: Ranks.
        virtual_stages: Of each rank.
        num_microbatches: In a step.
        rank: 0 to pp - 1.

    Source: Narayanan et al. 2021 (2104.04473), section 2.2: 1F1B holds pp - rank, an
    interleaved schedule (v - 1) pp + 2 (pp - 1 - rank) + 1 chunks if pp divides M.
    """
    order = _order(rules, schedule, pp, virtual_stages, num_microbatches, False, True)
    flying = order.flying - order.fewer * rank
    return flying if pp == 1 else min(flying, order.chunks)


@compiled
def chunks_between_halves(
    rules: Index,
    schedule: int,
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    rank: int,
) -> int:
    """Microbatches that wait for their weight gradients at once, over virtual stages.

    An upper bound, as :func:`chunks_in_flight`, whose arguments it takes; 0 for
    schedules that do not split the backward.
    """
    order = _order(rules, schedule, pp, virtual_stages, num_microbatches, False, True)
    return max(min(order.waiting + order.more * rank, order.chunks), 0)


class _Microbatch(NamedTuple):
    """Bytes of one microbatch in all stages of a rank.

    Attributes:
        saved: Kept for backward.
        output: What the model returns, on the last rank.
        weight_grad: What waits between the halves of a split backward, beyond that.
        shared: Part of ``saved`` that is in a receive buffer.
        returned: Gradients that are sent back.
        sent: Activations that are sent on.
    """

    saved: float
    output: float
    weight_grad: float
    shared: float
    returned: float
    sent: float


@inlined
def _activations(order: _Order, rank: int, one: _Microbatch) -> Held:
    """Bytes that a rank of a pipeline holds for its microbatches, at most.

    Chunks in flight hold what they saved, less the received tensor that is counted as
    a buffer, and what they sent or returned. See :mod:`planner.cost.strategy.memory`.
    """
    virtual, many = order.virtual, order.many
    flying = min(order.flying - order.fewer * rank, max(order.chunks, virtual))
    # Early stages have most in flight. The first shares no buffer with anybody, nor
    # does it return anything; the last sends nothing.
    first = 1 if rank == 0 else 0
    receiving = max(virtual - first, 1)
    returned = one.returned / receiving
    sent = one.sent / max(virtual - (1 if rank == order.last else 0), 1)
    held = ((one.saved + one.output) / virtual + sent) * flying
    held -= one.shared / receiving * max(flying - many * first, 0)
    held = max(held, 0.0)
    # Several stages of a rank begin their backwards at different times.
    chunk = held / max(flying, 1) if virtual == 1 else 0.0
    after, at_end = 0.0, 0.0
    if order.keeps:
        after = sent + returned
        at_end = (one.sent + one.returned) * many
    if order.waiting >= 0:
        halves = min(order.waiting + order.more * rank, order.chunks)
        if order.frees:
            held = max(held + (one.weight_grad - one.output) / virtual * halves, 0.0)
        else:
            held += (one.weight_grad / virtual + returned) * halves
            after, at_end = max(after, returned), max(at_end, one.returned * many)
    done = min(after * (order.chunks - flying), at_end)
    # The end of the step may be the worst, if what is saved is less than what is sent.
    most = max(held + done, at_end)
    again = max(most - chunk + min(after, chunk), at_end)
    return Held(most, again if flying >= order.chunks else most, again)


class _Ranks(NamedTuple):
    """Arrays of :class:`RankMemory`, as compiled code takes them apart."""

    kept: Array
    peaks: Array
    crossing: Array
    whole: Array
    alone: Array
    first: Array


class _Updates(NamedTuple):
    """Updates of weights while microbatches are under way.

    Attributes:
        every: Microbatches behind which a stage updates weights that others under way
            began with; 0 where none are.
        sums: Whether copies average gradients before each such update.
    """

    every: int
    sums: bool


class _Row(NamedTuple):
    """One row of the table, in what its ranks have in common.

    Attributes:
        pair: Which of the distinct cuts it uses.
        recompute: Kind of recomputation.
        order: Of its microbatches.
        degrees: Of its mesh.
        ways: Devices that ZeRO divides a scalar over, but for those of experts.
        left: Share of experts' scalars that ZeRO leaves on a device.
    """

    pair: int
    recompute: int
    order: _Order
    degrees: Degrees
    ways: int
    left: float


@inlined
def _shares(degrees: Degrees, tp: int, ep: int) -> tuple[int, float]:
    """Return the last two fields of :class:`_Row`."""
    ways = degrees.shards if degrees.zero > 0 else 1
    # All of dp_shard x cp share a copy, of experts at most their part of it and tp.
    spread = ep / tp if ep > 1 else 1.0
    return ways, spread / max(ways, spread)


@inlined
def _scalars(kept: Array, first: Array, row: _Row, place: int) -> Scalars:
    # Single values, not rows of the arrays: taking a row costs more than reading it.
    pair, ways, left = row.pair, row.ways, row.left
    dense, experts = kept[pair, place, _DENSE], kept[pair, place, _EXPERT]
    trained_dense = kept[pair, place, _TRAINED_DENSE]
    trained_experts = kept[pair, place, _TRAINED_EXPERTS]
    return Scalars(
        dense + experts,
        dense / ways + experts * left,
        trained_dense + trained_experts,
        trained_dense / ways + trained_experts * left,
        first[pair],
    )


@inlined
def _held(kept: Array, crossing: Array, row: _Row, place: int, rank: int) -> Held:
    """Bytes that a rank holds for its microbatches if pipelines are flushed."""
    pair, order, pp = row.pair, row.order, row.degrees.pp
    one = _Microbatch(
        kept[pair, place, _NONE + row.recompute],
        crossing[pair, place, _OUTPUT],
        kept[pair, place, _WEIGHT_GRAD],
        crossing[pair, place, _SHARED],
        crossing[pair, place, _RETURNED],
        crossing[pair, place, _SENT],
    )
    held = _activations(order, rank, one)
    if place == 1 and pp > 3 and order.waiting >= 0:
        # The second has most in flight, the last but one most between halves.
        other = _activations(order, pp - 2, one)
        held = Held(
            max(held.first, other.first),
            max(held.later, other.later),
            max(held.again, other.again),
        )
    return held


@inlined
def _working(
    peaks: Array, whole: Array, row: _Row, place: int, of: ScalarBytes
) -> tuple[float, float]:
    """Working set of one unit of a rank, and of one that is the last to be done."""
    pair, again = row.pair, row.recompute
    if row.degrees.pp > 1:
        return peaks[pair, place, again], peaks[pair, place, again]
    kind = units_in_flight(row.degrees, of)
    return whole[pair, 0, kind, again], whole[pair, 1, kind, again]


@inlined
def _peak(
    alone: Array,
    row: _Row,
    has: Scalars,
    held: Held,
    working: tuple[float, float],
    of: ScalarBytes,
) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients, states and activations at the worst moment."""
    if not is_alone(row.degrees, of):
        one, last = working
        return peak_of_device(has, row.degrees, of, held, one, last)
    shards, replicas = row.degrees.shards, row.degrees.replicas
    casts = int(of.own_casts and shards == 1 and (replicas == 1 or of.own_buckets))
    pair, again = row.pair, row.recompute
    parameters = has.whole * of.stored + alone[pair, casts, 0, again]
    activations = held.first + alone[pair, casts, 2, again]
    states = has.trained_shard * of.states
    return parameters, alone[pair, casts, 1, again], states, activations


@inlined
def _with_updates(held: Held, more: float, update_every: int) -> Held:
    """Bytes of a rank that updates weights while microbatches are under way.

    An update takes the gradients of all microbatches before it, so that the next
    backward begins without any, if each has one. ``more`` is what the update itself
    takes beside them, when its microbatch is gone.
    """
    again = held.again + more
    return Held(
        held.first, again if update_every == 1 else max(held.later, again), again
    )


@compiled
def _fill(
    rows: Columns,
    rules: Index,
    memory: _Ranks,
    ranks: Index,
    limits: Array,
    of: ScalarBytes,
    updates: _Updates,
    found: tuple[Array, Array, Array],
) -> None:
    """Fill in the fields of :class:`TableMemory`; ``rules`` are of each schedule."""
    # References of an array are counted each time that it is taken out of a tuple.
    kept, peaks, crossing, whole, alone, first = memory
    pp, replicas, shards, cp, tp, ep, zero = rows[:7]
    schedule, virtual, many, recompute, pairs, places = rows[7:]
    worst, excess, trained = found
    every = updates.every
    for row in range(len(pp)):
        degrees = Degrees(
            zero[row], pp[row], many[row], replicas[row], shards[row] * cp[row]
        )
        order = _order(
            rules,
            schedule[row],
            degrees.pp,
            virtual[row],
            degrees.many,
            of.keeps_sent,
            of.keeps_graph,
        )
        ways, left = _shares(degrees, tp[row], ep[row])
        one = _Row(pairs[row], recompute[row], order, degrees, ways, left)
        worst[row], excess[row] = 0.0, -np.inf
        for place in range(limits.shape[1] if degrees.pp > 3 else min(degrees.pp, 3)):
            rank = ranks[places[row], place]
            if place > 2 and (rank < 2 or rank == degrees.pp - 1):
                continue
            has = _scalars(kept, first, one, place)
            held = _held(kept, crossing, one, place, rank)
            working = _working(peaks, whole, one, place, of)
            older = 0
            if every > 0:
                summed = has.trained_shard + kept[one.pair, place, _TENSORS]
                summed *= of.reduce if updates.sums and degrees.replicas > 1 else 0.0
                held = _with_updates(held, max(summed - working[1], 0.0), every)
                older = (degrees.pp - 1 - rank + every - 1) // every
            parameters, gradients, states, activations = _peak(
                alone, one, has, held, working, of
            )
            # Weights that microbatches under way began with.
            parameters += has.trained_shard * of.compute * older
            waiting = degrees.many if of.all_waiting else 1
            buffers = crossing[one.pair, place, _RECEIVED] * waiting
            total = parameters + gradients + states + buffers + of.reserve
            total += activations * of.swell
            over = total - limits[places[row], place]
            worst[row], excess[row] = max(worst[row], total), max(excess[row], over)
            if place == 0:
                trained[row] = has.trained_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMemory:
    """Memory of the rows of a strategy table; arrays of shape [n].

    Attributes:
        memory_bytes: Peak of the fullest rank that is priced.
        excess_bytes: Most bytes that one of them is over its limit.
        parameter_shards: Trained scalars that ZeRO leaves on a device of rank 0.
    """

    memory_bytes: Array
    excess_bytes: Array
    parameter_shards: Array


def table_memory(
    rows: Columns,
    memory: RankMemory,
    ranks: Index,
    limits: Array,
    of: ScalarBytes,
    update_every: int = 0,
    *,
    sums: bool = False,
) -> TableMemory:
    """Peak memory of every row, on the ranks that can be fullest.

    Args:
        rows: The table.
        memory: Memory of the cuts that ``rows.pair`` names.
        ranks: Ranks that are priced at each of ``rows.place``; the first three are 0, 1
            and the last. Shape [places, watched].
        limits: Bytes that they may use. Shape [places, watched].
        of: Bytes of scalars.
        update_every: Microbatches behind which a stage updates weights while others
            are under way; 0 if pipelines are flushed.
        sums: Whether copies average gradients before each such update.
    """
    worst, excess, shards = np.empty((3, len(rows.pp)))
    _fill(
        rows,
        schedule_columns(*RULES),
        _Ranks(*(getattr(memory, name) for name in _Ranks._fields)),
        ranks,
        limits,
        of,
        _Updates(update_every, sums),
        (worst, excess, shards),
    )
    return TableMemory(memory_bytes=worst, excess_bytes=excess, parameter_shards=shards)
