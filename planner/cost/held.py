"""What a pipeline's ranks hold for their microbatches, as the executors do.

A stage has buffers for what every microbatch receives, activations and gradients. What
its first op saves is such a buffer, so that it is counted there. Beside what it saves
a microbatch in flight holds what the stage sent on, on the last stage what the model
returned: torch needs it to begin the backward.

Where the backward is split, the weight gradients wait for their half with all that
was saved, with the gradients from which they will be made, and with the gradient that
was sent back, which stays until the step ends. Stage 0 has nobody to send a gradient
to: its second half is the whole backward. On gloo, requests of the schedules that hold
several stages keep what they sent until the step ends.

Megatron-LM queues the inputs and the gradients of its linear layers instead, and lets
go of the rest of the graph: of a layer of a GPT 32 bytes for each of sbh values wait,
and 34 were saved (Qi et al. 2023, Zero Bubble Pipeline Parallelism, 2401.10241,
section 2 and table 1). They are taken as equal. ``keeps_graph`` is False there.
Source: torch.distributed.pipelining, stage.py (_PipelineStageBase), _backward.py
(stage_backward, stage_backward_input) and schedules.py (_PipelineScheduleRuntime),
torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_times import (
    by_rank,
    ranks_of_stages,
    recompute_codes,
    stage_sums,
)
from planner.cost.unit_costs import UnitCosts
from planner.schema import SPLIT_BACKWARD_SCHEDULES, Strategy
from planner.simulate import ActionTable, peak_held_bytes

__all__ = ["HeldBytes", "held_bytes"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Schedules that wait for what they send: one stage a rank, a runtime of their own.
_WAITING = frozenset({"GPipe", "1F1B"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes of each pp rank. Shapes [pp].

    Attributes:
        activations: Of all microbatches at once, working sets apart.
        received: Buffers of one microbatch over all stages.
    """

    activations: Array
    received: Array


def held_bytes(
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    table: ActionTable | None,
    *,
    keeps_sent: bool,
    keeps_graph: bool = True,
) -> HeldBytes:
    """Count what the schedule's exact order holds.

    Args:
        strategy: With its stages.
        costs: Of its one combination.
        bounds: Unit at which each stage starts. Shape [stages + 1].
        table: The order of actions; None without a pipeline.
        keeps_sent: Whether requests keep what they sent: gloo's do.
        keeps_graph: Of the recipe: what waits between the halves of a split backward.
    """
    rank, pp = ranks_of_stages(strategy), strategy.mesh.pp
    kept = stage_sums(costs.saved_bytes[:, 0], bounds)
    kept = kept[recompute_codes(strategy), np.arange(len(rank))]
    if table is None:
        return HeldBytes(activations=by_rank(kept, rank, pp), received=np.zeros(pp))
    cut = costs.cut_bytes[0, bounds[1:-1] - 1]
    # The two stages at the fold of a V lie on one rank: nothing is sent, and a stage's
    # output is the other's buffer.
    crossing = np.where(rank[1:] == rank[:-1], 0.0, cut)
    none = np.zeros(1)
    returned = np.concatenate([none, crossing])
    sent = np.concatenate([crossing, none])
    output = np.concatenate([np.zeros(len(cut)), costs.output_bytes])
    shared = np.concatenate([none, costs.shared_bytes[0, bounds[1:-1] - 1]])
    flying = np.maximum(kept + sent + output - shared, 0.0)
    split, after = flying, returned if keeps_graph else 0.0 * returned
    if strategy.schedule in SPLIT_BACKWARD_SCHEDULES:
        halves = stage_sums(costs.weight_grad_bytes[0], bounds) + after
        halves -= 0.0 if keeps_graph else output
        halves[0] = 0.0
        split = np.maximum(flying + halves, 0.0)
    still = keeps_sent and strategy.schedule not in _WAITING
    held = peak_held_bytes(
        table,
        flying,
        split,
        after_split_bytes=returned + sent if still else after,
        after_whole_bytes=returned + sent if still else 0.0,
    )
    buffers = np.concatenate([none, cut]) + np.concatenate([cut, none])
    return HeldBytes(activations=held, received=by_rank(buffers, rank, pp))
