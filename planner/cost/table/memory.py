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
from planner.cost.table.ranks import CROSSING, RankMemory
from planner.cost.table.rows import Columns
from planner.simulate.actions import schedule_columns
from planner.simulate.compiled import compiled, inlined, inner

__all__ = [
    "IN_FLIGHT",
    "Devices",
    "TableMemory",
    "chunks_between_halves",
    "chunks_in_flight",
    "peak_bytes",
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


class _Scalars(NamedTuple):
    """Scalars on one device: all, ZeRO's shard; trained ones, those of the first unit.

    The first unit is reduced last.
    """

    whole: float
    shard: float
    trained: float
    trained_shard: float
    first_trained: float


class _Held(NamedTuple):
    """Bytes that one device holds for its microbatches, at three moments of a step.

    Attributes:
        first: When the first backward begins.
        later: When one begins that a forward was run before; gradients are there.
        again: When one follows upon another.
    """

    first: float
    later: float
    again: float


#: Working sets by what of a unit's weights is in flight: nothing; gradients that are
#: reduced unit by unit; weights that are gathered so, too; gradients of units whose
#: weights are let go of before.
IN_FLIGHT = ("nothing", "gradients", "weights", "released")

_NOTHING, _GRADIENTS, _WEIGHTS, _RELEASED = range(len(IN_FLIGHT))


@inner
def _in_flight(zero: int, pp: int, many: int, of: ScalarBytes) -> int:
    """Return which of :data:`IN_FLIGHT` a strategy has."""
    if pp > 1 or of.gathers_whole:
        return _NOTHING
    if zero == 3:
        return _WEIGHTS
    unitwise = zero == 1 or of.compute != of.stored
    kept = not (of.gradients_ahead or of.computed_gradients or of.both_gradients)
    if zero >= 1 and many == 1 and kept:
        return _RELEASED
    if zero == 2 or (unitwise and many == 1 and not of.gradients_ahead):
        return _GRADIENTS
    return _NOTHING


@inner
def _alone(
    zero: int, pp: int, many: int, replicas: int, shards: int, of: ScalarBytes
) -> bool:
    """Return whether a device holds what the only one of a model does.

    See :func:`planner.cost.unit_memory.alone_bytes_of`.
    """
    copies = min(replicas, 1) * shards if of.replicas_alike else replicas * shards
    plain = not (of.gradients_ahead or of.computed_gradients or of.both_gradients)
    plain = plain and not of.gathers_whole
    return plain and copies == 1 and zero == 0 and pp == 1 and many == 1


@inner
def _of_gradients(
    has: _Scalars, zero: int, pp: int, many: int, of: ScalarBytes
) -> float:
    """Bytes of gradients on one device, once they are there."""
    gradients = has.trained * of.stored
    shard = has.trained_shard * of.stored * of.shard_share
    if zero >= 1:
        wide = max(of.reduce, of.compute) if many > 1 else of.compute
        gradients = has.trained * wide
    if pp == 1 and (zero >= 2 or (zero == 1 and many == 1 and not of.gradients_ahead)):
        # The input of the last reduction stays until the next.
        last = many > 1 and zero >= 2 and not of.gradients_ahead
        gradients = shard + (has.first_trained * of.reduce if last else 0.0)
    sums = of.stored if zero == 0 else of.reduce
    if of.both_gradients and sums > of.compute and (pp > 1 or zero <= 1):
        gradients += has.trained * of.compute
    if of.computed_gradients:
        early = zero == 3 or (zero == 2 and pp == 1 and not of.gathers_whole)
        shard = has.trained_shard * of.shard_share
        gradients = (shard if early else has.trained) * of.compute
    return gradients


@inner
def _at_peak(
    has: _Scalars,
    zero: int,
    pp: int,
    many: int,
    of: ScalarBytes,
    held: _Held,
    working: float,
    ending: float,
) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients, states and activations at the worst moment.

    ``working`` is the working set of one unit, ``ending`` of one that is the last to be
    done.
    """
    gathered = 0.0
    in_units = zero == 3 and pp == 1 and not of.gathers_whole
    if not in_units and (zero >= 1 or of.compute != of.stored):
        gathered = has.whole * of.compute
    # Behind a forward nothing is gathered under ZeRO 3.
    early = gathered if zero < 3 or of.gathers_whole else 0.0
    gradients = _of_gradients(has, zero, pp, many, of)
    ahead = pp == 1 and zero == 0 and of.compute == of.stored == of.reduce
    first = gradients if ahead or of.gradients_ahead or of.computed_gradients else 0.0
    owned, trained = has.whole, has.trained
    if zero >= 1:
        owned, trained = has.shard * of.shard_share, has.trained_shard
    found = (early, first, held.first + working)
    later = held.later + (working if held.later > held.again else ending)
    if early + gradients + later > found[0] + found[1] + found[2]:
        found = (early, gradients, later)
    if gathered + gradients + held.again + ending > found[0] + found[1] + found[2]:
        found = (gathered, gradients, held.again + ending)
    states = trained * of.states
    return owned * of.stored + found[0], found[1], states, found[2]


class Devices(NamedTuple):
    """Many devices, each with its parameters and what it holds for microbatches.

    Attributes:
        scalars: All; what ZeRO leaves of them; the trained ones of both; those of the
            first unit. Shape [n, 5].
        held: When the first backward begins, when one begins behind a forward, and
            behind another. Shape [n, 3].
        working: Working sets by :data:`IN_FLIGHT`, then those of a unit that is the
            last to be done. Shape [n, 8].
        alone: Cast weights, gradients and working set of the only device of a model.
            Shape [n, 3].
        zero: ZeRO stage. Shape [n].
        pp: Pipeline degree. Shape [n].
        many: Microbatches in a step. Shape [n].
        replicas: Degree of dp_replicate; 0 where ``alone`` is not told. Shape [n].
        shards: Of dp_shard times that of cp. Shape [n].
    """

    scalars: Array
    held: Array
    working: Array
    alone: Array
    zero: Index
    pp: Index
    many: Index
    replicas: Index
    shards: Index


@compiled
def _of_all_devices(each: Devices, of: ScalarBytes, parts: Array) -> None:
    for i in range(len(each.scalars)):
        has, held = each.scalars[i], each.held[i]
        zero, pp, many = each.zero[i], each.pp[i], each.many[i]
        if _alone(zero, pp, many, each.replicas[i], each.shards[i], of):
            parts[0, i] = has[0] * of.stored + each.alone[i, 0]
            parts[1, i], parts[2, i] = each.alone[i, 1], has[2] * of.states
            parts[3, i] = held[0] + each.alone[i, 2]
            continue
        kind = _in_flight(zero, pp, many, of)
        parts[0, i], parts[1, i], parts[2, i], parts[3, i] = _at_peak(
            _Scalars(has[0], has[1], has[2], has[3], has[4]),
            zero,
            pp,
            many,
            of,
            _Held(held[0], held[1], held[2]),
            each.working[i, kind],
            each.working[i, kind + len(IN_FLIGHT)],
        )


def peak_bytes(each: Devices, of: ScalarBytes) -> Array:
    """Bytes of parameters, gradients, states and activations at the peak. [4, n]."""
    parts = np.empty((4, len(each.scalars)))
    _of_all_devices(each, of, parts)
    return parts


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


@inlined
def _activations(
    order: _Order,
    rank: int,
    own: float,
    output: float,
    weight_grad: float,
    all_shared: float,
    all_returned: float,
    all_sent: float,
) -> _Held:
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
    returned = all_returned / receiving
    sent = all_sent / max(virtual - (1 if rank == order.last else 0), 1)
    held = ((own + output) / virtual + sent) * flying
    held -= all_shared / receiving * max(flying - many * first, 0)
    held = max(held, 0.0)
    # Several stages of a rank begin their backwards at different times.
    chunk = held / max(flying, 1) if virtual == 1 else 0.0
    after, at_end = 0.0, 0.0
    if order.keeps:
        after = sent + returned
        at_end = (all_sent + all_returned) * many
    if order.waiting >= 0:
        halves = min(order.waiting + order.more * rank, order.chunks)
        if order.frees:
            held = max(held + (weight_grad - output) / virtual * halves, 0.0)
        else:
            held += (weight_grad / virtual + returned) * halves
            after, at_end = max(after, returned), max(at_end, all_returned * many)
    done = min(after * (order.chunks - flying), at_end)
    # The end of the step may be the worst, if what is saved is less than what is sent.
    most = max(held + done, at_end)
    again = max(most - chunk + min(after, chunk), at_end)
    return _Held(most, again if flying >= order.chunks else most, again)


@inlined
def _with_updates(held: _Held, more: float, update_every: int) -> _Held:
    """Bytes of a rank that updates weights while microbatches are under way.

    An update takes the gradients of all microbatches before it, so that the next
    backward begins without any, if each has one. ``more`` is what the update itself
    takes beside them, when its microbatch is gone.
    """
    again = held.again + more
    return _Held(
        held.first, again if update_every == 1 else max(held.later, again), again
    )


@compiled
def _fill(
    rows: Columns,
    rules: Index,
    kept: Array,
    peaks: Array,
    crossing: Array,
    whole: Array,
    alone: Array,
    first: Array,
    limits: Array,
    of: ScalarBytes,
    update_every: int,
    sums: bool,
    worst: Array,
    excess: Array,
    shards: Array,
) -> None:
    """Fill in the last three for every row, see :mod:`planner.cost.table.memory`.

    Args:
        rows: The table.
        rules: Columns :data:`RULES` of each schedule. Shape [codes, columns].
        kept: Columns :data:`KEPT` of ranks 0, 1 and last. [pairs, 3, columns].
        peaks: Columns :data:`PEAKS`, likewise.
        crossing: Columns :data:`CROSSING`, likewise.
        whole: Working set of a device that has all units, by :data:`IN_FLIGHT` and
            recompute kind, and of its last unit. Shape [pairs, 2, 4, 3].
        alone: As :attr:`RankMemory.alone`.
        first: Trained scalars of the first unit. Shape [pairs].
        limits: Bytes that these ranks may use at each place. Shape [places, 3].
        of: What the request says of bytes.
        update_every: Microbatches behind which a stage updates weights that others
            under way began with; 0 where none are.
        sums: Whether copies average gradients before each such update.
        worst: Bytes on the fullest of them. Shape [n].
        excess: Most bytes over a limit. Shape [n].
        shards: Trained scalars that ZeRO leaves on a device of rank 0. Shape [n].
    """
    # Single values, not rows of the arrays: taking a row costs more than reading it.
    for row in range(len(rows.pp)):
        pp, zero, pair = rows.pp[row], rows.zero_stage[row], rows.pair[row]
        many, again, ep = rows.num_microbatches[row], rows.recompute[row], rows.ep[row]
        at = rows.place[row]
        order = _order(
            rules,
            rows.schedule[row],
            pp,
            rows.virtual_stages[row],
            many,
            of.keeps_sent,
            of.keeps_graph,
        )
        ways = rows.dp_shard[row] * rows.cp[row] if zero > 0 else 1
        # All of dp_shard x cp share a copy, of experts at most their part of it and tp.
        spread = ep / rows.tp[row] if ep > 1 else 1.0
        left = spread / max(ways, spread)
        replicas, shards_of = rows.dp_replicate[row], rows.dp_shard[row] * rows.cp[row]
        fullest, over = 0.0, -np.inf
        for place in range(min(pp, 3)):
            dense, experts = kept[pair, place, _DENSE], kept[pair, place, _EXPERT]
            trained_dense = kept[pair, place, _TRAINED_DENSE]
            trained_experts = kept[pair, place, _TRAINED_EXPERTS]
            trained = trained_dense / ways + trained_experts * left
            has = _Scalars(
                dense + experts,
                dense / ways + experts * left,
                trained_dense + trained_experts,
                trained,
                first[pair],
            )
            rank = place if place < 2 else pp - 1
            own = kept[pair, place, _NONE + again]
            output = crossing[pair, place, _OUTPUT]
            weight_grad = kept[pair, place, _WEIGHT_GRAD]
            shared = crossing[pair, place, _SHARED]
            returned = crossing[pair, place, _RETURNED]
            sent = crossing[pair, place, _SENT]
            held = _activations(
                order, rank, own, output, weight_grad, shared, returned, sent
            )
            if place == 1 and pp > 3 and order.waiting >= 0:
                # The second has most in flight, the last but one most between halves.
                other = _activations(
                    order, pp - 2, own, output, weight_grad, shared, returned, sent
                )
                held = _Held(
                    max(held.first, other.first),
                    max(held.later, other.later),
                    max(held.again, other.again),
                )
            working = ending = peaks[pair, place, again]
            if pp == 1:
                kind = _in_flight(zero, pp, many, of)
                working, ending = (
                    whole[pair, 0, kind, again],
                    whole[pair, 1, kind, again],
                )
            if update_every > 0:
                summed = trained + kept[pair, place, _TENSORS]
                summed *= of.reduce if sums and replicas > 1 else 0.0
                held = _with_updates(held, max(summed - ending, 0.0), update_every)
            if _alone(zero, pp, many, replicas, shards_of, of):
                casts = int(
                    of.own_casts
                    and shards_of == 1
                    and (replicas == 1 or of.own_buckets)
                )
                parameters = has.whole * of.stored + alone[pair, casts, 0, again]
                gradients, states, activations = (
                    alone[pair, casts, 1, again],
                    trained * of.states,
                    held.first + alone[pair, casts, 2, again],
                )
            else:
                parameters, gradients, states, activations = _at_peak(
                    has, zero, pp, many, of, held, working, ending
                )
            if update_every > 0:
                older = (pp - 1 - rank + update_every - 1) // update_every
                parameters += trained * of.compute * older
            buffers = crossing[pair, place, _RECEIVED] * (many if of.all_waiting else 1)
            total = parameters + gradients + states + buffers + of.reserve
            total += activations * of.swell
            fullest, over = max(fullest, total), max(over, total - limits[at, place])
            if place == 0:
                shards[row] = trained
        worst[row], excess[row] = fullest, over


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMemory:
    """Memory of the rows of a strategy table; arrays of shape [n].

    Attributes:
        memory_bytes: Peak of the fullest of ranks 0, 1 and last.
        excess_bytes: Most bytes that one of them is over its limit.
        parameter_shards: Trained scalars that ZeRO leaves on a device of rank 0.
    """

    memory_bytes: Array
    excess_bytes: Array
    parameter_shards: Array


def table_memory(
    rows: Columns,
    ranks: RankMemory,
    limits: Array,
    of: ScalarBytes,
    update_every: int = 0,
    *,
    sums: bool = False,
) -> TableMemory:
    """Peak memory of every row, on the ranks that can be fullest.

    Args:
        rows: The table.
        ranks: Memory of the cuts that ``rows.pair`` names.
        limits: Bytes that ranks 0, 1 and last may use at each of ``rows.place``.
            Shape [places, 3].
        of: Bytes of scalars.
        update_every: Microbatches behind which a stage updates weights while others
            are under way; 0 if pipelines are flushed.
        sums: Whether copies average gradients before each such update.
    """
    worst, excess, shards = np.empty((3, len(rows.pp)))
    _fill(
        rows,
        schedule_columns(*RULES),
        ranks.kept,
        ranks.peaks,
        ranks.crossing,
        ranks.whole,
        ranks.alone,
        ranks.first,
        limits,
        of,
        update_every,
        sums,
        worst,
        excess,
        shards,
    )
    return TableMemory(memory_bytes=worst, excess_bytes=excess, parameter_shards=shards)
