"""A model without transformers, for the check that the core needs no extra."""

from __future__ import annotations

import torch
from torch import nn


def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small multilayer perceptron and a batch to run it with."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers), {"input": torch.empty(8, 64, device="meta")}
