"""Features meet, or are counted, between a colwise and a rowwise layer."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harmful_modules.plain import (
    INNER,
    Build,
    Function,
    Mlp,
    Tensor,
    between,
    model,
)

__all__ = ["FEATURES"]


def _shuffle(y: Tensor) -> Tensor:
    return y.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)


def _gate_halves(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return functional.silu(gate) * up


def _gate_turns(y: Tensor) -> Tensor:
    return functional.silu(y[..., ::2]) * y[..., 1::2]


class _Scaled(Mlp):
    """Features times a parameter."""

    def __init__(self) -> None:
        super().__init__(self.scale)
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, INNER))

    def scale(self, y: Tensor) -> Tensor:
        return y * self.factor


_FUNCTIONS: dict[str, Function] = {
    "flip features": lambda y: y.flip(-1),
    "roll features": lambda y: y.roll(3, -1),
    "sort features": lambda y: y.sort(-1).values,
    "cumsum features": lambda y: y.cumsum(-1) / 8,
    "softmax features": lambda y: y.softmax(-1) * 8,
    "mean features": lambda y: y - y.mean(-1, keepdim=True),
    "max features": lambda y: y / (1 + y.abs().amax(-1, keepdim=True)),
    "unit length": lambda y: functional.normalize(y, dim=-1),
    "group norm": lambda y: functional.group_norm(y.flatten(0, 1), 2).view_as(y),
    "layer norm inside": lambda y: functional.layer_norm(y, y.shape[-1:]),
    "shuffle features": _shuffle,
    "count of features": lambda y: y / math.sqrt(y.shape[-1] / 8),
    "place of features": lambda y: y * torch.linspace(0, 1, y.shape[-1]).to(y),
    "halves swapped": lambda y: torch.cat(y.chunk(2, -1)[::-1], -1),
    "fft features": lambda y: torch.fft.fft(y.float(), dim=-1).real.to(y.dtype) / 8,
    "first feature": lambda y: y * y[..., :1],
}

FEATURES: dict[str, Build] = {
    **{name: between(function) for name, function in _FUNCTIONS.items()},
    "maxout": between(lambda y: y.unflatten(-1, (-1, 2)).amax(-1), INNER // 2),
    "gate-up halves": between(_gate_halves, INNER // 2),
    "gate-up in turns": between(_gate_turns, INNER // 2),
    "scaled features": model(mlp=_Scaled),
}
