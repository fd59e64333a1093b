"""One strategy priced exactly: its pipeline, what follows it, and all that it sends.

Every stage that reads a tied weight trains a copy of its own; after the last backward
the ranks that hold one sum the gradients up, one all-reduce a weight, and nothing hides
that. Copies on one rank are summed without sending. A weight that three ranks hold is
priced as two sums of two, which is no less than one of three.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import PricingContext
from planner.cost.kernels.roofline import optimizer_seconds
from planner.cost.pipelines.flushed import Pipeline, time_pipeline
from planner.cost.replicas import (
    ReplicaBytes,
    ReplicaRows,
    ReplicaTraffic,
    replica_pricing,
)
from planner.cost.replicas.all_reduce import is_compressed
from planner.cost.result import Cost
from planner.cost.strategy.memory import (
    ParameterShards,
    parameter_shards,
    stages_of_links,
    strategy_memory,
)
from planner.cost.strategy.stages import (
    StageTimes,
    by_rank,
    ranks_of_stages,
    recompute_codes,
    stage_sums,
    stage_times,
    unit_ranges,
)
from planner.cost.traffic.layers import TP_KINDS
from planner.cost.units import UnitCosts
from planner.schema import Strategy
from planner.simulate import ActionTable, actions
from planner.units import dtype_bytes

__all__ = [
    "PostPipeline",
    "Step",
    "TiedTraffic",
    "collective_bytes",
    "link_bytes",
    "price_breakdown",
    "price_strategy",
    "schedule_of",
    "tied_traffic",
    "time_step",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedTraffic:
    """What one device of each pp rank spends and moves per step. Shapes [pp].

    Attributes:
        exposed_s: Seconds of the sums that the rank takes part in.
        reduced_bytes: Their payload.
    """

    exposed_s: Array
    reduced_bytes: Array


def tied_traffic(
    context: PricingContext, strategy: Strategy, costs: UnitCosts, bounds: Index
) -> TiedTraffic:
    """Of one strategy, rank by rank."""
    mesh, rank = strategy.mesh, ranks_of_stages(strategy)
    ways = mesh.dp_shard * mesh.cp if strategy.zero_stage else 1
    size = dtype_bytes(context.precision.parameter) / ways
    first, second = (rank[stage] for stage in stages_of_links(costs, bounds))
    apart = (first != second) & (costs.tied_trained[0] > 0)
    payload, sums = np.zeros((2, mesh.pp))
    for ends in (first[apart], second[apart]):
        np.add.at(payload, ends, costs.tied_trained[0, apart] * size)
        np.add.at(sums, ends, 1.0)
    seconds = np.zeros(mesh.pp)
    if sums.any():
        fixed, per_byte = context.pair_line(mesh.pp)
        seconds = fixed * sums + per_byte * payload
    return TiedTraffic(exposed_s=seconds, reduced_bytes=payload)


def _by_rank(strategy: Strategy, stages: Array) -> Array:
    """Sum [k, stages] within pp ranks. Shape [k, pp]."""
    rank, pp = ranks_of_stages(strategy), strategy.mesh.pp
    return np.stack([by_rank(row, rank, pp) for row in stages])


def _sent_by_rank(strategy: Strategy, costs: UnitCosts, bounds: Index) -> Array:
    """Activations and gradients that each pp rank sends for a microbatch. [pp]."""
    rank = ranks_of_stages(strategy)
    cut = costs.sent_bytes[0, bounds[1:-1] - 1]
    # Neighbouring stages of a V's turning point lie on one rank.
    cut = np.where(rank[1:] == rank[:-1], 0.0, cut)
    both = np.concatenate([cut, [0.0]]) + np.concatenate([[0.0], cut])
    return by_rank(both, rank, strategy.mesh.pp)


def link_bytes(
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    traffic: ReplicaTraffic,
    tied: TiedTraffic,
) -> dict[str, float]:
    """Bytes that the busiest sender of each axis sends per step."""
    many, axes = strategy.num_microbatches, ("cp", "tp", "ep")
    units = np.stack([costs.cp_bytes[0], costs.tp_bytes[0], costs.ep_bytes[0]])
    sums = _by_rank(strategy, stage_sums(units, bounds))
    sent = {
        # Of two ranks that sum, each sends as much as there is.
        "pp": float(
            (_sent_by_rank(strategy, costs, bounds) * many + tied.reduced_bytes).max()
        ),
        "dp": float(traffic.sent_bytes.max()),
        **dict(zip(axes, (sums.max(axis=1) * many).tolist(), strict=True)),
    }
    return {axis: value for axis, value in sent.items() if value > 0}


def collective_bytes(
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    traffic: ReplicaTraffic,
    tied: TiedTraffic,
) -> dict[str, float]:
    """Payload per step by kind of call, each kind on its busiest rank."""
    many, codes = strategy.num_microbatches, recompute_codes(strategy)
    anything, everything = (codes > 0).astype(float), (codes == 2).astype(float)
    exchanged = 2 * costs.ep_payload[0] + costs.cp_payload[0]
    units = np.stack(
        [
            *costs.tp_payload[:, :, 0].reshape(-1, exchanged.shape[-1]),
            costs.summed_parameters[0],
            exchanged,
        ]
    )
    sums = stage_sums(units, bounds)
    # Of tp's calls by kind: what every step has, and what recomputing repeats.
    sums[1:-2:2] *= anything
    sums[-1] *= 2.0 + everything
    *tensor, summed, exchanged = _by_rank(strategy, sums)
    by_kind = {
        kind: (tensor[2 * i] + tensor[2 * i + 1]) * many
        for i, kind in enumerate(TP_KINDS)
    }
    ways = strategy.mesh.dp_shard * strategy.mesh.cp if strategy.zero_stage else 1
    size = dtype_bytes(strategy.precision.parameter) / ways
    payload = {
        "all_reduce": traffic.reduced_bytes
        + tied.reduced_bytes
        + by_kind["all_reduce"]
        + summed * size,
        "all_gather": traffic.gathered_bytes + by_kind["all_gather"],
        "reduce_scatter": traffic.scattered_bytes + by_kind["reduce_scatter"],
        "all_to_all": many * exchanged,
        "send": _sent_by_rank(strategy, costs, bounds) * many,
    }
    most = {kind: float(values.max()) for kind, values in payload.items()}
    return {kind: value for kind, value in most.items() if value > 0}


def schedule_of(strategy: Strategy) -> ActionTable | None:
    """The order of actions; None without a pipeline."""
    if strategy.mesh.pp == 1:
        return None
    return actions(
        strategy.schedule,
        strategy.mesh.pp,
        strategy.virtual_stages,
        strategy.num_microbatches,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PostPipeline:
    """After (or beside) the pipeline: copies made alike, weights updated.

    Attributes:
        owned: Scalars that each rank has.
        traffic: Gathers and reductions over replicas.
        held: Bytes that keeping copies together takes.
        tied: Sums of tied weights' gradients.
        update: Seconds of the optimizer on cores of its own. Shape [pp].
    """

    owned: ParameterShards
    traffic: ReplicaTraffic
    held: ReplicaBytes
    tied: TiedTraffic
    update: Array

    @property
    def exposed(self) -> Array:
        """Seconds of communication that nothing hides. Shape [pp]."""
        return self.traffic.exposed_s + self.tied.exposed_s


def _post_pipeline(
    context: PricingContext,
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    busy: tuple[Array, Array],
) -> PostPipeline:
    """Of each pp rank; ``busy`` are seconds of a microbatch, forward and backward."""
    mesh, pp = strategy.mesh, strategy.mesh.pp
    rank = ranks_of_stages(strategy)
    owned = parameter_shards(strategy, costs, bounds)
    units = by_rank(np.diff(bounds).astype(float), rank, pp)
    ways = mesh.dp_shard * mesh.cp if strategy.zero_stage else 1
    copies = mesh.dp_replicate * (1 if strategy.zero_stage else mesh.cp)
    groups = context.replicas(pp, ways, copies, mesh.tp)

    def full(value: int) -> Index:
        return np.full(pp, value, dtype=np.int64)

    rows = ReplicaRows(
        scalars=owned.whole,
        trained=owned.trained,
        units=units,
        zero_stage=full(strategy.zero_stage),
        pp=full(pp),
        num_microbatches=full(strategy.num_microbatches),
        virtual_stages=full(strategy.virtual_stages),
        forward_s=busy[0],
        backward_s=busy[1],
        compression=(
            strategy.gradient_compression if is_compressed(strategy) else "none"
        ),
    )
    pricing = replica_pricing(strategy.synchronisation)
    traffic = pricing.traffic(rows, groups, context)
    kinds = context.types_of_ranks(pp)
    tensors = by_rank(stage_sums(costs.tensors, bounds), rank, pp)
    update = np.array(
        [
            optimizer_seconds(
                owned.trained_shard[r],
                tensors[r],
                context.cluster.device_types[kinds[r]],
                context.optimizer,
                clip=strategy.grad_clip_norm is not None,
            )
            for r in range(pp)
        ]
    )
    tied = tied_traffic(context, strategy, costs, bounds)
    return PostPipeline(
        owned=owned,
        traffic=traffic,
        held=pricing.held(rows, context),
        tied=tied,
        update=update,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's parts, and what its end is made of.

    Attributes:
        breakdown_s: Seconds by part, see :data:`planner.cost.result.PARTS`.
        after: What follows the pipeline on each rank.
        times: One microbatch on every virtual stage, each process on cores of its own.
        pipeline_s: When the last rank is through with its microbatches.
        lag_s: How long before that each rank is. Shape [pp].
        stretch: By what sharing cores makes the pipeline longer.
        update_s: Seconds in which each rank updates its weights. Shape [pp].
    """

    breakdown_s: dict[str, float]
    after: PostPipeline
    times: StageTimes
    pipeline_s: float
    lag_s: Array
    stretch: float
    update_s: Array


