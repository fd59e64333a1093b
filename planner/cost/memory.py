"""Peak memory of one device, by category, for what the executors really keep.

parameters  the shard (or all) in ``precision.parameter``, plus the gathered copy in the
            compute dtype: resident between forward and backward under ZeRO 1 and 2
            and in any pipeline, whose backward leaves a stage gathered; only about two
            units at a time under ZeRO 3 without one (FSDP2 prefetches one)
gradients   sharded when ZeRO >= 2 and there is no pipeline: a pipeline reduces each
            stage once, after its last microbatch, so until then they are whole
optimizer   sharded from ZeRO 1 on

Of frozen parameters there is nothing but the parameters.

activations kept bytes x microbatches in flight, plus the working set of one unit; in
            a pipeline as :mod:`planner.cost.held` says
buffers     receive buffers of the pipeline
reserve     context, communicators, allocator (GPU)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.recipes import Recipe
from planner.cost.row_memory import Devices, weight_bytes
from planner.cost.scalar_bytes import bytes_of
from planner.schema import Optimizer, Precision

__all__ = ["MemoryParts", "memory_parts"]

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
    trained: ArrayLike | None = None,
    trained_sharded: ArrayLike | None = None,
    largest_trained: ArrayLike | None = None,
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
        trained: Those of ``parameters`` that have a gradient; all if left out.
        trained_sharded: Those of ``sharded``; all if left out.
        largest_trained: Of the unit that has most; ``largest_unit`` if left out.
    """
    sizes = (
        parameters,
        sharded,
        largest_unit,
        parameters if trained is None else trained,
        sharded if trained_sharded is None else trained_sharded,
        largest_unit if largest_trained is None else largest_trained,
    )
    columns = np.broadcast_arrays(
        *(np.asarray(size, dtype=np.float64) for size in sizes),
        *(np.asarray(x, dtype=np.int64) for x in (zero_stage, pp, num_microbatches)),
    )
    of = bytes_of(precision, optimizer, recipe, on_gpu)
    scalars = np.stack([column.ravel() for column in columns[:6]], axis=1)
    others = (column.flatten() for column in columns[6:])
    weights = weight_bytes(Devices(scalars, *others), of)
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
