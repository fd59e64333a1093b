"""When each device of a strategy does what: the step that was priced, laid out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import PricingContext
from planner.cost.pipelines.flushed import queues
from planner.cost.strategy.stages import StageTimes, unit_ranges
from planner.cost.strategy.step import Step, schedule_of, time_step
from planner.cost.units import UnitCosts
from planner.schema import Strategy
from planner.simulate import ActionKind, ActionTable, Timeline, timeline

__all__ = ["StepTimeline", "step_timeline"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


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
        """When the last rank has done all of it."""
        return max(self.actions.makespan_s, float(self.updated_s.max()))


def step_timeline(
    context: PricingContext, strategy: Strategy, costs: UnitCosts
) -> StepTimeline:
    """Lay out a step as the simulator times it.

    Its end is the step time of :func:`planner.cost.strategy.step.price_strategy`. Where
    processes share cores, all actions are longer by the same factor.

    Args:
        context: The request.
        strategy: With stages that list all units of the model in order.
        costs: Units under its one combination (C = 1).

    Raises:
        StrategyError: If the stages are not the model's units.
    """
    bounds = unit_ranges(context, strategy)
    table = schedule_of(strategy)
    step = time_step(context, strategy, costs, bounds, table, "simulated")
    times = _stretched(step)
    run = (
        _accumulation(strategy, times)
        if table is None
        else _pipeline(strategy, times, table)
    )
    ended = step.pipeline_s - step.lag_s
    exchanged = ended + step.after.exposed
    return StepTimeline(
        actions=run,
        times=times,
        send_s=times.send,
        pipeline_end_s=ended,
        exchanged_s=exchanged,
        updated_s=exchanged + step.update_s,
    )


def _stretched(step: Step) -> StageTimes:
    """Durations with cores shared. Transfers, too: they wait for cores."""
    if step.stretch == 1.0:
        return step.times
    names = StageTimes.__dataclass_fields__
    return replace(
        step.times, **{name: getattr(step.times, name) * step.stretch for name in names}
    )


def _pipeline(strategy: Strategy, times: StageTimes, table: ActionTable) -> Timeline:
    backward, weight = times.halves(strategy)
    return timeline(
        table,
        times.forward,
        backward,
        weight,
        times.send,
        times.send,
        sharing=queues(strategy, times, table),
    )


def _accumulation(strategy: Strategy, times: StageTimes) -> Timeline:
    """Without a pipeline: microbatch after microbatch, all stages in one."""
    many = strategy.num_microbatches
    forward, backward = float(times.forward.sum()), float(times.backward.sum())
    microbatch = np.repeat(np.arange(many), 2)
    second = np.tile([0, 1], many)
    start = microbatch * (forward + backward) + second * forward
    end = start + np.where(second == 1, backward, forward)
    return Timeline(
        pp=1,
        rank=np.zeros(2 * many, dtype=np.int32),
        kind=np.where(second == 1, ActionKind.BACKWARD, ActionKind.FORWARD),
        stage=np.zeros(2 * many, dtype=np.int32),
        microbatch=microbatch,
        start_s=start,
        end_s=end,
    )
