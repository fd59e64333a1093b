"""Peak memory of one strategy's devices, for everything that the executors really keep.

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

Frozen parameters have no gradients and no optimizer states.

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

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.context import PricingContext
from planner.cost.recipes import Recipe
from planner.cost.replicas import ReplicaBytes
from planner.cost.result import MemoryParts
from planner.cost.strategy.stages import (
    by_rank,
    ranks_of_stages,
    recompute_codes,
    stage_sums,
)
from planner.cost.table.memory import Devices, scalar_bytes, weight_bytes
from planner.cost.units import UnitCosts
from planner.schema import (
    Optimizer,
    Precision,
    Strategy,
)
from planner.simulate import ActionTable, peak_held_bytes

__all__ = [
    "ParameterShards",
    "PipelineMemory",
    "memory_parts",
    "parameter_shards",
    "pipeline_memory",
    "stages_of_links",
    "strategy_memory",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShards:
    """Scalars on one device of each pp rank, copies of tied weights too. Shapes [pp].

    Attributes:
        whole: Of its stages, after tp and ep.
        shard: What ZeRO leaves of them.
        trained: Those of ``whole`` that have a gradient.
        trained_shard: Those of ``shard``.
    """

    whole: Array
    shard: Array
    trained: Array
    trained_shard: Array


def stages_of_links(costs: UnitCosts, bounds: Index) -> tuple[Index, Index]:
    """Stages on which the two ends of each tied link lie. Shapes [links]."""
    first, second = (
        np.searchsorted(bounds, units, side="right") - 1
        for units in (costs.ties.first, costs.ties.second)
    )
    return first, second


def parameter_shards(
    strategy: Strategy, costs: UnitCosts, bounds: Index
) -> ParameterShards:
    """Count them.

    Args:
        strategy: With its stages.
        costs: Of its one combination.
        bounds: Unit at which each stage starts. Shape [stages + 1].
    """
    mesh, rank = strategy.mesh, ranks_of_stages(strategy)
    ways = mesh.dp_shard * mesh.cp if strategy.zero_stage else 1
    left = mesh.ep / max(ways, mesh.ep)
    first, second = stages_of_links(costs, bounds)

    def of_ranks(units: Array, copies: Array) -> Array:
        sums = stage_sums(units, bounds)
        np.add.at(sums, second, np.where(first != second, copies, 0.0))
        return by_rank(sums, rank, mesh.pp)

    no_copies = np.zeros(len(costs.ties))
    dense = of_ranks(costs.dense_parameters[0], costs.tied_parameters[0])
    expert = of_ranks(costs.expert_parameters[0], no_copies)
    trained = of_ranks(costs.trained_dense[0], costs.tied_trained[0])
    trained_experts = of_ranks(costs.trained_experts[0], no_copies)
    return ParameterShards(
        whole=dense + expert,
        shard=dense / ways + expert * left,
        trained=trained + trained_experts,
        trained_shard=trained / ways + trained_experts * left,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMemory:
    """Bytes of each pp rank. Shapes [pp].

    Attributes:
        activations: Of all microbatches at once, working sets apart.
        received: Buffers of one microbatch over all stages.
    """

    activations: Array
    received: Array


def pipeline_memory(
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    table: ActionTable | None,
    *,
    keeps_sent: bool,
    keeps_graph: bool = True,
) -> PipelineMemory:
    """Count what the schedule's exact order holds.

    Args:
        strategy: With its stages.
        costs: Of its one combination.
        bounds: Unit at which each stage starts. Shape [stages + 1].
        table: The order of actions; None without a pipeline.
        keeps_sent: Whether requests keep what they sent: gloo's do.
        keeps_graph: Of the recipe: what waits between the halves of a split backward.
    """
    rank, pp = ranks_of_stages(strategy), strategy.mesh.pp
    kept = stage_sums(costs.saved_bytes[:, 0], bounds)
    kept = kept[recompute_codes(strategy), np.arange(len(rank))]
    if table is None:
        return PipelineMemory(
            activations=by_rank(kept, rank, pp), received=np.zeros(pp)
        )
    cut = costs.cut_bytes[0, bounds[1:-1] - 1]
    # The two stages at the fold of a V lie on one rank: nothing is sent, and a stage's
    # output is the other's buffer.
    crossing = np.where(rank[1:] == rank[:-1], 0.0, cut)
    none = np.zeros(1)
    returned = np.concatenate([none, crossing])
    sent = np.concatenate([crossing, none])
    output = np.concatenate([np.zeros(len(cut)), costs.output_bytes])
    shared = np.concatenate([none, costs.shared_bytes[0, bounds[1:-1] - 1]])
    flying = np.maximum(kept + sent + output - shared, 0.0)
    split, after = flying, returned if keeps_graph else 0.0 * returned
    if strategy.schedule_spec.splits_backward:
        halves = stage_sums(costs.weight_grad_bytes[0], bounds) + after
        halves -= 0.0 if keeps_graph else output
        halves[0] = 0.0
        split = np.maximum(flying + halves, 0.0)
    still = keeps_sent and not strategy.schedule_spec.waits_for_sends
    held = peak_held_bytes(
        table,
        flying,
        split,
        after_split_bytes=returned + sent if still else after,
        after_whole_bytes=returned + sent if still else 0.0,
    )
    buffers = np.concatenate([none, cut]) + np.concatenate([cut, none])
    return PipelineMemory(activations=held, received=by_rank(buffers, rank, pp))


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
    of = scalar_bytes(precision, optimizer, recipe, on_gpu)
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


def strategy_memory(
    context: PricingContext,
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    owned: ParameterShards,
    exchanged: ReplicaBytes,
    table: ActionTable | None,
) -> MemoryParts:
    """Peak memory of one device of each pp rank. Shapes [pp]."""
    pp, rank = strategy.mesh.pp, ranks_of_stages(strategy)
    codes = recompute_codes(strategy)
    transient, largest, most_trained = np.zeros((3, pp))
    scalars = costs.dense_parameters[0] + costs.expert_parameters[0]
    trained = costs.trained_dense[0] + costs.trained_experts[0]
    working = np.maximum.reduceat(costs.transient_bytes[:, 0], bounds[:-1], axis=1)
    np.maximum.at(transient, rank, working[codes, np.arange(len(rank))])
    np.maximum.at(largest, rank, np.maximum.reduceat(scalars, bounds[:-1]))
    np.maximum.at(most_trained, rank, np.maximum.reduceat(trained, bounds[:-1]))
    held = pipeline_memory(
        strategy,
        costs,
        bounds,
        table,
        keeps_sent=not context.on_gpu,
        keeps_graph=context.recipe.keeps_graph,
    )
    parts = memory_parts(
        parameters=owned.whole,
        sharded=owned.shard,
        largest_unit=largest,
        trained=owned.trained,
        trained_sharded=owned.trained_shard,
        largest_trained=most_trained,
        zero_stage=strategy.zero_stage,
        pp=pp,
        num_microbatches=strategy.num_microbatches,
        kept_bytes=held.activations,
        transient_bytes=transient,
        receive_bytes=held.received,
        precision=context.precision,
        optimizer=context.optimizer,
        recipe=context.recipe,
        on_gpu=context.on_gpu,
    )
    return replace(
        parts,
        gradients=parts.gradients + exchanged.kept,
        # Activations are gone when the last gradients are exchanged.
        activations=np.maximum(parts.activations, exchanged.working),
    )
