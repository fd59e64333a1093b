"""Peak memory of one device, by category, for what the executors really keep.

parameters  the shard (or all) in ``precision.parameter``, plus the gathered copy in the
            compute dtype: resident between forward and backward under ZeRO 1 and 2
            and in any pipeline, whose backward leaves a stage gathered; only about two
            units at a time under ZeRO 3 without one (FSDP2 prefetches one)
gradients   sharded when ZeRO >= 2 and there is no pipeline: a pipeline reduces each
            stage once, after its last microbatch, so until then they are whole
optimizer   sharded from ZeRO 1 on
activations kept bytes x microbatches in flight, plus the working set of one unit
buffers     receive buffers of the pipeline
reserve     context, communicators, allocator (GPU)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.columns import Columns
from planner.cost.recipes import Recipe
from planner.cost.summaries import KEPT, PEAKS, Summaries
from planner.schema import SCHEDULES, Optimizer, Precision
from planner.simulate.compiled import compiled
from planner.units import dtype_bytes

__all__ = [
    "FullestRanks",
    "MemoryParts",
    "chunks_in_flight",
    "fullest_ranks",
    "memory_parts",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

# Compiled code is kept as long as this file is unchanged: what it takes for granted
# about the order of columns must be said in here. Recompute kinds come last.
_KEPT = ("dense", "expert", "none", "selective", "full")
_PEAKS = ("largest_unit", "none", "selective", "full")
_GPIPE, _LOOPED_BFS = SCHEDULES.index("GPipe"), SCHEDULES.index("LoopedBFS")
_ONE_BY_ONE, _INTERLEAVED = SCHEDULES.index("1F1B"), SCHEDULES.index("Interleaved1F1B")
_ZERO_BUBBLE = SCHEDULES.index("InterleavedZeroBubble")
_V = SCHEDULES.index("ZBVZeroBubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes on one device by category; all of one shape."""

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array
    reserve: Array

    @property
    def total(self) -> Array:
        """Sum of the categories."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.buffers
            + self.reserve
        )


class _Bytes(NamedTuple):
    """Bytes of a scalar by purpose, and what a recipe adds."""

    stored: float
    compute: float
    reduce: float
    states: float
    swell: float
    reserve: float
    all_waiting: bool


def _bytes_of(
    precision: Precision, optimizer: Optimizer, recipe: Recipe, on_gpu: bool
) -> _Bytes:
    # float8 products still gather and keep bfloat16 weights and activations.
    compute = "bfloat16" if precision.compute == "float8" else precision.compute
    states = optimizer.states_per_parameter * dtype_bytes(optimizer.state_dtype)
    return _Bytes(
        stored=float(dtype_bytes(precision.parameter)),
        compute=float(dtype_bytes(compute)),
        reduce=float(dtype_bytes(precision.reduce)),
        states=float(states),
        swell=1.0 + recipe.fragmentation if on_gpu else 1.0,
        reserve=float(recipe.reserve_bytes) if on_gpu else 0.0,
        all_waiting=recipe.receive_buffers == "all",
    )


@compiled
def _of_weights(
    scalars: float,
    shard: float,
    unit: float,
    zero: int,
    pp: int,
    many: int,
    of: _Bytes,
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer states on one device.

    Of ``scalars`` parameters ZeRO leaves ``shard``; the largest unit has ``unit``.
    """
    gathered = 0.0
    if zero == 3 and pp == 1:
        gathered = min(scalars, 2 * unit) * of.compute
    elif zero >= 1 or of.compute != of.stored:
        gathered = scalars * of.compute
    owned, gradients = scalars, scalars * of.stored
    if zero >= 1:
        wide = max(of.reduce, of.compute) if many > 1 else of.compute
        whole = scalars * wide if pp > 1 or zero == 1 else 2 * unit * of.reduce
        owned, gradients = shard, shard * of.stored + whole
    return owned * of.stored + gathered, gradients, owned * of.states


class _Devices(NamedTuple):
    """Arguments of :func:`_of_weights` for many. Shapes [n]."""

    scalars: Array
    shard: Array
    unit: Array
    zero: Index
    pp: Index
    many: Index


@compiled
def _of_all_weights(each: _Devices, of: _Bytes, parts: Array) -> None:
    for i in range(len(each.scalars)):
        sizes = each.scalars[i], each.shard[i], each.unit[i]
        parts[0, i], parts[1, i], parts[2, i] = _of_weights(
            *sizes, each.zero[i], each.pp[i], each.many[i], of
        )


