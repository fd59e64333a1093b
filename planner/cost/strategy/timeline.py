"""When each device of a strategy does what: the step that was priced, laid out."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipelines import pipeline_pricing
from planner.cost.strategy.stages import Stages, StageTimes
from planner.cost.strategy.step import time_step
from planner.simulate import Timeline

__all__ = ["StepTimeline", "step_timeline"]

Array = NDArray[np.float64]


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
        actions=pipeline_pricing(stages.strategy.schedule).timeline(stages, times),
        times=times,
        send_s=times.send,
        pipeline_end_s=ended,
        exchanged_s=exchanged,
        updated_s=exchanged + step.update_s,
    )
