"""A model without transformers, for the check that the core needs no extra."""

from __future__ import annotations

import torch
from torch import nn


class Perceptron(nn.Module):
    """A few equal layers, as most large models are."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        """Make the layers."""
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features to features of the same width."""
        for layer in self.layers:
            x = layer(x)
        return x


def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and a batch to run it with."""
    return Perceptron(), {"x": torch.empty(8, 64, device="meta")}
