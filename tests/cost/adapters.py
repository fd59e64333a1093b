"""A stack of frozen layers with small trained ones beside them, as LoRA makes it."""

from __future__ import annotations

import torch
from torch import nn

from planner.capture import capture
from planner.graph import ModelGraph

__all__ = ["RANK", "WIDTH", "adapted_graph"]

WIDTH, RANK = 256, 4


class _Adapted(nn.Module):
    """A linear layer, and what is learned on top of it (Hu et al. 2021, 2106.09685)."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.weight.requires_grad_(not frozen)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.base(x) + self.up(self.down(x)))


class _Stack(nn.Module):
    def __init__(self, layers: int, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Adapted(frozen) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def adapted_graph(layers: int = 4, *, frozen: bool = True) -> ModelGraph:
    """Read a stack; its inputs are 64 rows."""
    return capture(
        _Stack(layers, frozen), ((64, WIDTH), "float32"), dtype="float32", repeat=False
    )
