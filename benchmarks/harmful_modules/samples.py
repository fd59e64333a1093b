"""Samples of a batch meet."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harmful_modules.plain import WIDTH, Build, Mlp, Tensor, mixing, model

__all__ = ["SAMPLES"]


class _BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class _Contrast(nn.Module):
    """Two towers, each sample's pair against those of all others, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*(Mlp() for _ in range(2)))
        self.right = nn.Sequential(*(Mlp() for _ in range(2)))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a = functional.normalize(self.left(left), dim=-1)
        b = functional.normalize(self.right(right), dim=-1)
        scores = self.scale.exp() * a @ b.T
        own = torch.arange(len(a), device=a.device)
        return functional.cross_entropy(scores, own)


def _capacity(x: Tensor) -> Tensor:
    """Lets half of all tokens through, in their order, as experts with a queue do."""
    rows = x.flatten(0, 1)
    wanted = (rows[:, :1] > 0).to(x.dtype)
    place = wanted.cumsum(0)
    let = wanted * (place <= 24)
    return (rows * let).view_as(x)


SAMPLES: dict[str, Build] = {
    "mean samples": mixing(lambda x: x - x.mean(0, keepdim=True)),
    "roll samples": mixing(lambda x: x.roll(1, 0)),
    "softmax samples": mixing(lambda x: x.softmax(0) * x),
    "sort samples": mixing(lambda x: x.sort(0).values),
    "count of samples": mixing(lambda x: x * x.shape[0] / 8),
    "queue of tokens": mixing(_capacity),
    "batch norm": model(mix=_BatchNorm),
    "contrast": _Contrast,
}
