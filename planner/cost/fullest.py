"""Peak memory of every row of a strategy table, by closed forms: what prunes.

Bounds what :mod:`planner.cost.memory` says of the same stages from above, and is equal
to it where the order of a schedule leaves no doubt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.columns import Columns
from planner.cost.rank_memory import CROSSING, KEPT, PEAKS, RankMemory
from planner.cost.recipes import Recipe
from planner.schema import (
    SCHEDULES,
    SPLIT_BACKWARD_SCHEDULES,
    V_SCHEDULES,
    Optimizer,
    Precision,
)
from planner.simulate.compiled import compiled, inlined
from planner.units import dtype_bytes

__all__ = [
    "Bytes",
    "Devices",
    "FullestRanks",
    "bytes_of",
    "chunks_between_halves",
    "chunks_in_flight",
    "fullest_ranks",
    "weight_bytes",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

# Compiled code is kept as long as this file is unchanged: what it takes for granted
# about the order of columns must be said in here. Recompute kinds come last.
_KEPT = (
    "dense",
    "expert",
    "trained_dense",
    "trained_experts",
    "weight_grad",
    "none",
    "selective",
    "full",
)
_PEAKS = ("largest_unit", "largest_trained", "none", "selective", "full")
_CROSSING = ("received", "shared", "returned", "sent", "output")
_DENSE, _EXPERT, _TRAINED_DENSE, _TRAINED_EXPERTS, _WEIGHT_GRAD, _NONE = range(6)
_RECEIVED, _SHARED, _RETURNED, _SENT, _OUTPUT = range(len(_CROSSING))
_GPIPE, _LOOPED_BFS = SCHEDULES.index("GPipe"), SCHEDULES.index("LoopedBFS")
_ONE_BY_ONE, _INTERLEAVED = SCHEDULES.index("1F1B"), SCHEDULES.index("Interleaved1F1B")
_ZERO_BUBBLE = SCHEDULES.index("InterleavedZeroBubble")
_V = SCHEDULES.index("ZBVZeroBubble")
_FOLDED = np.array([name in V_SCHEDULES for name in SCHEDULES])
_SPLIT = np.array([name in SPLIT_BACKWARD_SCHEDULES for name in SCHEDULES])


class Bytes(NamedTuple):
    """Bytes of a scalar by purpose, and what a recipe adds."""

    stored: float
    compute: float
    reduce: float
    states: float
    swell: float
    reserve: float
    all_waiting: bool
    keeps_sent: bool


def bytes_of(
    precision: Precision, optimizer: Optimizer, recipe: Recipe, on_gpu: bool
) -> Bytes:
    """What a request says of bytes."""
    # float8 products still gather and keep bfloat16 weights and activations.
    compute = "bfloat16" if precision.compute == "float8" else precision.compute
    states = optimizer.states_per_parameter * dtype_bytes(optimizer.state_dtype)
    return Bytes(
        stored=float(dtype_bytes(precision.parameter)),
        compute=float(dtype_bytes(compute)),
        reduce=float(dtype_bytes(precision.reduce)),
        states=float(states),
        swell=1.0 + recipe.fragmentation if on_gpu else 1.0,
        reserve=float(recipe.reserve_bytes) if on_gpu else 0.0,
        all_waiting=recipe.receive_buffers == "all",
        # gloo's requests hold what they have sent until the pipeline lets go of them.
        keeps_sent=not on_gpu,
    )


class _Scalars(NamedTuple):
    """On one device: all, what ZeRO leaves, those of the largest unit; trained ones."""

    whole: float
    shard: float
    unit: float
    trained: float
    trained_shard: float
    trained_unit: float


@compiled
def _of_weights(
    has: _Scalars, zero: int, pp: int, many: int, of: Bytes
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer states on one device."""
    gathered = 0.0
    if zero == 3 and pp == 1:
        gathered = min(has.whole, 2 * has.unit) * of.compute
    elif zero >= 1 or of.compute != of.stored:
        gathered = has.whole * of.compute
    owned, trained, gradients = has.whole, has.trained, has.trained * of.stored
    if zero >= 1:
        wide = max(of.reduce, of.compute) if many > 1 else of.compute
        whole = 2 * has.trained_unit * of.reduce
        if pp > 1 or zero == 1:
            whole = has.trained * wide
        owned, trained = has.shard, has.trained_shard
        gradients = has.trained_shard * of.stored + whole
    return owned * of.stored + gathered, gradients, trained * of.states


