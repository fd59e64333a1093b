"""Modules that are compiled, and checks of the machine before."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from executors.strategies.blocks import (
    apply_recompute,
    compile_blocks,
    require_compiler,
)
from planner.errors import ExecutionError
from planner.schema import Recompute
from tests.distributed.cases import UNITS, build

#: torch's own compiler backend, when it is imported.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


def test_blocks_are_compiled_in_place_and_single_layers_left_alone() -> None:
    model = build("llama")
    names = [name for name, _ in model.named_parameters()]
    limit = torch._dynamo.config.recompile_limit
    blocks = compile_blocks(model, UNITS["llama"])
    assert blocks == tuple(f"model.layers.{index}" for index in range(4))
    assert [name for name, _ in model.named_parameters()] == names
    for name in UNITS["llama"]:
        compiled = "forward" in model.get_submodule(name).__dict__
        assert compiled == (name in blocks)
    # Blocks that tp makes unlike must all find room among the code of one function.
    assert torch._dynamo.config.recompile_limit == limit + 4


def test_blocks_without_parameters_are_left_alone() -> None:
    model = nn.ModuleDict({"act": nn.Sequential(nn.ReLU(), nn.Dropout())})
    assert compile_blocks(model, ("act",)) == ()


def test_a_missing_compiler_is_said_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ExecutionError, match=r"g\+\+ or clang\+\+ is not on the PATH"):
        require_compiler(torch.device("cpu"))
    compiler = tmp_path / "my-compiler"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", "my-compiler")
    require_compiler(torch.device("cpu"))
    monkeypatch.setenv("CXX", "another")
    with pytest.raises(ExecutionError, match="another is not on the PATH"):
        require_compiler(torch.device("cpu"))


def test_gpus_are_compiled_for_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExecutionError, match="Triton is not installed"):
        require_compiler(torch.device("cuda", 0))


class _Counting(nn.Module):
    """Updates buffers in forward: in place, by assignment, and before it reads one."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("fixed", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.calls += 1
        out: torch.Tensor = self.layer(self.norm(x) - self.mean) * self.fixed
        return out.tanh() * float(self.calls)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputation_leaves_buffers_as_they_are(how: Recompute) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(_Counting(), _Counting())
    recomputed = copy.deepcopy(plain)
    apply_recompute(recomputed, ["0", "1"], how)
    for _ in range(2):
        batches = [torch.randn(8, 4) for _ in range(2)]
        for model in (plain, recomputed):
            # As in a pipeline: the second forward comes before the first backward.
            losses = [model(batch).square().sum() for batch in batches]
            for loss in losses:
                loss.backward()
    for (name, one), two in zip(
        plain.named_buffers(), recomputed.buffers(), strict=True
    ):
        assert torch.equal(one, two), name
    for one, two in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        torch.testing.assert_close(one.grad, two.grad)
