"""One strategy priced exactly: its pipeline, what follows it, and all that it sends."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from planner.cost.learning import learning_pricing
from planner.cost.offload import host_bytes, host_limit_bytes
from planner.cost.pipelines import Pipeline, PipelinePricing, pipeline_pricing
from planner.cost.replicas import ReplicaTraffic, replica_pricing
from planner.cost.result import Cost
from planner.cost.strategy.memory import strategy_memory
from planner.cost.strategy.stages import Stages, StageTimes
from planner.simulate import Timeline

__all__ = [
    "Fidelity",
    "Step",
    "StepTimeline",
    "price_strategy",
    "step_timeline",
    "time_step",
]

Array = NDArray[np.float64]

Fidelity = Literal["analytic", "simulated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's parts, and what its end is made of.

    Attributes:
        stages: Of the strategy, each process on cores of its own.
        pipeline: All microbatches, likewise.
        traffic: Gathers and reductions over replicas.
        pipeline_s: When the last rank is through with its microbatches, cores shared.
        lag_s: How long before that each rank is. Shape [pp].
        exposed_s: Seconds after the pipeline in which copies are made alike. [pp].
        update_s: Seconds after that in which each rank updates its weights, if not in
            the pipeline. Shape [pp].
    """

    stages: Stages
    pipeline: Pipeline
    traffic: ReplicaTraffic
    pipeline_s: float
    lag_s: Array
    exposed_s: Array
    update_s: Array

    @property
    def stretch(self) -> float:
        """Factor by which sharing cores makes the pipeline longer."""
        sent = self.pipeline.sent_s
        return self.pipeline_s / sent if sent > 0 else 1.0

    @property
    def breakdown_s(self) -> dict[str, float]:
        """Seconds by part, see :data:`planner.cost.result.PARTS`.

        Parts of the busiest rank's time, what the pipeline adds, then what is left to
        do on the rank that ends last.
        """
        stages, run = self.stages, self.pipeline
        slowest = int(run.busy_s.argmax())

        def part(values: Array) -> float:
            total = stages.of_ranks(values)[slowest] * stages.strategy.num_microbatches
            return float(total)

        parts = {
            "recompute": part(stages.times.again),
            "tensor": part(stages.times.tensor),
            "context": part(stages.times.context),
            "expert": part(stages.times.expert),
        }
        inside, awaited = (
            float(np.broadcast_to(each, stages.pp)[slowest])
            for each in (run.update_s, run.awaited_s)
        )
        busy = float(run.busy_s[slowest]) - inside - awaited
        left = np.maximum(self.exposed_s + self.update_s - self.lag_s, 0.0)
        last = int(left.argmax())
        share = left[last] / max(self.exposed_s[last] + self.update_s[last], 1e-300)
        return {
            "compute": busy - sum(parts.values()),
            **parts,
            "pipeline_bubble": run.plain_s - busy - inside - awaited,
            "pipeline_transfer": run.sent_s - run.plain_s,
            "shared_cores": self.pipeline_s - run.sent_s,
            "data_parallel": awaited + float(self.exposed_s[last] * share),
            "optimizer": inside + float(self.update_s[last] * share),
        }


def _pipeline_of(stages: Stages) -> PipelinePricing:
    strategy = stages.strategy
    plain = pipeline_pricing(strategy.schedule, strategy.asynchrony)
    return learning_pricing(strategy.learning).of(plain)


def time_step(stages: Stages, fidelity: Fidelity) -> Step:
    """Time a strategy.

    Args:
        stages: Of the strategy.
        fidelity: ``simulated`` runs the schedule's exact order, ``analytic`` takes its
            closed form.

    Raises:
        StrategyError: If the stages are not the model's units.
    """
    context, strategy, pp = stages.context, stages.strategy, stages.pp
    run = _pipeline_of(stages).run(stages, fidelity)
    crowd, everyone = stages.core_contention
    # Processes that share cores can at best keep all cores busy all the time.
    cores = float(run.busy_s.sum()) / pp * everyone
    sent = max(run.sent_s * crowd, cores)
    # Ranks that end early reduce and update while the others still compute. That sets
    # no core free: where cores are what is short, every update adds to the step.
    lag = np.zeros(pp)
    if pp > 1 and cores < run.sent_s * crowd:
        lag = sent - run.done_s * crowd
    rows, groups = stages.replicas
    exchange = replica_pricing(strategy.synchronisation)
    traffic = exchange.traffic(rows, groups, context)
    return Step(
        stages=stages,
        pipeline=run,
        traffic=traffic,
        pipeline_s=sent,
        lag_s=lag,
        exposed_s=traffic.exposed_s + stages.tied.exposed_s,
        update_s=stages.update_s * everyone * (not run.update_s.any()),
    )


