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

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.recipes import Recipe
from planner.schema import Optimizer, Precision
from planner.units import dtype_bytes

__all__ = ["MemoryParts", "chunks_in_flight", "memory_parts"]

Array = NDArray[np.float64]


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


def _compute_bytes(precision: Precision) -> int:
    # float8 products still gather and keep bfloat16 weights and activations.
    name = "bfloat16" if precision.compute == "float8" else precision.compute
    return dtype_bytes(name)


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
    count = np.asarray(parameters, dtype=float)
    shard, zero = np.asarray(sharded, dtype=float), np.asarray(zero_stage)
    stored, compute = dtype_bytes(precision.parameter), _compute_bytes(precision)
    reduce = dtype_bytes(precision.reduce)
    unit = np.asarray(largest_unit, dtype=float)
    split = zero >= 1
    gathered = np.where(
        (zero == 3) & (np.asarray(pp) == 1),
        np.minimum(count, 2 * unit) * compute,
        np.where(split | (compute != stored), count * compute, 0.0),
    )
    owned = np.where(split, shard, count)
    held = owned * stored + gathered
    piled = (np.asarray(pp) > 1) | (zero == 1)
    many = np.asarray(num_microbatches) > 1
    whole = count * np.where(many, max(reduce, compute), compute)
    gradients = np.where(
        split,
        shard * stored + np.where(piled, whole, 2 * unit * reduce),
        count * stored,
    )
    states = optimizer.states_per_parameter * dtype_bytes(optimizer.state_dtype)
    optimizer_bytes = owned * states
    activations = np.asarray(kept_bytes, dtype=float) + np.asarray(transient_bytes)
    waiting = num_microbatches if recipe.receive_buffers == "all" else 1
    buffers = np.asarray(receive_bytes, dtype=float) * waiting
    if on_gpu:
        activations = np.asarray(activations * (1 + recipe.fragmentation))
    reserve = np.full(np.shape(held), recipe.reserve_bytes if on_gpu else 0.0)
    shape = np.broadcast_shapes(held.shape, activations.shape, buffers.shape)
    return MemoryParts(
        parameters=np.broadcast_to(held, shape),
        gradients=np.broadcast_to(gradients, shape),
        optimizer=np.broadcast_to(optimizer_bytes, shape),
        activations=np.broadcast_to(activations, shape),
        buffers=np.broadcast_to(buffers, shape),
        reserve=np.broadcast_to(reserve, shape),
    )


#: How many chunks more each rank before the last holds, by schedule.
_PER_RANK = np.array([0, 1, 2, 0, 2, 0, 0])


def chunks_in_flight(
    schedule: NDArray[np.int64],
    pp: NDArray[np.int64],
    virtual_stages: NDArray[np.int64],
    num_microbatches: NDArray[np.int64],
    rank: NDArray[np.int64],
) -> Array:
    """Microbatch activations that a pp rank holds at once, counted in virtual stages.

    Closed forms of torch's schedules, for pruning: exact for GPipe, 1F1B, LoopedBFS and
    Interleaved1F1B, an upper bound for the zero-bubble ones; the finalists are counted
    on their action tables. All arguments broadcast. ``schedule`` indexes
    :data:`planner.schema.SCHEDULES`.

    Source: Narayanan et al. 2021 (2104.04473), section 2.2: 1F1B holds pp - rank, an
    interleaved schedule (v - 1) pp + 2 (pp - 1 - rank) + 1 chunks if pp divides M.
    """
    virtual, many = virtual_stages, num_microbatches
    everything = virtual * many
    # Microbatches that a rank takes through one virtual stage before the next.
    round_size = many // np.maximum(many // pp, 1)
    on_last_rank = [
        everything,  # GPipe
        np.ones_like(everything),  # 1F1B
        (virtual - 1) * round_size + 1,  # Interleaved1F1B
        everything,  # LoopedBFS
        virtual * round_size + 1,  # InterleavedZeroBubble
        2 * pp,  # ZBVZeroBubble: as much as 1F1B, on every rank
        2 * pp + 2,  # DualPipeV
    ]
    held = np.choose(schedule, on_last_rank) + _PER_RANK[schedule] * (pp - 1 - rank)
    return np.asarray(
        np.where(pp > 1, np.minimum(held, everything), virtual), dtype=float
    )
