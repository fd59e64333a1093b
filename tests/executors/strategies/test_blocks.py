"""Modules that are compiled, and checks of the machine before."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from executors.strategies.blocks import compile_blocks, require_compiler
from planner.errors import ExecutionError
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
