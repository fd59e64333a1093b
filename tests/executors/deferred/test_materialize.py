"""From deferred to real within one process: stages, constants, containers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from executors import build_model
from executors.deferred.materialize import Shards, compute_attributes
from executors.deferred.model import held_tensors, record
from executors.pipelines.stages import lower
from planner.schema import Stage
from tests.distributed.cases import SEQ, UNITS, VOCAB, build

CPU = torch.device("cpu")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.table = torch.randn(40, 12)
        self.tables = [torch.randn(40, 12)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = self.linear(x) + self.table[: x.shape[0]]
        return shifted + self.tables[0][3]


class _Tables(nn.Module):
    """Tensors of every kind, in units and between them, with gradients and without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Block(), _Block()
        self.constant = torch.randn(50, 12) + torch.arange(50.0)[:, None]
        self.scale = nn.Parameter(torch.randn(12))
        self.register_buffer("buffer", torch.randn(16, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffer = self.get_buffer("buffer")
        y = self.first(x) * self.constant[5] + buffer[: x.shape[0]] * self.scale
        y = self.second(y)
        with torch.no_grad():
            total = self.constant.sum()
        return y * self.constant[6] + total * torch.tensor([1.5])


@pytest.mark.parametrize("small_bytes", [0, 500])
def test_stages_hold_constants_and_buffers_with_values(small_bytes: int) -> None:
    torch.manual_seed(0)
    model, recording = record(_Tables, small_bytes=small_bytes)
    assert recording is not None
    compute_attributes(model, recording)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    stages = lower(
        model,
        [Stage(rank=0, modules=("first",)), Stage(rank=1, modules=("second",))],
        {"x": x},
        kind="mean_square",
        device=CPU,
        wire=(torch.float32, torch.float32),
    )
    value: tuple[torch.Tensor, ...] = ()
    for stage in stages:
        values = Shards(stage.module, recording, CPU, torch.float32)
        values.to_meta()
        assert any(p.is_meta for p in stage.module.parameters())
        values.materialize()
        for tensor in held_tensors(stage.module):
            assert not isinstance(tensor, FakeTensor)
            assert not tensor.is_meta
        value = stage.module(*value, x=x)
    assert torch.equal(value, build_model(_Tables)(x))


def test_other_stages_stay_without_values() -> None:
    model, recording = record(lambda: build("llama"), small_bytes=0)
    assert recording is not None
    units = UNITS["llama"]
    first, second = lower(
        model,
        [Stage(rank=0, modules=units[:3]), Stage(rank=1, modules=units[3:])],
        {"input_ids": torch.zeros(2, SEQ, dtype=torch.int64)},
        kind="cross_entropy",
        device=CPU,
        wire=(torch.float32, torch.float32),
    )
    values = Shards(first.module, recording, CPU, torch.bfloat16)
    values.to_meta()
    values.materialize()
    assert all(type(p) is nn.Parameter for p in first.module.parameters())
    assert {p.dtype for p in first.module.parameters()} == {torch.bfloat16}
    assert all(recording.defers(p) for p in second.module.parameters())
    assert first.module.get_parameter(f"{units[0]}.weight").shape == (VOCAB, 32)


def test_what_is_split_while_recording_is_computed_split() -> None:
    torch.manual_seed(0)
    model, recording = record(lambda: nn.Linear(6, 6), small_bytes=0)
    assert recording is not None
    values = Shards(model, recording, CPU, torch.float32)
    with values.recorded():
        half = model.weight.detach().chunk(2, 1)[1].clone()
        model.weight = nn.Parameter(half, requires_grad=False)
    values.to_meta()
    values.materialize()
    assert torch.equal(model.weight, build_model(lambda: nn.Linear(6, 6)).weight[:, 3:])
    assert not model.weight.requires_grad
    assert model.bias.requires_grad
    # Filled once; to ask again changes nothing.
    before = model.weight
    values.materialize()
    assert model.weight is before
