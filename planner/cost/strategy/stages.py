"""What one microbatch takes on every virtual stage of a strategy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import PricingContext
from planner.cost.units import UnitCosts
from planner.errors import StrategyError
from planner.schema import Strategy
from planner.space.table import RECOMPUTE_NAMES

__all__ = [
    "StageTimes",
    "by_rank",
    "ranks_of_stages",
    "recompute_codes",
    "stage_sums",
    "stage_times",
    "unit_ranges",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One microbatch on every virtual stage, communication included. Shapes [stages].

    Attributes:
        forward: Seconds of the forward.
        backward: Seconds of the whole backward, recomputation included.
        weight: Part of ``backward`` that a split schedule may do later.
        again: Part of ``backward`` that is recomputation.
        tensor: Part of both that is exposed tp communication; likewise context,
            expert.
        forward_talk: Exposed communication in ``forward``.
        backward_talk: The same in ``backward``.
        send: One boundary's transfer in one direction. Shape [stages - 1].
        latency: Part of it that does not hold the link. Shape [stages - 1].
    """

    forward: Array
    backward: Array
    weight: Array
    again: Array
    tensor: Array
    context: Array
    expert: Array
    forward_talk: Array
    backward_talk: Array
    send: Array
    latency: Array

    def halves(self, strategy: Strategy) -> tuple[Array, Array]:
        """Seconds of input and weight gradients. Shapes [stages] each.

        Stage 0 sends no gradient: where the backward is split, torch leaves all of it
        to the second half. Source: torch.distributed.pipelining.stage,
        backward_weight_one_chunk, torch 2.13.
        """
        into, weight = self.backward - self.weight, self.weight.copy()
        if strategy.schedule_spec.splits_backward:
            into[0], weight[0] = 0.0, self.backward[0]
        return into, weight


def unit_ranges(context: PricingContext, strategy: Strategy) -> Index:
    """Unit at which each stage starts, then the number of units. Shape [stages + 1].

    Raises:
        StrategyError: If the stages are not the model's units in order.
    """
    names = context.graph.unit_names
    listed = [name for stage in strategy.stages for name in stage.modules]
    if tuple(listed) != names:
        missing = [name for name in names if name not in set(listed)]
        extra = [name for name in listed if name not in set(names)]
        detail = (
            (f"missing {missing[0]!r}" if missing else f"unknown {extra[0]!r}")
            if missing or extra
            else "the order differs"
        )
        raise StrategyError(
            f"stages do not list the model's {len(names)} units in order: {detail}; "
            f"units are {names[0]!r} … {names[-1]!r}"
        )
    sizes = [len(stage.modules) for stage in strategy.stages]
    return np.cumsum([0, *sizes]).astype(np.int64)


def stage_sums(values: Array, bounds: Index) -> Array:
    """Sum units [..., U] within stages. Shape [..., stages]."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums[..., bounds[1:]] - sums[..., bounds[:-1]]


def recompute_codes(strategy: Strategy) -> Index:
    """Index into :data:`RECOMPUTE_NAMES` of each stage. Shape [stages]."""
    return np.array(
        [RECOMPUTE_NAMES.index(stage.recompute) for stage in strategy.stages]
    )


def ranks_of_stages(strategy: Strategy) -> Index:
    """Pp rank of each stage. Shape [stages]."""
    return np.array([stage.rank for stage in strategy.stages])


def by_rank(values: Array, rank: Index, pp: int) -> Array:
    """Sum stages [stages] within pp ranks. Shape [pp]."""
    sums: Array = np.bincount(rank, weights=values, minlength=pp).astype(np.float64)
    return sums


def stage_times(
    context: PricingContext, strategy: Strategy, costs: UnitCosts, bounds: Index
) -> StageTimes:
    """Seconds of every stage for one microbatch, at full speed."""
    pp = strategy.mesh.pp
    rank = ranks_of_stages(strategy)
    kind = context.types_of_ranks(pp)[rank]
    column = np.arange(len(rank))

    codes = recompute_codes(strategy)
    kernels = np.stack(
        [
            costs.forward_s[:, 0],
            costs.backward_s[:, 0],
            costs.weight_s[:, 0],
            costs.selective_s[:, 0],
            costs.full_s[:, 0],
        ]
    )
    typed = stage_sums(kernels, bounds)[:, kind, column]
    forward, backward, weight, selective, whole = typed
    kernels_again = np.choose(codes, [np.zeros(len(rank)), selective, whole])
    talk = np.stack([costs.tp_s[0], costs.cp_s[0], costs.ep_s[0], costs.tp_again_s[0]])
    tp, cp, ep, tp_repeated = stage_sums(talk, bounds)
    cp_forward = cp * costs.cp_forward
    full = codes == 2
    tp_again = np.where(codes > 0, tp_repeated, 0.0)
    repeated = tp_again + np.where(full, ep + cp_forward, 0.0)
    send, late = np.zeros((2, max(len(rank) - 1, 0)))
    if pp > 1:
        bandwidth, latency = context.boundaries(pp)
        before, after = rank[:-1], rank[1:]
        edge = np.where((before - after) == pp - 1, pp - 1, np.minimum(before, after))
        cut = costs.sent_bytes[0, bounds[1:-1] - 1]
        late = np.where(before == after, 0.0, latency[edge])
        send = np.where(before == after, 0.0, latency[edge] + cut / bandwidth[edge])
    return StageTimes(
        forward=forward + tp + ep + cp_forward,
        backward=backward + tp + ep + (cp - cp_forward) + kernels_again + repeated,
        weight=weight,
        again=kernels_again,
        tensor=2 * tp + tp_again,
        context=cp + np.where(full, cp_forward, 0.0),
        expert=ep * np.where(full, 3.0, 2.0),
        forward_talk=tp + ep + cp_forward,
        backward_talk=tp + ep + (cp - cp_forward) + repeated,
        send=send,
        latency=late,
    )
