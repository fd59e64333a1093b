"""Bytes that torch's pipeline runtime holds, against the counts.

The runtime runs one rank of a pipeline on a process group that moves nothing, so that
what it holds is what its stages and caches hold.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from executors.measuring.memory import LiveMemory
from planner.simulate import actions, peak_held_bytes

WIDTH = 64
#: Bytes of every activation: a microbatch of 64 rows.
UNIT = 64 * WIDTH * 4
MICROBATCHES = 6


def _stage() -> nn.Module:
    """Saves the outputs of both tanh besides its input; three products have weights."""

    def product() -> nn.Linear:
        return nn.Linear(WIDTH, WIDTH, bias=False)

    module = nn.Sequential(product(), nn.Tanh(), product(), nn.Tanh(), product())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


@pytest.fixture
def rank_of_two(request: pytest.FixtureRequest) -> Iterator[int]:
    rank: int = request.param
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    yield rank
    dist.destroy_process_group()


def _agree(stages: list[PipelineStage], *_: Any) -> None:
    """Take static shapes, which ranks cannot exchange without a process group."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _watch(stage: PipelineStage, live: LiveMemory, after: list[float]) -> None:
    """Note what is alive after each action of a stage."""

    def watched(original: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            after.append(live.current_bytes / UNIT)
            return result

        return run

    for name in ("forward", "backward", "backward_weight"):
        name = f"{name}_one_chunk"
        setattr(stage, name, watched(getattr(stage, name)))


def _peak(schedule: str, own: list[int], count: int) -> float:
    """Most units alive after an action of the second step, without receive buffers."""

    def meta(index: int) -> torch.Tensor:
        return torch.empty(64, WIDTH, device="meta", requires_grad=index > 0)

    stages = [
        PipelineStage(
            _stage(),
            index,
            count,
            torch.device("cpu"),
            input_args=(meta(index),),
            output_args=(meta(index + 1),),
        )
        for index in own
    ]
    runtime: Any = get_schedule_class(schedule)(
        stages, MICROBATCHES, loss_fn=lambda out, _: out.square().sum()
    )
    runtime._warmup_p2p = _agree
    inputs = torch.ones(MICROBATCHES * 64, WIDTH)
    after: list[float] = []
    # What other tests left in cycles would be freed in the middle.
    gc.collect()
    with LiveMemory() as live:
        start = live.current_bytes / UNIT
        for stage in stages:
            _watch(stage, live, after)
        for _ in range(2):
            after.clear()
            runtime.step(
                *([inputs] if 0 in own else []), target=inputs, return_outputs=False
            )
    # Buffers for what every microbatch receives, inputs and gradients.
    edges = sum((index > 0) + (index < count - 1) for index in own)
    return max(after) - start - edges * MICROBATCHES


@pytest.mark.parametrize(
    ("rank_of_two", "schedule"),
    [
        (0, "InterleavedZeroBubble"),
        (1, "InterleavedZeroBubble"),
        (0, "ZBVZeroBubble"),
        (0, "DualPipeV"),
        (0, "Interleaved1F1B"),
        (1, "Interleaved1F1B"),
    ],
    indirect=["rank_of_two"],
)
def test_torch_holds_what_the_phases_say(rank_of_two: int, schedule: str) -> None:
    table = actions(schedule, 2, 2, MICROBATCHES)
    own = np.flatnonzero(table.rank_of_stage == rank_of_two).tolist()
    # What both tanh saved, and the output that the stage hands on.
    forward = [3.0, 3.0, 3.0, 3.0]
    # Stage 0 leaves all to the weight gradient. The others add the gradients of the
    # products' outputs and of their input. The last of these gradients was received;
    # in the last stage it is new, and the loss gives its output back.
    split = [3.0, 6.0, 6.0, 6.0]
    found = _peak(schedule, own, table.num_stages)
    expected = peak_held_bytes(
        table, forward, split, after_split_bytes=[0.0, 1.0, 1.0, 1.0]
    )
    assert found == pytest.approx(expected[rank_of_two], abs=0.01)