class Devices(NamedTuple):
    """Many devices, each with its parameters. Shapes [n] but for ``scalars``.

    Attributes:
        scalars: All; what ZeRO leaves of them; those of the largest unit; and the
            trained ones of each of the three. Shape [n, 6].
        zero: ZeRO stage.
        pp: Pipeline degree.
        many: Microbatches in a step.
    """

    scalars: Array
    zero: Index
    pp: Index
    many: Index


@compiled
def _of_all_weights(each: Devices, of: Bytes, parts: Array) -> None:
    for i in range(len(each.scalars)):
        has = each.scalars[i]
        sizes = _Scalars(has[0], has[1], has[2], has[3], has[4], has[5])
        parts[0, i], parts[1, i], parts[2, i] = _of_weights(
            sizes, each.zero[i], each.pp[i], each.many[i], of
        )


def weight_bytes(each: Devices, of: Bytes) -> Array:
    """Bytes of parameters, gradients and optimizer states. Shape [3, n]."""
    parts = np.empty((3, len(each.scalars)))
    _of_all_weights(each, of, parts)
    return parts


@compiled
def chunks_in_flight(
    schedule: int, pp: int, virtual_stages: int, num_microbatches: int, rank: int
) -> int:
    """Microbatch activations that a pp rank holds at once, counted in virtual stages.

    Closed forms of torch's schedules, for pruning, whatever has to wait for its weight
    gradient included: exact but for ZBVZeroBubble with fewer than 2 pp microbatches,
    where it is an upper bound; the finalists are counted on their action tables.

    Args:
        schedule: Index into :data:`planner.schema.SCHEDULES`.
        pp: Ranks.
        virtual_stages: Of each rank.
        num_microbatches: In a step.
        rank: 0 to pp - 1.

    Source: Narayanan et al. 2021 (2104.04473), section 2.2: 1F1B holds pp - rank, an
    interleaved schedule (v - 1) pp + 2 (pp - 1 - rank) + 1 chunks if pp divides M.
    """
    everything, behind = virtual_stages * num_microbatches, pp - 1 - rank
    if pp == 1:
        return virtual_stages
    if schedule in (_GPIPE, _LOOPED_BFS):
        return everything
    if schedule == _ONE_BY_ONE:
        return min(1 + behind, everything)
    if schedule in (_INTERLEAVED, _ZERO_BUBBLE):
        # Microbatches that a rank takes through one virtual stage before the next.
        round_size = num_microbatches // max(num_microbatches // pp, 1)
        # What later ranks have less in flight waits there for its weight gradient.
        warm_up = pp if schedule == _ZERO_BUBBLE else 1 + 2 * behind
        return min((virtual_stages - 1) * round_size + warm_up, everything)
    # A V: as much as 1F1B, on every rank; DualPipeV pairs up one more.
    return min(2 * pp + (0 if schedule == _V else 1), everything)


@compiled
def chunks_between_halves(
    schedule: int, pp: int, virtual_stages: int, num_microbatches: int, rank: int
) -> int:
    """Microbatches that wait for their weight gradients at once, over virtual stages.

    An upper bound, as :func:`chunks_in_flight`, whose arguments it takes; 0 for
    schedules that do not split the backward.
    """
    if not _SPLIT[schedule] or pp == 1:
        return 0
    waiting = 2 * rank + 1 if schedule == _V else rank + 1
    return min(waiting, virtual_stages * num_microbatches)


@inlined
def _activations(
    rows: Columns, row: int, rank: int, kept: Array, crossing: Array, of: Bytes
) -> float:
    """Bytes that a rank of a pipeline holds for its microbatches, at most.

    Chunks in flight hold what they saved, less the received tensor that is counted as
    a buffer, and what they sent or returned. See :mod:`planner.cost.held`.
    """
    schedule, pp = rows.schedule[row], rows.pp[row]
    virtual, many = rows.virtual_stages[row], rows.num_microbatches[row]
    flying = chunks_in_flight(schedule, pp, virtual, many, rank)
    own = kept[_NONE + rows.recompute[row]]
    # Early stages have most in flight. The first shares no buffer with anybody, nor
    # does it return anything; the last sends nothing.
    first = rank == 0
    last = rank == 0 if _FOLDED[schedule] else rank == pp - 1
    shared = crossing[_SHARED] / max(virtual - first, 1)
    returned = crossing[_RETURNED] / max(virtual - first, 1)
    sent = crossing[_SENT] / max(virtual - last, 1)
    held = ((own + crossing[_OUTPUT]) / virtual + sent) * flying
    held = max(held - shared * max(flying - many * first, 0), 0.0)
    after, at_end = 0.0, 0.0
    if pp > 1 and schedule not in (_GPIPE, _ONE_BY_ONE) and of.keeps_sent:
        after = sent + returned
        at_end = (crossing[_SENT] + crossing[_RETURNED]) * many
    if _SPLIT[schedule] and pp > 1:
        halves = chunks_between_halves(schedule, pp, virtual, many, rank)
        held += (kept[_WEIGHT_GRAD] / virtual + returned) * halves
        after, at_end = max(after, returned), max(at_end, crossing[_RETURNED] * many)
    done = min(after * (virtual * many - flying), at_end)
    # The end of the step may be the worst, if what is saved is less than what is sent.
    total: float = max(held + done, at_end)
    return total


