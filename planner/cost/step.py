"""The parts of one step: its pipeline, and what makes copies alike after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.compression import compressed_traffic
from planner.cost.data_parallel import ReplicaRows, ReplicaTraffic, replica_traffic
from planner.cost.owned import OwnedScalars, owned_scalars
from planner.cost.pipelined import Pipeline, time_pipeline
from planner.cost.setting import Setting
from planner.cost.stage_times import (
    StageTimes,
    by_rank,
    ranks_of_stages,
    stage_sums,
    stage_times,
)
from planner.cost.tied import TiedTraffic, tied_traffic
from planner.cost.unit_costs import UnitCosts
from planner.cost.update import optimizer_seconds
from planner.schema import Strategy
from planner.simulate import ActionTable, actions

__all__ = ["Step", "Tail", "is_compressed", "schedule_of", "time_step"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


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


def is_compressed(strategy: Strategy) -> bool:
    """Whether replicas exchange smaller gradients, which only plain ones can."""
    mesh = strategy.mesh
    plain = mesh.pp == mesh.tp == mesh.dp_shard == 1 and mesh.dp_replicate * mesh.cp > 1
    return plain and strategy.gradient_compression != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """After (or beside) the pipeline: copies made alike, weights updated.

    Attributes:
        owned: Scalars that each rank has.
        traffic: Gathers and reductions over replicas.
        tied: Sums of tied weights' gradients.
        update: Seconds of the optimizer on cores of its own. Shape [pp].
    """

    owned: OwnedScalars
    traffic: ReplicaTraffic
    tied: TiedTraffic
    update: Array

    @property
    def exposed(self) -> Array:
        """Seconds of communication that nothing hides. Shape [pp]."""
        return self.traffic.exposed_s + self.tied.exposed_s


def _tail(
    setting: Setting,
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    busy: tuple[Array, Array],
) -> Tail:
    """Of each pp rank; ``busy`` are seconds of a microbatch, forward and backward."""
    mesh, pp = strategy.mesh, strategy.mesh.pp
    rank = ranks_of_stages(strategy)
    owned = owned_scalars(strategy, costs, bounds)
    units = by_rank(np.diff(bounds).astype(float), rank, pp)
    ways = mesh.dp_shard * mesh.cp if strategy.zero_stage else 1
    copies = mesh.dp_replicate * (1 if strategy.zero_stage else mesh.cp)
    groups = setting.replicas(pp, ways, copies, mesh.tp)
    if is_compressed(strategy):
        how = strategy.gradient_compression
        traffic = compressed_traffic(setting, how, groups.replicate, units, busy[1])
    else:

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
        )
        traffic = replica_traffic(
            rows, groups, setting.precision, setting.recipe, on_gpu=setting.on_gpu
        )
    kinds = setting.types_of_ranks(pp)
    tensors = by_rank(stage_sums(costs.tensors, bounds), rank, pp)
    update = np.array(
        [
            optimizer_seconds(
                owned.trained_shard[r],
                tensors[r],
                setting.cluster.device_types[kinds[r]],
                setting.optimizer,
                clip=strategy.grad_clip_norm is not None,
            )
            for r in range(pp)
        ]
    )
    tied = tied_traffic(setting, strategy, costs, bounds)
    return Tail(owned=owned, traffic=traffic, tied=tied, update=update)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's parts, and what its end is made of.

    Attributes:
        breakdown_s: Seconds by part, see :data:`planner.cost.result.PARTS`.
        tail: What follows the pipeline on each rank.
        times: One microbatch on every virtual stage, each process on cores of its own.
        pipeline_s: When the last rank is through with its microbatches.
        lag_s: How long before that each rank is. Shape [pp].
        stretch: By what sharing cores makes the pipeline longer.
        update_s: Seconds in which each rank updates its weights. Shape [pp].
    """

    breakdown_s: dict[str, float]
    tail: Tail
    times: StageTimes
    pipeline_s: float
    lag_s: Array
    stretch: float
    update_s: Array


def time_step(
    setting: Setting,
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    table: ActionTable | None,
    fidelity: str,
) -> Step:
    """Time a strategy whose stages are given.

    Args:
        setting: The request.
        strategy: With stages that list all units of the model in order.
        costs: Units under its one combination (C = 1).
        bounds: Of its stages, from :func:`planner.cost.stage_times.unit_ranges`.
        table: From :func:`schedule_of`; wanted by simulation alone.
        fidelity: ``simulated`` or ``analytic``.

    Raises:
        StrategyError: If a pipeline is to be simulated and there is no table.
    """
    times = stage_times(setting, strategy, costs, bounds)
    pp, rank = strategy.mesh.pp, ranks_of_stages(strategy)
    run = time_pipeline(strategy, times, table, fidelity)
    crowd, everyone = setting.crowding(pp)
    forward = by_rank(times.forward, rank, pp) * crowd
    backward = by_rank(times.backward, rank, pp) * crowd
    tail = _tail(setting, strategy, costs, bounds, (forward, backward))
    # Processes that share cores can at best keep all cores busy all the time.
    cores = float(run.busy_s.sum()) / pp * everyone
    sent = max(run.sent_s * crowd, cores)
    # Ranks that end early reduce and update while the others still compute. That sets
    # no core free: where cores are what is short, every update adds to the step.
    lag = np.zeros(pp)
    if pp > 1 and cores < run.sent_s * crowd:
        lag = sent - run.done_s * crowd
    update = tail.update * everyone
    after = np.maximum(tail.exposed + update - lag, 0.0)
    last = int(after.argmax())
    breakdown = _breakdown(strategy, times, run, sent)
    share = after[last] / max(tail.exposed[last] + update[last], 1e-300)
    breakdown["data_parallel"] = float(tail.exposed[last] * share)
    breakdown["optimizer"] = float(update[last] * share)
    return Step(
        breakdown_s=breakdown,
        tail=tail,
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
