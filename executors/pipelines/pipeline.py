"""Pipeline stages and their schedule, out of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules

from executors.losses import LossFunction
from executors.mesh import ProcessMesh
from executors.pipelines.split_backward import SplitStage
from executors.pipelines.stages import LoweredStage
from executors.strategies.casts import WeightCasts
from executors.strategies.collectives import gather, scatter
from planner.schema import Strategy

__all__ = ["Pipeline"]


#: Before names of inputs, so that none is a keyword of torch's ``step``: ``target``.
_PREFIX = "input: "
#: Keyword of what the loss compares with, where the last stage computes it.
_TARGET = "target: "


class _Stage(SplitStage):
    """A stage that is given inputs under prefixed names.

    Attributes:
        tp: Ranks that share what crosses a cut, if each sends and receives a part.
        entering: Shape of each tensor that it receives a part of; None for others.
        leaving: Whether it sends a part of each tensor that it returns.
        loss: What is to know the target of each forward of the last stage.
    """

    tp: dist.ProcessGroup | None = None
    entering: tuple[torch.Size | None, ...] = ()
    leaving: tuple[bool, ...] = ()
    loss: LossFunction | None = None

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.pop(_TARGET, None)
        named = {name.removeprefix(_PREFIX): value for name, value in kwargs.items()}
        if self.loss is not None:
            self.loss.expect(target)
        if self.entering:
            args = tuple(map(self._whole, args, self.entering))
        found = super().forward_maybe_with_nosync(*args, **named)  # type: ignore[no-untyped-call]
        return tuple(map(self._part, found, self.leaving)) if self.leaving else found

    def _whole(self, tensor: torch.Tensor, shape: torch.Size | None) -> torch.Tensor:
        if shape is None:
            return tensor
        assert self.tp is not None, "parts are of tp"
        return gather(tensor, self.tp, 0).view(shape)

    def _part(self, tensor: torch.Tensor, divided: bool) -> torch.Tensor:
        if not divided:
            return tensor
        assert self.tp is not None, "parts are of tp"
        # A clone: a view would keep all of the tensor, and split backward detaches
        # what a stage returns in place.
        return scatter(tensor.reshape(-1), self.tp, 0).clone()


def _divided(tensor: torch.Tensor, ways: int) -> bool:
    """Return True if tp ranks can share a message."""
    return ways > 1 and tensor.numel() % ways == 0


def _message(tensor: torch.Tensor, ways: int) -> torch.Tensor:
    """Return an empty tensor like what a tp rank sends."""
    if not _divided(tensor, ways):
        return tensor
    size = tensor.numel() // ways
    return tensor.new_empty(size, requires_grad=tensor.requires_grad)


def _ways_at_cuts(strategy: Strategy, stage: LoweredStage) -> tuple[int, int]:
    """Parts in which tensors cross the cuts before and behind a stage.

    One where nothing is sent, because both stages are on one rank, or where each tp
    rank has a shard of its own.
    """
    if strategy.communication.boundary == "direct":
        return 1, 1
    ranks, tp = strategy.stage_ranks, strategy.mesh.tp
    index = stage.index
    enters = index > 0 and ranks[index - 1] != ranks[index]
    leaves = index + 1 < len(ranks) and ranks[index + 1] != ranks[index]
    return (
        tp if enters and not stage.input_sharded else 1,
        tp if leaves and not stage.output_sharded else 1,
    )


def _made(
    stage: LoweredStage,
    modules: Mapping[int, nn.Module],
    strategy: Strategy,
    place: ProcessMesh,
) -> _Stage:
    """Return torch's stage for a stage of this rank; arguments of :class:`Pipeline`."""
    before, behind = _ways_at_cuts(strategy, stage)
    made = _Stage(
        modules[stage.index],
        stage.index,
        len(strategy.stages),
        place.device,
        # Without static metadata torch would run each stage once on uninitialised
        # inputs, which no integer index survives.
        input_args=tuple(_message(one, before) for one in stage.receives),
        output_args=tuple(_message(one, behind) for one in stage.sends),
        group=place.group("pp"),
    )
    if before > 1 or behind > 1:
        made.tp = place.group("tp")
    if before > 1:
        made.entering = tuple(
            one.shape if _divided(one, before) else None for one in stage.receives
        )
    if behind > 1:
        made.leaving = tuple(_divided(one, behind) for one in stage.sends)
    return made


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
        casts: With which stages compute, by index, of those that cast their weights.

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
        casts: Mapping[int, WeightCasts | None],
    ) -> None:
        count = len(strategy.stages)
        self.lowered = tuple(lowered)
        stages = [_made(stage, modules, strategy, place) for stage in lowered]
        for stage in stages:
            stage.casts = casts.get(stage.stage_index)
        self._inside = strategy.loss_chunks > 1
        if self._inside and lowered[-1].index == count - 1:
            stages[-1].loss = loss
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
        if self._inside:
            named[_TARGET] = target
        step(target=target, losses=losses, return_outputs=False, **named)
        return torch.stack(losses).sum().detach() if self._has_last else None