@compiled
def _fill_fullest(
    rows: Columns,
    kept: Array,
    peaks: Array,
    crossing: Array,
    limits: Array,
    of: Bytes,
    worst: Array,
    excess: Array,
    owned: Array,
) -> None:
    for row in range(len(rows.pp)):
        pp, zero, pair = rows.pp[row], rows.zero_stage[row], rows.pair[row]
        many, again, ep = rows.num_microbatches[row], rows.recompute[row], rows.ep[row]
        ways = rows.dp_shard[row] * rows.cp[row] if zero > 0 else 1
        # All of dp_shard x cp share a copy, of experts at most their part of it.
        left = ep / max(ways, ep)
        worst[row], excess[row] = 0.0, -np.inf
        for place in range(min(pp, 3)):
            own, most = kept[pair, place], peaks[pair, place]
            trained = own[_TRAINED_DENSE] / ways + own[_TRAINED_EXPERTS] * left
            has = _Scalars(
                own[_DENSE] + own[_EXPERT],
                own[_DENSE] / ways + own[_EXPERT] * left,
                most[0],
                own[_TRAINED_DENSE] + own[_TRAINED_EXPERTS],
                trained,
                most[1],
            )
            parameters, gradients, states = _of_weights(has, zero, pp, many, of)
            rank, cuts = place if place < 2 else pp - 1, crossing[pair, place]
            activations = _activations(rows, row, rank, own, cuts, of)
            if place == 1 and pp > 3 and _SPLIT[rows.schedule[row]]:
                # The second has most in flight, the last but one most between halves.
                other = _activations(rows, row, pp - 2, own, cuts, of)
                activations = max(activations, other)
            activations = (activations + most[2 + again]) * of.swell
            buffers = crossing[pair, place, _RECEIVED]
            buffers *= many if of.all_waiting else 1
            total = parameters + gradients + states + activations + buffers + of.reserve
            worst[row] = max(worst[row], total)
            excess[row] = max(excess[row], total - limits[pp, place])
            if place == 0:
                owned[row] = trained


@dataclass(frozen=True, slots=True, kw_only=True)
class FullestRanks:
    """Memory of the rows of a strategy table; arrays of shape [n].

    Attributes:
        memory_bytes: Of the fullest of ranks 0, 1 and last.
        excess_bytes: Most bytes that one of them is over its limit.
        owned: Trained scalars that ZeRO leaves on a device of rank 0.
    """

    memory_bytes: Array
    excess_bytes: Array
    owned: Array


def fullest_ranks(
    rows: Columns,
    ranks: RankMemory,
    limits: Array,
    *,
    precision: Precision,
    optimizer: Optimizer,
    recipe: Recipe,
    on_gpu: bool,
) -> FullestRanks:
    """Peak memory of every row, on the ranks that can be fullest.

    Args:
        rows: The table.
        ranks: Of the cuts that ``rows.pair`` names.
        limits: Bytes that ranks 0, 1 and last may use, for each pp.
            Shape [most pp + 1, 3].
        precision: This and the rest as in :func:`planner.cost.memory.memory_parts`.
    """
    worst, excess, owned = np.empty((3, len(rows.pp)))
    kept = ranks.kept[:, :, [KEPT.index(name) for name in _KEPT]]
    peaks = ranks.peaks[:, :, [PEAKS.index(name) for name in _PEAKS]]
    crossing = ranks.crossing[:, :, [CROSSING.index(name) for name in _CROSSING]]
    _fill_fullest(
        rows,
        np.ascontiguousarray(kept),
        np.ascontiguousarray(peaks),
        np.ascontiguousarray(crossing),
        limits,
        bytes_of(precision, optimizer, recipe, on_gpu),
        worst,
        excess,
        owned,
    )
    return FullestRanks(memory_bytes=worst, excess_bytes=excess, owned=owned)
