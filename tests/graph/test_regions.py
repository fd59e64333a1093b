"""Regions of tensor parallelism, read from small modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.capture import capture
from planner.graph import ModelGraph

WIDTH = 8


class _Block(nn.Module):
    """A pair of layers; what else it does is said by its kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.gate = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x).tanh()
        if self.kind in ("scaled", "scaled twice"):
            inner = inner * self.scale
        if self.kind in ("gated", "gated, residual inside"):
            # One number a sample, that every feature is multiplied with.
            inner = inner * (x @ self.gate)
        out: torch.Tensor = self.down(inner)
        if self.kind in ("scaled after", "scaled twice"):
            out = out * self.scale
        return x + out if self.kind.endswith("inside") else out


class _Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = _Block(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.inner(x)
        return out


def _graph(kind: str) -> ModelGraph:
    # What comes first reads data, which needs no gradient.
    first = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(first, *(_Outer(kind) for _ in range(3)))
    return capture(model, torch.randn(4, WIDTH), dtype="float32")


PAIR = {"*.inner.up": "colwise", "*.inner.down": "rowwise"}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("plain", {}),
        ("residual inside", {}),
        ("scaled", {"*.inner.scale": "replicated"}),
        ("scaled after", {}),
        ("gated", {"*.inner": "region"}),
    ],
)
def test_what_computes_between_the_layers_has_a_style(
    kind: str, more: dict[str, str]
) -> None:
    assert dict(_graph(kind).sharding) == PAIR | more


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        # The gradient of x would be summed over tp on its way past the layers, too.
        ("gated, residual inside", "compute with another activation between them"),
        ("scaled twice", "inner.scale, which others read too"),
    ],
)
def test_what_cannot_be_entered_stays_whole(kind: str, reason: str) -> None:
    graph = _graph(kind)
    assert not graph.sharding
    assert all(reason in text for text in graph.whole.values())
    assert set(graph.whole) == set(PAIR)