def memory_parts(
    *,
    parameters: ArrayLike,
    sharded: ArrayLike,
    largest_unit: ArrayLike,
    zero_stage: ArrayLike,
    pp: ArrayLike,
    num_microbatches: ArrayLike,
    kept_bytes: ArrayLike,
    transient_bytes: ArrayLike,
    receive_bytes: ArrayLike,
    precision: Precision,
    optimizer: Optimizer,
    recipe: Recipe,
    on_gpu: bool,
) -> MemoryParts:
    """Memory of devices, all arguments broadcast against each other.

    Args:
        parameters: Scalars that the device's stages have, after tp and ep.
        sharded: What ZeRO leaves of them on one device.
        largest_unit: Scalars of the largest unit among them.
        zero_stage: 0 to 3.
        pp: Pipeline degree.
        num_microbatches: Per step.
        kept_bytes: Activations of all microbatches in flight.
        transient_bytes: Working set of one unit beyond that.
        receive_bytes: What one microbatch receives over all of its stages.
        precision: Dtypes.
        optimizer: States.
        recipe: Of the framework.
        on_gpu: Whether a context and a caching allocator take their share.
    """
    sizes = (parameters, sharded, largest_unit)
    columns = np.broadcast_arrays(
        *(np.asarray(size, dtype=np.float64) for size in sizes),
        *(np.asarray(x, dtype=np.int64) for x in (zero_stage, pp, num_microbatches)),
    )
    of = _bytes_of(precision, optimizer, recipe, on_gpu)
    weights = np.empty((3, columns[0].size))
    _of_all_weights(_Devices(*(column.flatten() for column in columns)), of, weights)
    activations = np.asarray(kept_bytes, dtype=float) + np.asarray(transient_bytes)
    waiting = num_microbatches if of.all_waiting else 1
    parts = (
        *weights.reshape(3, *columns[0].shape),
        activations * of.swell,
        np.asarray(receive_bytes, dtype=float) * waiting,
        np.asarray(of.reserve),
    )
    shape = np.broadcast_shapes(*(part.shape for part in parts))
    names = (part.name for part in fields(MemoryParts))
    return MemoryParts(
        **{
            name: np.broadcast_to(part, shape)
            for name, part in zip(names, parts, strict=True)
        }
    )


@compiled
def chunks_in_flight(
    schedule: int, pp: int, virtual_stages: int, num_microbatches: int, rank: int
) -> int:
    """Microbatch activations that a pp rank holds at once, counted in virtual stages.

    Closed forms of torch's schedules, for pruning: exact for GPipe, 1F1B, LoopedBFS and
    Interleaved1F1B, an upper bound for the zero-bubble ones; the finalists are counted
    on their action tables.

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
        rounds = virtual_stages - (schedule == _INTERLEAVED)
        return min(rounds * round_size + 1 + 2 * behind, everything)
    # A V: as much as 1F1B, on every rank; DualPipeV starts one more each way.
    return min(2 * pp + (0 if schedule == _V else 2), everything)


@compiled
def _fill_fullest(
    rows: Columns,
    kept: Array,
    peaks: Array,
    receive: Array,
    limits: Array,
    of: _Bytes,
    worst: Array,
    excess: Array,
    owned: Array,
) -> None:
    for row in range(len(rows.pp)):
        pp, zero, pair = rows.pp[row], rows.zero_stage[row], rows.pair[row]
        virtual, many = rows.virtual_stages[row], rows.num_microbatches[row]
        again, ep = rows.recompute[row], rows.ep[row]
        ways = rows.dp_shard[row] * rows.cp[row] if zero > 0 else 1
        worst[row], excess[row] = 0.0, -np.inf
        for place in range(min(pp, 3)):
            rank = place if place < 2 else pp - 1
            dense, expert = kept[pair, place, 0], kept[pair, place, 1]
            # All of dp_shard x cp share a copy, of experts at most their part of it.
            left = dense / ways + expert * ep / max(ways, ep)
            chunks = chunks_in_flight(rows.schedule[row], pp, virtual, many, rank)
            parameters, gradients, states = _of_weights(
                dense + expert, left, peaks[pair, place, 0], zero, pp, many, of
            )
            activations = kept[pair, place, 2 + again] * chunks / virtual
            activations = (activations + peaks[pair, place, 1 + again]) * of.swell
            buffers = receive[pair, place] * (many if of.all_waiting else 1)
            total = parameters + gradients + states + activations + buffers + of.reserve
            worst[row] = max(worst[row], total)
            excess[row] = max(excess[row], total - limits[pp, place])
            if place == 0:
                owned[row] = left


@dataclass(frozen=True, slots=True, kw_only=True)
class FullestRanks:
    """Memory of the rows of a strategy table; arrays of shape [n].

    Attributes:
        memory_bytes: Of the fullest of ranks 0, 1 and last.
        excess_bytes: Most bytes that one of them is over its limit.
        owned: Scalars that ZeRO leaves on a device of rank 0.
    """

    memory_bytes: Array
    excess_bytes: Array
    owned: Array


def fullest_ranks(
    rows: Columns,
    summaries: Summaries,
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
        summaries: Of the cuts that ``rows.pair`` names.
        limits: Bytes that ranks 0, 1 and last may use, for each pp.
            Shape [most pp + 1, 3].
        precision: This and the rest as in :func:`memory_parts`.
    """
    worst, excess, owned = np.empty((3, len(rows.pp)))
    kept = summaries.kept[:, :, [KEPT.index(name) for name in _KEPT]]
    peaks = summaries.peaks[:, :, [PEAKS.index(name) for name in _PEAKS]]
    _fill_fullest(
        rows,
        np.ascontiguousarray(kept),
        np.ascontiguousarray(peaks),
        summaries.receive_bytes,
        limits,
        _bytes_of(precision, optimizer, recipe, on_gpu),
        worst,
        excess,
        owned,
    )
    return FullestRanks(memory_bytes=worst, excess_bytes=excess, owned=owned)