def time_step(
    context: PricingContext,
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    table: ActionTable | None,
    fidelity: str,
) -> Step:
    """Time a strategy whose stages are given.

    Args:
        context: The request.
        strategy: With stages that list all units of the model in order.
        costs: Units under its one combination (C = 1).
        bounds: Of its stages, from :func:`planner.cost.strategy.stages.unit_ranges`.
        table: From :func:`schedule_of`; wanted by simulation alone.
        fidelity: ``simulated`` or ``analytic``.

    Raises:
        StrategyError: If a pipeline is to be simulated and there is no table.
    """
    times = stage_times(context, strategy, costs, bounds)
    pp, rank = strategy.mesh.pp, ranks_of_stages(strategy)
    run = time_pipeline(strategy, times, table, fidelity)
    crowd, everyone = context.core_contention(pp)
    forward = by_rank(times.forward, rank, pp) * crowd
    backward = by_rank(times.backward, rank, pp) * crowd
    after = _post_pipeline(context, strategy, costs, bounds, (forward, backward))
    # Processes that share cores can at best keep all cores busy all the time.
    cores = float(run.busy_s.sum()) / pp * everyone
    sent = max(run.sent_s * crowd, cores)
    # Ranks that end early reduce and update while the others still compute. That sets
    # no core free: where cores are what is short, every update adds to the step.
    lag = np.zeros(pp)
    if pp > 1 and cores < run.sent_s * crowd:
        lag = sent - run.done_s * crowd
    update = after.update * everyone
    ends = np.maximum(after.exposed + update - lag, 0.0)
    last = int(ends.argmax())
    breakdown = _breakdown(strategy, times, run, sent)
    share = ends[last] / max(after.exposed[last] + update[last], 1e-300)
    breakdown["data_parallel"] = float(after.exposed[last] * share)
    breakdown["optimizer"] = float(update[last] * share)
    return Step(
        breakdown_s=breakdown,
        after=after,
        times=times,
        pipeline_s=sent,
        lag_s=lag,
        stretch=sent / run.sent_s if run.sent_s > 0 else 1.0,
        update_s=update,
    )


