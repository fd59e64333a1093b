"""Orders of torch's own schedules, read without any process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from planner.schema import schedule_spec

__all__ = ["executed_order", "torch_order"]


class _Stage(SimpleNamespace):
    """The part of a pipeline stage that schedule constructors read."""

    def __init__(self, index: int, num_stages: int, pp: int) -> None:
        super().__init__(
            stage_index=index,
            num_stages=num_stages,
            group_size=pp,
            group_rank=0,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            submod=torch.nn.Identity(),
            has_backward=True,
        )


def torch_order(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> dict[int, list[str]]:
    """Compute actions of each rank of a multi-stage schedule, as torch prints them.

    The constructor also checks the order and places sends and receives in it.
    """
    stages = pp * virtual_stages
    own = list(range(0, stages, pp))
    if schedule in ("ZBVZeroBubble", "DualPipeV") and virtual_stages == 2:
        own = [0, stages - 1]
    made = getattr(schedules, str(schedule_spec(schedule).runs))(
        [_Stage(index, stages, pp) for index in own], num_microbatches
    )
    return {
        rank: [str(action) for action in order if action is not None]
        for rank, order in made.pipeline_order.items()
    }


class _Recorder(_Stage):
    """A stage that notes what it is told to compute."""

    def __init__(self, index: int, pp: int) -> None:
        super().__init__(index, pp, pp)
        self.seen: list[str] = []

    def _no_ops(self, _microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = _no_ops
    get_bwd_recv_ops = get_bwd_send_ops = _no_ops

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.seen.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.seen.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, _factor: int) -> None:
        self.seen.append("reduced")


def executed_order(schedule: str, pp: int, num_microbatches: int) -> list[list[str]]:
    """Actions of the single-stage schedules on each rank when they are run.

    Their printed order is not what they run: torch 2.13 prints 1F1B's last rank one
    microbatch too far.
    """
    found = []
    for rank in range(pp):
        stage = _Recorder(rank, pp)
        made = schedules.get_schedule_class(schedule)(stage, num_microbatches)
        made._initialize_stage = lambda *_: None
        inputs = [((),)] * num_microbatches
        made._step_microbatches(inputs, [{}] * num_microbatches)
        assert stage.seen.pop() == "reduced"
        found.append(stage.seen)
    return found
