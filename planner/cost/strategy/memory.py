"""Peak memory of one strategy's devices, for everything that the executors really keep.

parameters  the shard (or all) in ``precision.parameter``, plus the gathered copy in the
            compute dtype: resident between forward and backward under ZeRO 1 and 2
            and in any pipeline, whose backward leaves a stage gathered
gradients   sharded when ZeRO >= 2 and there is no pipeline: a pipeline reduces each
            stage once, after its last microbatch, so until then they are whole
optimizer   sharded from ZeRO 1 on
activations kept bytes x microbatches in flight, plus the working set of one unit, with
            weights gathered and gradients reduced for it alone under ZeRO
buffers     receive buffers of the pipeline
reserve     context, communicators, allocator, and what it loses to fragments (GPU)

Frozen parameters have no gradients and no optimizer states.

The peak is the worst of three moments. When the first backward begins, all that may be
in flight is, and there are no gradients yet, but where a framework allocates them
ahead. Later ones have them, and as much in flight if a forward comes before them. Under
ZeRO 3 every forward frees its stage: all of a pipeline's stage is gathered only where
one backward follows upon another.

A stage has buffers for what every microbatch receives, activations and gradients. What
its first op saves is such a buffer, so that it is counted there. Beside what it saves
a microbatch in flight holds what the stage sent on, on the last stage what the model
returned: torch needs it to begin the backward.

Where the backward is split, the weight gradients wait for their half with all that
was saved, with the gradients from which they will be made, and with the gradient that
was sent back, which stays until the step ends. Stage 0 has nobody to send a gradient
to: its second half is the whole backward. On gloo, requests of the schedules that hold
several stages keep what they sent until the step ends.

Megatron-LM queues the inputs and the gradients of its linear layers instead, and lets
go of the rest of the graph: of a layer of a GPT 32 bytes for each of sbh values wait,
and 34 were saved (Qi et al. 2023, Zero Bubble Pipeline Parallelism, 2401.10241,
section 2 and table 1). They are taken as equal. ``keeps_graph`` is False there.
Source: torch.distributed.pipelining, stage.py (_PipelineStageBase), _backward.py
(stage_backward, stage_backward_input) and schedules.py (_PipelineScheduleRuntime),
torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.context import ScalarBytes
from planner.cost.pipelines import PipelineMemory
from planner.cost.replicas import ReplicaBytes
from planner.cost.result import MemoryParts
from planner.cost.strategy.stages import Stages
from planner.cost.table.peak import IN_FLIGHT, Devices, peak_bytes

__all__ = ["memory_parts", "strategy_memory"]

Array = NDArray[np.float64]


def memory_parts(
    of: ScalarBytes,
    *,
    parameters: ArrayLike,
    sharded: ArrayLike,
    zero_stage: ArrayLike,
    pp: ArrayLike,
    num_microbatches: ArrayLike,
    held_bytes: Sequence[ArrayLike],
    working_bytes: Sequence[ArrayLike],
    receive_bytes: ArrayLike,
    trained: ArrayLike | None = None,
    trained_sharded: ArrayLike | None = None,
    first_trained: ArrayLike = 0.0,
    alone_bytes: Sequence[ArrayLike] = (0.0, 0.0, 0.0),
    replicas: ArrayLike = 0,
    shards: ArrayLike = 1,
) -> MemoryParts:
    """Memory of devices, all arguments broadcast against each other.

    Args:
        of: Bytes of scalars, see :attr:`PricingContext.scalar_bytes`.
        parameters: Scalars that the device's stages have, after tp and ep.
        sharded: What ZeRO leaves of them on one device.
        zero_stage: 0 to 3.
        pp: Pipeline degree.
        num_microbatches: Per step.
        held_bytes: Activations of all microbatches in flight when the first backward
            begins, when a later one begins, and when one follows upon another.
        working_bytes: Working set of one unit beyond that, by
            :data:`planner.cost.table.peak.IN_FLIGHT`, then that of a unit that is
            the last to be done.
        receive_bytes: What one microbatch receives over all of its stages.
        trained: Part of ``parameters`` that has a gradient; all if left out.
        trained_sharded: Part of ``sharded`` that has one; all if left out.
        first_trained: Trained scalars of the first unit.
        alone_bytes: Cast weights, gradients and working set where one device has the
            model, see :func:`planner.cost.unit_memory.alone_bytes_of`.
        replicas: Degree of dp_replicate; 0 where ``alone_bytes`` is left out.
        shards: Of dp_shard times that of cp.
    """
    sizes = (
        parameters,
        sharded,
        parameters if trained is None else trained,
        sharded if trained_sharded is None else trained_sharded,
        first_trained,
        *held_bytes,
        *working_bytes,
        *alone_bytes,
    )
    counts = (zero_stage, pp, num_microbatches, replicas, shards)
    columns = np.broadcast_arrays(
        *(np.asarray(size, dtype=np.float64) for size in sizes),
        *(np.asarray(count, dtype=np.int64) for count in counts),
    )
    stacked = np.stack([column.ravel() for column in columns[: len(sizes)]], axis=1)
    parts_of = np.split(stacked, (5, 8, 8 + 2 * len(IN_FLIGHT)), axis=1)
    others = (column.flatten() for column in columns[len(sizes) :])
    each = Devices(*(np.ascontiguousarray(part) for part in parts_of), *others)
    found = peak_bytes(each, of)
    activations = found[3].reshape(columns[0].shape)
    waiting = num_microbatches if of.all_waiting else 1
    parts = (
        *found.reshape(4, *columns[0].shape),
        np.asarray(receive_bytes, dtype=float) * waiting,
        of.reserve + activations * (of.swell - 1.0),
    )
    shape = np.broadcast_shapes(*(part.shape for part in parts))
    names = (part.name for part in fields(MemoryParts))
    return MemoryParts(
        **{
            name: np.broadcast_to(part, shape)
            for name, part in zip(names, parts, strict=True)
        }
    )


def strategy_memory(
    stages: Stages, pipeline: PipelineMemory, exchanged: ReplicaBytes
) -> MemoryParts:
    """Peak memory of one device of each pp rank. Shapes [pp].

    Args:
        stages: Of the strategy.
        pipeline: What its schedule holds.
        exchanged: What keeping copies together takes.
    """
    strategy, costs, shards = stages.strategy, stages.costs, stages.parameters
    mesh = strategy.mesh
    of = stages.context.scalar_bytes
    lone = mesh.shards == 1 and (mesh.dp_replicate == 1 or of.own_buckets)
    casts = int(of.own_casts and lone)
    parts = memory_parts(
        stages.context.scalar_bytes,
        parameters=shards.whole,
        sharded=shards.shard,
        trained=shards.trained,
        trained_sharded=shards.trained_shard,
        first_trained=costs.reduced_last[0],
        alone_bytes=[*costs.alone_bytes[casts, :, stages.recompute[0], 0]],
        replicas=mesh.dp_replicate,
        shards=mesh.shards,
        zero_stage=strategy.zero_stage,
        pp=stages.pp,
        num_microbatches=strategy.num_microbatches,
        held_bytes=(pipeline.activations, pipeline.later, pipeline.again),
        working_bytes=_working_bytes(stages),
        receive_bytes=pipeline.received,
    )
    return replace(
        parts,
        parameters=parts.parameters + exchanged.weights + pipeline.versions,
        gradients=parts.gradients + exchanged.kept,
        optimizer=parts.optimizer * stages.state_share + exchanged.states,
        # Activations are gone when the last gradients are exchanged.
        activations=exchanged.beside(parts.activations),
    )


def _working_bytes(stages: Stages) -> Sequence[Array]:
    """Working sets of one unit as :func:`memory_parts` takes them. Shapes [pp]."""
    costs = stages.costs
    if stages.pp == 1:
        return [*costs.whole_bytes[:, :, stages.recompute[0], 0].reshape(-1)]
    return [stages.working_bytes] * (2 * len(IN_FLIGHT))