def price_strategy(stages: Stages, fidelity: Fidelity) -> Cost:
    """Time and memory of a strategy; arguments and errors of :func:`time_step`."""
    step = time_step(stages, fidelity)
    context, strategy, traffic = stages.context, stages.strategy, step.traffic
    moved = _pipeline_of(stages).traffic(stages)
    # Of two ranks that sum, each sends as much as there is.
    reduced = stages.tied.reduced_bytes
    links = {
        "pp": sum(moved.values()) + reduced,
        "dp": traffic.sent_bytes,
        **stages.axis_bytes,
    }
    payload = dict(stages.payload_bytes)
    for kind, more in (
        *moved.items(),
        ("send", traffic.messaged_bytes),
        ("all_reduce", traffic.reduced_bytes + reduced),
        ("all_gather", traffic.gathered_bytes),
        ("reduce_scatter", traffic.scattered_bytes),
        ("all_to_all", traffic.exchanged_bytes),
    ):
        payload[kind] = payload.get(kind, 0.0) + more
    breakdown, exchange = step.breakdown_s, replica_pricing(strategy.synchronisation)
    memory = strategy_memory(
        stages,
        _pipeline_of(stages).memory(stages),
        exchange.held(stages.replicas[0], context),
    )
    limits = context.limits_of_ranks(stages.pp)
    return Cost(
        step_time_s=float(sum(breakdown.values())),
        breakdown_s=breakdown,
        memory=memory,
        limit_bytes=limits,
        device_type=context.types_of_ranks(stages.pp),
        **_on_hosts(stages, limits - memory.total),
        link_bytes=_busiest(links),
        collective_bytes=_busiest(payload),
        fidelity=fidelity,
        efficiency=context.regime.efficiency or 1.0,
    )


def _on_hosts(stages: Stages, left_bytes: Array) -> dict[str, Any]:
    """Fields of a price that tell what lies in the hosts' memory; none if nothing.

    Args:
        stages: Of the strategy.
        left_bytes: Below the limit of the devices, which CPU processes have in the
            same memory. Shape [pp].
    """
    context = stages.context
    if not context.regime.offload:
        return {}
    limit = host_limit_bytes(context)
    if not context.on_gpu:
        limit = min(limit, float(left_bytes.min()))
    return {
        "host_bytes": host_bytes(stages.offloaded, context),
        "host_limit_bytes": limit,
    }


def _busiest(values: dict[str, Array]) -> dict[str, float]:
    """Greatest of each kind over the ranks, as far as there is anything."""
    most = {kind: float(each.max()) for kind, each in values.items()}
    return {kind: value for kind, value in most.items() if value > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One step of one device of each pp rank.

    Attributes:
        actions: Forwards and backwards, by rank, then by time.
        times: One microbatch on every virtual stage, as long as in ``actions``.
        send_s: What a boundary's transfer takes. Shape [stages - 1].
        pipeline_end_s: When each rank's last microbatch is done, and copies of weights
            start to be made alike. Shape [pp].
        exchanged_s: When that is done, and the update starts. Shape [pp].
        updated_s: When that is done. Shape [pp].
    """

    actions: Timeline
    times: StageTimes
    send_s: Array
    pipeline_end_s: Array
    exchanged_s: Array
    updated_s: Array

    @property
    def step_time_s(self) -> float:
        """End of the last rank's update."""
        return max(self.actions.makespan_s, float(self.updated_s.max()))


def step_timeline(stages: Stages) -> StepTimeline:
    """Lay out a step as the simulator times it.

    Its end is the step time of :func:`planner.cost.strategy.step.price_strategy`. Where
    processes share cores, all actions, and transfers that wait for cores, are longer by
    the same factor.

    Raises:
        StrategyError: If the stages are not the model's units.
    """
    step = time_step(stages, "simulated")
    times = stages.times
    if step.stretch != 1.0:
        names = (field.name for field in fields(StageTimes))
        times = replace(
            times, **{name: getattr(times, name) * step.stretch for name in names}
        )
    ended = step.pipeline_s - step.lag_s
    exchanged = ended + step.exposed_s
    return StepTimeline(
        actions=_pipeline_of(stages).timeline(stages, times),
        times=times,
        send_s=times.send,
        pipeline_end_s=ended,
        exchanged_s=exchanged,
        updated_s=exchanged + step.update_s,
    )
