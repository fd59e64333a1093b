"""Pricing of pipelines, one file a way to run them.

A :class:`PipelinePricing` prices the rows of a table and one strategy alike. Records of
schedules name theirs; methods that fill ``asynchrony`` make another of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.plugins import load_object
from planner.schema.methods import Asynchrony, method_of
from planner.schema.schedules import schedule_spec

if TYPE_CHECKING:
    from planner.cost.strategy.stages import Stages, StageTimes
    from planner.cost.table.rows import Columns
    from planner.cost.table.stages import Summaries
    from planner.simulate import Timeline

__all__ = [
    "Pipeline",
    "PipelineMemory",
    "PipelinePricing",
    "RowTimes",
    "pipeline_pricing",
]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTimes:
    """Times of every row of a table.

    Attributes:
        parts_s: By part, those of data parallelism and the optimizer left at 0. Shape
            [PARTS, n].
        forward_s: One microbatch's forward on the slowest rank. Shape [n].
        backward_s: The same for the whole backward. Shape [n].
    """

    parts_s: Array
    forward_s: Array
    backward_s: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Times of all microbatches of one strategy.

    Attributes:
        plain_s: End of the pipeline without transfers.
        sent_s: End of it with them.
        done_s: When each pp rank is through with its microbatches. Shape [pp].
        busy_s: Seconds in which each rank is at work. Shape [pp].
        update_s: Part of them in which it updates weights. Shape [pp], or [1] where
            that comes after the pipeline.
        awaited_s: Part of them in which updates wait for sums over copies. [pp], or [1]
            where none do.
    """

    plain_s: float
    sent_s: float
    done_s: Array
    busy_s: Array
    update_s: Array = field(default_factory=lambda: np.zeros(1))
    awaited_s: Array = field(default_factory=lambda: np.zeros(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMemory:
    """Bytes of each pp rank. Shapes [pp].

    Attributes:
        activations: Held for all microbatches at once, working sets apart.
        later: The same when a backward begins behind a forward, and gradients are
            there.
        again: The same when a backward follows upon another.
        received: Buffers of one microbatch over all stages.
        versions: Weights that are kept beside the newest. Shape [pp], or [1].
    """

    activations: Array
    later: Array
    again: Array
    received: Array
    versions: Array = field(default_factory=lambda: np.zeros(1))


class PipelinePricing(Protocol):
    """Price of one way to run pipelines."""

    def rows(
        self, rows: Columns, summaries: Summaries, core_contention: Array
    ) -> RowTimes:
        """Times of a table's rows, by closed forms.

        Args:
            rows: The table.
            summaries: Cuts that ``rows.pair`` names.
            core_contention: How much processes that share cores slow each other down,
                at each of ``rows.place``. Shape [places, 2].
        """
        ...

    def run(
        self, stages: Stages, fidelity: Literal["analytic", "simulated"]
    ) -> Pipeline:
        """Times of all microbatches of one strategy."""
        ...

    def memory(self, stages: Stages) -> PipelineMemory:
        """Bytes that the schedule's exact order holds."""
        ...

    def traffic(self, stages: Stages) -> dict[str, Array]:
        """Bytes that each pp rank sends between stages in a step, by kind of call."""
        ...

    def timeline(self, stages: Stages, times: StageTimes) -> Timeline:
        """Actions of one strategy whose stages take ``times``."""
        ...


def pipeline_pricing(schedule: str, asynchrony: Asynchrony) -> PipelinePricing:
    """Return the pricing of a schedule whose stages update weights at some time.

    Args:
        schedule: Its name.
        asynchrony: When stages update their weights.
    """
    flushed: PipelinePricing = load_object(schedule_spec(schedule).prices)
    make = load_object(method_of("asynchrony", asynchrony).prices)
    pricing: PipelinePricing = make(flushed, asynchrony)
    return pricing
