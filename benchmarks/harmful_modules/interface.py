"""Inputs and outputs of other names and forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harmful_modules.plain import WIDTH, Build, Mlp, Model, Tensor

__all__ = ["INTERFACE"]


class _Named(Model):
    """Returns logits in a dict."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        return {"logits": super().forward(input_ids, position_ids)}


class _Tuple(Model):
    """Returns hidden states beside the logits."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = self.enter(input_ids, position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)), x


class _Losses(Model):
    """Returns a loss of its own, the sum of two."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = self.enter(input_ids, position_ids)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x))
        own = functional.cross_entropy(
            scores[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()
        )
        return {"loss": own + 0.1 * scores.logsumexp(-1).square().mean()}


class _Target(Model):
    """Takes tokens under a name that means something else."""

    def forward(self, target: Tensor, position_ids: Tensor | None = None) -> Any:
        return super().forward(target, position_ids)


class _Self(Model):
    """Takes tokens under a name that modules have, too."""

    def forward(self, layers: Tensor, position_ids: Tensor | None = None) -> Any:
        return super().forward(layers, position_ids)


class _Towers(nn.Module):
    """Two towers that meet at the end; only one is deep."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*(Mlp() for _ in range(4)))
        self.right = Mlp()
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.cat((self.left(left), self.right(right)), -1))


INTERFACE: dict[str, Build] = {
    "dict output": _Named,
    "tuple output": _Tuple,
    "several losses": _Losses,
    "input named target": _Target,
    "input named layers": _Self,
    "two towers": _Towers,
}
