"""Layers that follow errors of their own, made from the error of the output.

All microbatches go forward through the pipeline, the errors E of the outputs are
broadcast, and each rank makes its gradients by itself:

t = forwards + broadcast(M B C 4 bytes) + M max over ranks of (dW + E)

with dW the products of weight gradients, and two products for the error weights of a
layer, D_l x C or D_l x D_(l+1) values, which take as long for each value as the forward
of the layer that makes C or D_(l+1) features. A tree broadcasts in log2(pp) messages.
Bytes sent are those of activations ahead, and of the broadcast.

Held are inputs and outputs of all layers for all microbatches in the dtype that is
computed in, and error weights with their gradients, once more where they are cast. Rows
of a table leave the broadcast out, and take error weights for as large as weights.
Source: Ororbia et al. 2023, arXiv 2002.03911.
"""

from __future__ import annotations

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
from planner.schema.methods.local_alignment import LocalAlignment
from planner.simulate import ActionKind, Timeline, relay_starts
from planner.units import dtype_bytes

__all__ = ["LocalAlignmentPricing"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Products with error weights in a step: the direction of a target, and a gradient.
_PRODUCTS = 2
#: Tensors of a microbatch, of the widest layer, beside all that is kept.
_WORKING = 1
#: Bytes of an error of the output, which is sent in float32.
_ERROR_BYTES = 4


class LocalAlignmentPricing(PipelinePricing):
    """Price of forwards in a row, a broadcast, and gradients of each rank's own."""

    def __init__(self, learning: LocalAlignment) -> None:
        self._settings = learning

    def of(self, plain: PipelinePricing) -> PipelinePricing:
        """Return this pricing: one schedule goes with the method."""
        return self

    def rows(
        self, rows: Columns, summaries: Summaries, core_contention: Array
    ) -> RowTimes:
        """Times of a table's rows, see :class:`PipelinePricing`."""
        load, whole = summaries.load[rows.pair], summaries.whole[rows.pair]
        many, way = rows.num_microbatches, summaries.sends[rows.pair, SENDS.way]
        errors = _PRODUCTS * (1 - 1 / self._settings.skip)

        def local(times: Array) -> Array:
            return np.asarray(times[:, TIMES.weight] + errors * times[:, TIMES.forward])

        own = load[:, TIMES.forward] + local(load)
        total = whole[:, TIMES.forward] + local(whole)
        parts = {
            "compute": many * own,
            "pipeline_bubble": whole[:, TIMES.forward] - load[:, TIMES.forward],
            "pipeline_transfer": way,
        }
        sent = np.asarray(sum(parts.values()))
        crowd, everyone = core_contention[rows.place].T
        cores = many * total / rows.pp * everyone
        parts["shared_cores"] = np.maximum(sent * crowd, cores) - sent
        filled = np.zeros((len(PARTS), len(sent)))
        for name, seconds in parts.items():
            filled[PARTS.index(name)] = seconds
        return RowTimes(
            parts_s=filled,
            forward_s=load[:, TIMES.forward] * crowd,
            backward_s=local(load) * crowd,
        )

    def run(
        self, stages: Stages, fidelity: Literal["analytic", "simulated"]
    ) -> Pipeline:
        """Times of all microbatches of one strategy, one stage a rank."""
        times, many = stages.times, stages.strategy.num_microbatches
        local = self._local_seconds(stages, times)
        none = np.zeros_like(times.send)
        plain = _forwards_end(times, none, many) + many * local.max()
        known = _forwards_end(times, times.send, many) + _broadcast_seconds(stages)
        return Pipeline(
            plain_s=float(plain),
            sent_s=float(known + many * local.max()),
            done_s=known + many * local,
            busy_s=many * (times.forward + local),
        )

    def _local_seconds(self, stages: Stages, times: StageTimes) -> Array:
        """Seconds of each stage for a microbatch's gradients. Shape [stages]."""
        costs, (outputs, inputs) = stages.costs, _widths(stages)
        above = self._above(stages)
        share = _PRODUCTS * outputs / inputs[above]
        share[-1] = 0.0
        units = costs.forward_s[:, 0, above] * share
        kind = stages.context.types_of_ranks(stages.pp)[stages.rank]
        errors = stages.sums(units)[kind, np.arange(len(stages.rank))]
        return np.asarray(times.weight + errors)

    def _above(self, stages: Stages) -> Index:
        """Layer whose error each layer is given, from 0. Shape [U]."""
        count = len(stages.context.graph.units)
        above = np.minimum(np.arange(1, count + 1), count - 1)
        direct = [self._settings.is_direct(number) for number in range(1, count + 1)]
        above[np.array(direct)] = count - 1
        above[stages.bounds[1:] - 1] = count - 1
        return above

    def memory(self, stages: Stages) -> PipelineMemory:
        """Inputs and outputs of layers, of all microbatches, and error weights."""
        strategy = stages.strategy
        many, samples = strategy.num_microbatches, strategy.microbatch_size
        stored = dtype_bytes(strategy.precision.parameter)
        size = dtype_bytes(strategy.precision.compute)
        outputs, inputs = _widths(stages)
        passes = stages.sums(outputs + inputs) + outputs[stages.bounds[1:] - 1]
        sizes = outputs * outputs[self._above(stages)]
        sizes[-1] = 0.0
        # In the weights' dtype, and once more where they are cast.
        each = 2 * stored + size * (size != stored)
        errors = each * stages.sums(sizes)
        output = outputs[-1] * _ERROR_BYTES
        # A point, which becomes an error.
        widest = np.maximum.reduceat(np.maximum(outputs, inputs), stages.bounds[:-1])
        working = samples * _WORKING * widest * size
        held = many * samples * (passes * size + output) + errors + working
        return PipelineMemory(
            activations=held, later=held, again=held, received=np.zeros(stages.pp)
        )

    def traffic(self, stages: Stages) -> dict[str, Array]:
        """Activations that each rank sends ahead, and errors that all are given."""
        strategy = stages.strategy
        many, samples = strategy.num_microbatches, strategy.microbatch_size
        cut = stages.crossing(stages.costs.sent_bytes)
        classes = _widths(stages)[0][-1]
        each = many * samples * classes * _ERROR_BYTES
        return {
            "send": np.concatenate([cut, [0.0]]) * many,
            "broadcast": np.full(stages.pp, each),
        }

    def timeline(self, stages: Stages, times: StageTimes) -> Timeline:
        """Forwards, then gradients, which are drawn as backwards."""
        many = stages.strategy.num_microbatches
        start = relay_starts(times.forward, times.forward, times.send, many)
        ahead = np.stack([start, start + times.forward[:, None]])
        stretch = times.forward.sum() / max(stages.times.forward.sum(), 1e-300)
        local = self._local_seconds(stages, stages.times) * stretch
        known = ahead[1].max() + _broadcast_seconds(stages) * stretch
        begin = known + local[:, None] * np.arange(many)
        back = np.stack([begin, begin + local[:, None]])
        kind, rank, microbatch = (
            axis.ravel() for axis in np.indices((2, stages.pp, many))
        )
        begins, ends = np.stack([ahead, back], axis=1).reshape(2, -1)
        return Timeline(
            pp=stages.pp,
            rank=rank.astype(np.int32),
            kind=np.where(kind == 1, ActionKind.BACKWARD, ActionKind.FORWARD),
            stage=rank.astype(np.int32),
            microbatch=microbatch,
            start_s=begins,
            end_s=ends,
        )


def _forwards_end(times: StageTimes, send_s: Array, many: int) -> float:
    """Seconds until the last stage has seen all microbatches."""
    start = relay_starts(times.forward, times.forward, send_s, many)
    return float((start[:, -1] + times.forward).max())


def _broadcast_seconds(stages: Stages) -> float:
    """Seconds until all ranks have the errors, over the slowest boundary each time."""
    strategy = stages.strategy
    size = strategy.num_microbatches * strategy.microbatch_size * _ERROR_BYTES
    bandwidth, wait = stages.context.boundaries(stages.pp)
    hop = wait[:-1].max() + size * _widths(stages)[0][-1] / bandwidth[:-1].min()
    return float(np.ceil(np.log2(stages.pp)) * hop)


def _widths(stages: Stages) -> tuple[Array, Array]:
    """Features that each unit's layer makes, and is given. Shapes [U]."""
    graph = stages.context.graph
    place = {name: index for index, name in enumerate(graph.unit_names)}
    outputs, inputs = np.zeros((2, len(place)))
    for parameter in graph.parameters:
        if len(parameter.shape) == 2:
            unit = place[graph.blocks[parameter.block].layer]
            outputs[unit], inputs[unit] = parameter.shape
    return outputs, inputs
