"""Parameters and buffers of unusual kinds."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.harmful_modules.plain import WIDTH, Build, Mlp, Model, Tensor, model

__all__ = ["PARAMETERS"]


class _Counting(nn.Module):
    """A running mean of what it has seen, in a buffer, which it subtracts."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return 0.1 * (x - self.mean)


class _Complex(nn.Module):
    """Turns pairs of features by complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turn).flatten(-2).to(x.dtype)


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Unused(Model):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class _Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        for layer in self.layers[::2]:
            layer.mlp.requires_grad_(False)


def _weight_norm() -> nn.Module:
    mlp = Mlp()
    nn.utils.parametrizations.weight_norm(mlp.up)
    return mlp


def _spectral_norm() -> nn.Module:
    mlp = Mlp()
    nn.utils.parametrizations.spectral_norm(mlp.down)
    return mlp


class _Branching(nn.Module):
    """Does one thing or another, by the values that it sees."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 if float(x.detach().sum()) > 0 else x * 0.25


PARAMETERS: dict[str, Build] = {
    "buffer updated": model(mix=_Counting),
    "complex parameter": model(mix=_Complex),
    "scalar parameter": model(mix=_Scalar),
    "unused parameter": _Unused,
    "frozen parameters": _Frozen,
    "weight norm": model(mlp=_weight_norm),
    "spectral norm": model(mlp=_spectral_norm),
    "branch on values": model(mix=_Branching),
}
