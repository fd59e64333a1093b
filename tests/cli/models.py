"""Models that plans name as ``tests.cli.models:NAME``."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses import FakeTensor

from planner.capture import load_model
from tests.plans import TINY

__all__ = ["failing", "mixing", "stacked"]


class _Table(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # While a model is read or cut, it is run on fake tensors.
        if self.number == 3 and not isinstance(x, FakeTensor):
            raise LookupError(f"no table for {self.number}")
        out: torch.Tensor = self.linear(x)
        return out


class _Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = _Table(number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).relu()


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(number) for number in range(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def failing() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Four layers, of which the third fails on real tensors."""
    return _Layers(), {"x": torch.empty(8, 64, device="meta")}


def stacked() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A Sequential of Sequentials, whose input is called ``input``."""
    inner = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*inner), {"input": torch.empty(8, 64, device="meta")}


def mixing() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The tiny Llama, in one feed-forward layer of which tokens see those before."""
    model = load_model(f"hf:{TINY}", seq_len=32).build()
    model.get_submodule("model.layers.1.mlp").register_forward_hook(
        lambda _, __, output: output + output.cumsum(1)
    )
    return model, {"input_ids": torch.empty(4, 32, dtype=torch.int64, device="meta")}