def _breakdown(
    strategy: Strategy, times: StageTimes, run: Pipeline, until: float
) -> dict[str, float]:
    """Parts of the busiest rank's time, then what the pipeline adds.

    ``until`` is when the pipeline ends if processes share cores.
    """
    rank, pp = ranks_of_stages(strategy), strategy.mesh.pp
    slowest = int(run.busy_s.argmax())

    def of(values: Array) -> float:
        return float(by_rank(values, rank, pp)[slowest] * strategy.num_microbatches)

    parts = {
        "recompute": of(times.again),
        "tensor": of(times.tensor),
        "context": of(times.context),
        "expert": of(times.expert),
    }
    busy = float(run.busy_s[slowest])
    return {
        "compute": busy - sum(parts.values()),
        **parts,
        "pipeline_bubble": run.plain_s - busy,
        "pipeline_transfer": run.sent_s - run.plain_s,
        "shared_cores": until - run.sent_s,
    }


def price_breakdown(
    context: PricingContext,
    strategy: Strategy,
    costs: UnitCosts,
    fidelity: str = "simulated",
) -> dict[str, float]:
    """Seconds of a step by part, without memory; arguments as :func:`detailed_cost`."""
    bounds = unit_ranges(context, strategy)
    table = None if fidelity == "analytic" else schedule_of(strategy)
    found = time_step(context, strategy, costs, bounds, table, fidelity)
    return found.breakdown_s


def price_strategy(
    context: PricingContext,
    strategy: Strategy,
    costs: UnitCosts,
    fidelity: str = "simulated",
) -> Cost:
    """Time and memory of a strategy whose stages are given.

    Args:
        context: The request.
        strategy: With stages that list all units of the model in order.
        costs: Units under its one combination (C = 1).
        fidelity: ``simulated`` runs the schedule's exact order, ``analytic`` takes its
            closed form.
    Raises:
        StrategyError: If the stages are not the model's units.
    """
    bounds = unit_ranges(context, strategy)
    table = schedule_of(strategy)
    step = time_step(context, strategy, costs, bounds, table, fidelity)
    pp, after = strategy.mesh.pp, step.after
    return Cost(
        step_time_s=float(sum(step.breakdown_s.values())),
        breakdown_s=step.breakdown_s,
        memory=strategy_memory(
            context, strategy, costs, bounds, after.owned, after.held, table
        ),
        limit_bytes=context.limits_of_ranks(pp),
        device_type=context.types_of_ranks(pp),
        link_bytes=link_bytes(strategy, costs, bounds, after.traffic, after.tied),
        collective_bytes=collective_bytes(
            strategy, costs, bounds, after.traffic, after.tied
        ),
        fidelity="simulated" if fidelity == "simulated" else "analytic",
    )
