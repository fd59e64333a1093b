"""Pipelines that are drained after a window of several steps, and not flushed between.

A window of D microbatches is one run of the schedule's order, in which every stage
updates its weights behind each backward, or each ``update_every``-th:

step of M microbatches = M / D makespan(D), the update part of each backward, and of
copies that average gradients the sum before it

bytes added on stage s of S = (S - 1 - s) / update_every W, rounded up, for W bytes of
trained weights in the dtype that is computed in: the versions that microbatches under
way began with. An update that
begins a new one copies them: a read and a write of W. What recomputation keeps of a
microbatch is the schedule's own, inputs of units times as many as are under way.

idle share = 1 - D / (D + S - 1), for stages that take equally long: below 5 % from
D = 19 (S - 1) on.

Source: Narayanan et al. 2019, PipeDream, sections 3.2 and 3.3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipelines import (
    Pipeline,
    PipelineMemory,
    PipelinePricing,
    RowTimes,
)
from planner.cost.replicas import replica_pricing
from planner.cost.strategy.stages import Stages, StageTimes
from planner.cost.table.rows import Columns
from planner.cost.table.stages import Summaries
from planner.schema.methods.asynchronous import Asynchronous
from planner.simulate import Timeline

__all__ = ["AsynchronousPricing"]

Array = NDArray[np.float64]


class _Window(Stages):
    """Stages of a window, whose backwards have updates behind them."""

    @cached_property
    def awaited_s(self) -> Array:
        """Seconds that each update waits for a sum over copies. Shape [pp].

        At full speed: what sharing cores adds to a sum is in its price already.
        """
        updates = self.strategy.asynchrony.updates(self.strategy.num_microbatches)
        return np.asarray(_awaited(self) / updates / self.core_contention[0])

    @cached_property
    def times(self) -> StageTimes:
        """Seconds of every stage for one microbatch, its share of an update too."""
        plain = super().times
        settings = self.strategy.asynchrony
        assert isinstance(settings, Asynchronous)
        own = (self.update_s + self.awaited_s)[self.rank]
        share = own / settings.update_every
        return replace(
            plain,
            backward=plain.backward + share,
            input_half=plain.input_half + share,
        )


class AsynchronousPricing(PipelinePricing):
    """Price of windows of several steps, by a schedule's own pricing.

    Args:
        flushed: Pricing of the schedule.
        asynchrony: Its settings.
    """

    def __init__(self, flushed: PipelinePricing, asynchrony: Asynchronous) -> None:
        self._flushed, self.settings = flushed, asynchrony

    def rows(
        self, rows: Columns, summaries: Summaries, core_contention: Array
    ) -> RowTimes:
        """Times of a table's rows; updates are parts of their own."""
        many = np.full_like(rows.num_microbatches, self.settings.drain_every)
        window = self._flushed.rows(
            rows._replace(num_microbatches=many), summaries, core_contention
        )
        return RowTimes(
            parts_s=window.parts_s * (rows.num_microbatches / many),
            forward_s=window.forward_s,
            backward_s=window.backward_s,
        )

    def run(
        self, stages: Stages, fidelity: Literal["analytic", "simulated"]
    ) -> Pipeline:
        """Times of one step, a part of a window's."""
        many = stages.strategy.num_microbatches
        share = many / self.settings.drain_every
        window = self._window(stages, self.settings.drain_every)
        found = self._flushed.run(window, fidelity)
        ends = found.sent_s * share
        return Pipeline(
            plain_s=found.plain_s * share,
            sent_s=ends,
            # No rank is through before the others but at the end of a window.
            done_s=np.full(stages.pp, ends),
            busy_s=found.busy_s * share,
            update_s=stages.update_s * self.settings.updates(many),
            awaited_s=_awaited(stages) / stages.core_contention[0],
        )

    def memory(self, stages: Stages) -> PipelineMemory:
        """Bytes of a window's order, and of the versions of weights that it keeps."""
        window = self._window(stages, self.settings.drain_every)
        weights = stages.parameters.trained_shard * stages.context.scalar_bytes.compute
        older = [
            self.settings.older_versions(rank, stages.pp) for rank in range(stages.pp)
        ]
        found = self._flushed.memory(window)
        again = found.again + np.maximum(
            _summed_bytes(stages) - stages.working_bytes, 0
        )
        # Where each backward has an update, the next one begins without gradients.
        alone = self.settings.update_every == 1
        return replace(
            found,
            later=again if alone else np.maximum(found.later, again),
            again=again,
            versions=weights * np.array(older),
        )

    def traffic(self, stages: Stages) -> dict[str, Array]:
        """Bytes between stages in a step: those of the flushed pipeline."""
        return self._flushed.traffic(stages)

    def timeline(self, stages: Stages, times: StageTimes) -> Timeline:
        """Actions in the first step's time of a window, which ends without a flush."""
        many = stages.strategy.num_microbatches
        window = self._window(stages, min(many + stages.pp, self.settings.drain_every))
        stretch = float(times.forward.sum() / stages.times.forward.sum())
        share = stretch * (window.times.backward - stages.times.backward)
        slower = replace(
            times, backward=times.backward + share, input_half=times.input_half + share
        )
        found = self._flushed.timeline(window, slower)
        return _until(found, stretch * self.run(stages, "simulated").sent_s)

    def _window(self, stages: Stages, many: int) -> _Window:
        """Stages with as many microbatches in a step."""
        strategy = stages.strategy.model_copy(update={"num_microbatches": many})
        return _Window(context=stages.context, strategy=strategy, costs=stages.costs)


def _awaited(stages: Stages) -> Array:
    """Seconds of a step in which updates wait for sums over copies. Shape [pp]."""
    pricing = replica_pricing(stages.strategy.synchronisation)
    traffic = pricing.traffic(*stages.replicas, stages.context)
    return np.broadcast_to(traffic.awaited_s, stages.pp)


def _summed_bytes(stages: Stages) -> Array:
    """Bytes of the buffer by which copies average gradients. Shape [pp]."""
    strategy, (rows, _) = stages.strategy, stages.replicas
    sums = strategy.mesh.dp_replicate > 1 and not strategy.synchronisation.between_steps
    size = (rows.trained + rows.tensors) * stages.context.scalar_bytes.reduce
    return np.asarray(size * sums)


def _until(found: Timeline, end_s: float) -> Timeline:
    """Actions that end by a time."""
    kept = found.end_s <= end_s
    return Timeline(
        pp=found.pp,
        rank=found.rank[kept],
        kind=found.kind[kept],
        stage=found.stage[kept],
        microbatch=found.microbatch[kept],
        start_s=found.start_s[kept],
        end_s=found.end_s[kept],
    )
