"""Stages that learn by themselves, from labels that are drawn for each cut.

A rank runs microbatch after microbatch of its own stage and waits for nobody:

t = M max over ranks of (F + B), no bubble, no bytes sent

Where a part is given what the part before makes, forwards follow each other down the
pipeline: F of the stages before comes first, and activations are sent once. A mean step
is that by its share of steps, and a step of the schedule by that of recovery.

Memory is that of a stage with one microbatch, or of the schedule if that is more and
there is recovery.
Source: arXiv 2403.11204.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipelines import (
    Pipeline,
    PipelineMemory,
    PipelinePricing,
    RowTimes,
)
from planner.cost.result import PARTS
from planner.cost.strategy.stages import Stages, StageTimes
from planner.cost.table.rows import Columns
from planner.cost.table.stages import SENDS, TIMES, Summaries
from planner.schema.methods.synthetic_labels import SyntheticLabels
from planner.simulate import ActionKind, Timeline, relay_starts

__all__ = ["SyntheticLabelsPricing"]

Array = NDArray[np.float64]


class SyntheticLabelsPricing:
    """Price of steps in which each stage trains by itself, and of recovery."""

    def __init__(self, learning: SyntheticLabels) -> None:
        self._settings = learning
        self._made: dict[int, PipelinePricing] = {}

    def of(self, plain: PipelinePricing) -> PipelinePricing:
        """Return the pricing of a pipeline that is whole in steps of recovery alone."""
        return self._made.setdefault(id(plain), _Apart(self._settings, plain))


class _Apart(PipelinePricing):
    """Pipeline whose stages train apart in a share of the steps.

    Args:
        settings: Of the method.
        plain: Pricing of the schedule.
    """

    def __init__(self, settings: SyntheticLabels, plain: PipelinePricing) -> None:
        self._settings, self._plain = settings, plain
        self._share = settings.phases["apart"]

    @property
    def _relays(self) -> bool:
        return self._settings.inputs == "outputs"

    def _mean(self, apart: Array | float, plain: Array | float) -> Array:
        """Mean of a step of either kind."""
        return np.asarray(self._share * apart + (1 - self._share) * plain)

    def rows(
        self, rows: Columns, summaries: Summaries, core_contention: Array
    ) -> RowTimes:
        """Times of a table's rows, see :class:`PipelinePricing`."""
        plain = self._plain.rows(rows, summaries, core_contention)
        parts = plain.parts_s.copy()
        bubble, transfer, shared = (
            PARTS.index(name)
            for name in ("pipeline_bubble", "pipeline_transfer", "shared_cores")
        )
        whole, load = summaries.whole[rows.pair], summaries.load[rows.pair]
        again = np.choose(
            rows.recompute,
            [np.zeros(len(whole)), whole[:, TIMES.selective], whole[:, TIMES.full]],
        )
        total = whole[:, TIMES.forward] + whole[:, TIMES.backward] + again
        fill = whole[:, TIMES.forward] - load[:, TIMES.forward]
        way = summaries.sends[rows.pair, SENDS.way]
        parts[bubble], parts[transfer] = fill * self._relays, way * self._relays
        sent = parts[:shared].sum(axis=0)
        crowd, everyone = core_contention[rows.place].T
        cores = rows.num_microbatches * total / rows.pp * everyone
        parts[shared] = np.maximum(sent * crowd, cores) - sent
        return RowTimes(
            parts_s=self._mean(parts, plain.parts_s),
            forward_s=plain.forward_s,
            backward_s=plain.backward_s,
        )

    def run(
        self, stages: Stages, fidelity: Literal["analytic", "simulated"]
    ) -> Pipeline:
        """Times of all microbatches of one strategy, one stage a rank."""
        plain = self._plain.run(stages, fidelity)
        times = stages.times
        without = self._starts(stages, times, np.zeros_like(times.send))
        sent = self._starts(stages, times, times.send)
        work = times.forward + times.backward
        done = sent[:, -1] + work
        return Pipeline(
            plain_s=float(self._mean((without[:, -1] + work).max(), plain.plain_s)),
            sent_s=float(self._mean(done.max(), plain.sent_s)),
            done_s=self._mean(done, plain.done_s),
            busy_s=plain.busy_s,
        )

    def _starts(self, stages: Stages, times: StageTimes, send_s: Array) -> Array:
        """Times at which stages begin their microbatches. Shape [stages, many]."""
        many, work = stages.strategy.num_microbatches, times.forward + times.backward
        if not self._relays:
            return np.asarray(work[:, None] * np.arange(many))
        return relay_starts(times.forward, work, send_s, many)

    def memory(self, stages: Stages) -> PipelineMemory:
        """Bytes of one microbatch at a time; the schedule's, if those are more."""
        costs = stages.costs
        kept = stages.sums(costs.saved_bytes[:, 0])
        held = kept[stages.recompute, np.arange(len(stages.rank))]
        held[-1] += costs.output_bytes[0]
        cut, done = stages.at_cuts(costs.cut_bytes), np.zeros(stages.pp)
        many = stages.strategy.num_microbatches
        # What is wanted; messages live until the step ends.
        held += np.concatenate([cut * (many if self._relays else 1), [0.0]])
        if self._share == 1:
            # What is given; in recovery it is a buffer of the pipeline.
            held += np.concatenate([[0.0], cut])
        # A gradient that is added to those of the microbatches before.
        more = np.maximum.reduceat(costs.trained_dense[0], stages.bounds[:-1])
        more *= stages.context.scalar_bytes.stored
        apart = PipelineMemory(
            activations=held,
            later=held + more if many > 1 else done,
            again=done,
            received=done,
        )
        if self._share == 1:
            return apart
        plain = self._plain.memory(stages)
        names = (one.name for one in fields(PipelineMemory))
        return PipelineMemory(
            **{n: np.maximum(getattr(apart, n), getattr(plain, n)) for n in names}
        )

    def traffic(self, stages: Stages) -> dict[str, Array]:
        """Bytes of recovery; activations of all steps, where parts hand them on."""
        moved = {
            kind: self._mean(0.0, size)
            for kind, size in self._plain.traffic(stages).items()
        }
        if self._relays:
            cut = stages.crossing(stages.costs.sent_bytes)
            ahead = np.concatenate([cut, [0.0]]) * stages.strategy.num_microbatches
            moved["send"] = moved.get("send", 0.0) + self._mean(ahead, 0.0)
        return moved

    def timeline(self, stages: Stages, times: StageTimes) -> Timeline:
        """Actions of a step of the more frequent kind."""
        if self._share < 1 - self._share:
            return self._plain.timeline(stages, times)
        start = self._starts(stages, times, times.send)
        middle = start + times.forward[:, None]
        end = middle + times.backward[:, None]
        pairs = np.stack([start, middle, end], axis=-1)
        pp, many = start.shape
        actions = (pp, many, 2)
        rank, microbatch, kind = (axis.ravel() for axis in np.indices(actions))
        return Timeline(
            pp=pp,
            rank=rank.astype(np.int32),
            kind=np.where(kind == 1, ActionKind.BACKWARD, ActionKind.FORWARD),
            stage=rank.astype(np.int32),
            microbatch=microbatch,
            start_s=pairs[..., :2].ravel(),
            end_s=pairs[..., 1:].ravel(),
        )
