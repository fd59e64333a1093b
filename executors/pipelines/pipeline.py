"""Pipeline stages and their schedule, out of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules

from executors.losses import LossFunction
from executors.mesh import ProcessMesh
from executors.pipelines.split_backward import SplitStage
from executors.pipelines.stages import LoweredStage
from planner.schema import Strategy

__all__ = ["Pipeline"]


#: Before names of inputs, so that none is a keyword of torch's ``step``: ``target``.
_PREFIX = "input: "


class _Stage(SplitStage):
    """A stage that is given inputs under prefixed names."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        named = {name.removeprefix(_PREFIX): value for name, value in kwargs.items()}
        return super().forward_maybe_with_nosync(*args, **named)  # type: ignore[no-untyped-call]


def _forward_alone(actions: Sequence[Any]) -> list[Any]:
    """Actions of a rank without those of the backward, in the same order.

    Args:
        actions: Of torch, one or several at a time.
    """
    kind = schedules._ComputationType
    flat = [part for action in actions for part in action.sub_actions or (action,)]
    wanted = (kind.FORWARD, kind.SEND_F, kind.RECV_F, kind.UNSHARD, kind.RESHARD)
    kept = [action for action in flat if action.computation_type in wanted]
    found: list[Any] = []
    open_stages: set[int] = set()
    for index, action in enumerate(kept):
        stage, what = action.stage_index, action.computation_type
        if what is kind.UNSHARD:
            # Weights gathered for a backward alone stay where they are.
            used = (
                later.computation_type
                for later in kept[index + 1 :]
                if later.stage_index == stage
                and later.computation_type in (kind.FORWARD, kind.RESHARD)
            )
            if stage in open_stages or next(used, None) is not kind.FORWARD:
                continue
            open_stages.add(stage)
        elif what is kind.RESHARD:
            if stage not in open_stages:
                continue
            open_stages.remove(stage)
        found.append(action)
    return found


class Pipeline:
    """Runs the forward and backward of all microbatches of one step.

    Args:
        lowered: Stages of this rank, in order; their metadata.
        modules: The same stages in their parallel form, by stage index.
        strategy: Schedule, microbatches, number of stages.
        place: Where this process stands.
        loss: Called on the last stage's output; already scaled.

    Attributes:
        schedule: torch's.
        lowered: As given.
    """

    def __init__(
        self,
        lowered: Sequence[LoweredStage],
        modules: Mapping[int, nn.Module],
        strategy: Strategy,
        place: ProcessMesh,
        loss: LossFunction,
    ) -> None:
        count = len(strategy.stages)
        self.lowered = tuple(lowered)
        stages = [
            _Stage(
                modules[stage.index],
                stage.index,
                count,
                place.device,
                # Without static metadata torch would run each stage once on
                # uninitialised inputs, which no integer index survives.
                input_args=stage.receives,
                output_args=stage.sends,
                group=place.group("pp"),
            )
            for stage in lowered
        ]
        spec = strategy.schedule_spec
        assert spec.runs is not None, "no class of torch runs it, a violation"
        kind = getattr(schedules, spec.runs)
        multi = issubclass(kind, schedules.PipelineScheduleMulti)
        self.schedule: Any = kind(
            stages if multi else stages[0],
            strategy.num_microbatches,
            loss_fn=loss,
            # torch would divide gradients that the loss has scaled already.
            scale_grads=False,
        )
        self._has_last = any(stage.index == count - 1 for stage in lowered)

    def step(
        self, inputs: Mapping[str, torch.Tensor], target: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Forward and backward of every microbatch.

        Args:
            inputs: Keywords of the model's forward, all microbatches of this rank.
            target: What the loss compares with, all microbatches.

        Returns:
            Sum of the scaled losses on the rank that has the last stage, else None.
        """
        return self._run(self.schedule.step, inputs, target)

    def evaluate(
        self, inputs: Mapping[str, torch.Tensor], target: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Forward of every microbatch; see :meth:`step`.

        torch's multi-stage schedules would run their backward actions, too.
        """
        orders = getattr(self.schedule, "pipeline_order_with_comms", None)
        if orders is None:
            return self._run(self.schedule.eval, inputs, target)
        self.schedule.pipeline_order_with_comms = {
            rank: _forward_alone(actions) for rank, actions in orders.items()
        }
        try:
            return self._run(self.schedule.eval, inputs, target)
        finally:
            self.schedule.pipeline_order_with_comms = orders

    def _run(
        self,
        step: Callable[..., Any],
        inputs: Mapping[str, torch.Tensor],
        target: torch.Tensor | None,
    ) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        if target is None:
            # The schedule hands a target to every loss.
            target = next(iter(inputs.values()))
        named = {f"{_PREFIX}{name}": value for name, value in inputs.items()}
        step(target=target, losses=losses, return_outputs=False, **named)
        return torch.stack(losses).sum().detach() if self._has_last else None
