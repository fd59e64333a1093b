"""The loss in chunks: what the planner makes of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from executors.dryrun import dry_run
from planner import plan
from planner.capture import capture
from planner.errors import NoFeasiblePlanError, StrategyError
from planner.graph import ModelGraph
from planner.schema import Optimizer, Plan, Precision
from tests.distributed.planned import graph_of

FLOAT32 = Precision(compute="float32")
SGD = Optimizer(name="SGD")


class _Words(nn.Module):
    """A model whose logits are most of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4096, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(input_ids))))


@cache
def _graph() -> ModelGraph:
    ids = torch.zeros(2, 512, dtype=torch.int64)
    return capture(_Words, {"input_ids": ids}, dtype="float32", name="words")


def _planned(memory_fraction: float = 0.9, **pins: int | str) -> Plan:
    return plan(
        _graph(),
        "local:1",
        global_batch=2,
        pin=pins,
        precision=FLOAT32,
        optimizer=SGD,
        memory_fraction=memory_fraction,
    )


def _peak(found: Plan) -> float:
    return max(entry.total_bytes for entry in found.prediction.memory)


def test_memory_and_time_are_priced() -> None:
    whole, chunked = _planned(), _planned(loss_chunks=16)
    assert whole.strategy.loss_chunks == 1
    assert chunked.strategy.loss_chunks == 16
    # Two copies of 1024 x 4096 logits in float32 are 34 MB.
    assert _peak(whole) - _peak(chunked) > 25e6
    assert chunked.prediction.step_time_s > whole.prediction.step_time_s
    counted = dry_run(chunked, _Words, 0)
    assert counted.peak_bytes == pytest.approx(_peak(chunked), rel=0.05)


def test_chunks_are_chosen_where_nothing_fits_without() -> None:
    whole = _planned(microbatch_size=2)
    limit = whole.prediction.memory[0].limit_bytes
    share = 0.9 * (_peak(whole) - 5e6) / limit
    found = _planned(share, microbatch_size=2)
    assert found.strategy.loss_chunks == 8
    assert "loss in 8 chunks" in found.summary()
    with pytest.raises(NoFeasiblePlanError):
        _planned(share, microbatch_size=2, loss_chunks=1)
    assert _planned(microbatch_size=2).strategy.loss_chunks == 1


def test_models_without_such_a_layer_are_refused() -> None:
    refused = (StrategyError, NoFeasiblePlanError)
    with pytest.raises(refused, match="loss_chunks=4, but"):
        plan(
            graph_of("tiny-resnet"),
            "local:1",
            global_batch=8,
            pin={"loss_chunks": 4},
            precision=FLOAT32,
        )
