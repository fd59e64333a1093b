"""Built-in models of volumes: CosmoFlow and a 3-D U-Net, for samples of any size.

``cosmoflow-128`` takes cubes of 128 values a side, ``unet3d-128`` likewise. They have
the layers that Oyama et al. 2020 (arXiv 2007.12856) train on samples of up to 512
values a side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from planner.capture.inputs import InputShape

__all__ = [
    "VOLUME_SOURCES",
    "CosmoFlow",
    "UNet3d",
    "small_volume",
    "volume_inputs",
    "volume_models",
    "volume_side",
]

#: Channels of a sample of each: redshifts of a simulation; one scan.
_CHANNELS = {"cosmoflow": 4, "unet3d": 1}
#: Sizes that names are built in for.
_SIZES = {"cosmoflow": (32, 64, 128, 256, 512), "unet3d": (32, 64, 128, 256)}
#: Class of each, and where its figures are published.
VOLUME_SOURCES = {
    "cosmoflow": ("CosmoFlow", "arXiv:1808.04728; widths of Oyama et al. 2020"),
    "unet3d": ("UNet3d", "arXiv:1606.06650"),
}
#: Parameters of a universe that CosmoFlow predicts, and classes of a voxel.
_TARGETS, _CLASSES = 4, 3


class CosmoFlow(nn.Module):
    """Parameters of a universe from a cube of its matter.

    log2(size) - 2 convolutions of 3 x 3 x 3, each halved by a pooling, then three dense
    layers. Sources: Mathuriya et al. 2018 (arXiv 1808.04728); Oyama et al. 2020, which
    has channels of min(16 x 2^i, 256).

    Args:
        size: Values along each side, a power of two from 8 on.
        width: Channels of the first convolution.
        dense: Features of the dense layers but the last.
    """

    def __init__(
        self, size: int = 128, *, width: int = 16, dense: tuple[int, ...] = (2048, 256)
    ) -> None:
        super().__init__()
        blocks = round(math.log2(size)) - 2
        channels = [_CHANNELS["cosmoflow"]]
        channels += [min(width * 2**i, 16 * width) for i in range(blocks)]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(first, second, 3, padding=1, bias=False),
                nn.LeakyReLU(0.3),
                nn.MaxPool3d(2),
            )
            for first, second in itertools.pairwise(channels)
        )
        left = size >> blocks
        features = [channels[-1] * left**3, *dense]
        self.dense = nn.ModuleList(
            nn.Sequential(nn.Linear(first, second), nn.LeakyReLU(0.3))
            for first, second in itertools.pairwise(features)
        )
        self.head = nn.Linear(features[-1], _TARGETS)

    def forward(
        self, volume: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the parameters, or their mean squared error.

        Args:
            volume: Shape [batch, 4, size, size, size].
            targets: Shape [batch, 4].
        """
        for block in self.blocks:
            volume = block(volume)
        features = torch.flatten(volume, 1)
        for layer in self.dense:
            features = layer(features)
        found: torch.Tensor = self.head(features)
        return found if targets is None else functional.mse_loss(found, targets)


def _pair(first: int, second: int, third: int) -> nn.Sequential:
    """Two convolutions with batch norms."""
    return nn.Sequential(
        nn.Conv3d(first, second, 3, padding=1, bias=False),
        nn.BatchNorm3d(second),
        nn.ReLU(),
        nn.Conv3d(second, third, 3, padding=1, bias=False),
        nn.BatchNorm3d(third),
        nn.ReLU(),
    )


class UNet3d(nn.Module):
    """Class of each voxel of a volume.

    Three levels of pairs of convolutions, each with a connection from the way down to
    the way up. Source: Çiçek et al. 2016 (arXiv 1606.06650), figure 2; trained by
    Oyama et al. 2020.

    Args:
        width: Channels of the first convolution.
    """

    def __init__(self, *, width: int = 32) -> None:
        super().__init__()
        levels = (1, 2, 4)
        channels = [_CHANNELS["unet3d"], *(2 * width * level for level in levels)]
        self.down = nn.ModuleList(
            _pair(channels[i], width * level, 2 * width * level)
            for i, level in enumerate(levels)
        )
        self.pool = nn.MaxPool3d(2)
        self.bottom = _pair(8 * width, 8 * width, 16 * width)
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(4 * width * level, 4 * width * level, 2, stride=2)
            for level in reversed(levels)
        )
        self.joined = nn.ModuleList(
            _pair(6 * width * level, 2 * width * level, 2 * width * level)
            for level in reversed(levels)
        )
        self.head = nn.Conv3d(2 * width, _CLASSES, 1)

    def forward(
        self, volume: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the scores of each class, or their mean cross entropy.

        Args:
            volume: Shape [batch, 1, d1, d2, d3], multiples of 8.
            labels: Classes. Shape [batch, d1, d2, d3].
        """
        kept = []
        for level in self.down:
            volume = level(volume)
            kept.append(volume)
            volume = self.pool(volume)
        volume = self.bottom(volume)
        for up, joined in zip(self.up, self.joined, strict=True):
            volume = joined(torch.cat([kept.pop(), up(volume)], 1))
        scores: torch.Tensor = self.head(volume)
        return scores if labels is None else functional.cross_entropy(scores, labels)


def volume_models() -> Mapping[str, Callable[[], nn.Module]]:
    """Models of volumes by name, each to be built without arguments."""

    def cosmoflow(size: int) -> Callable[[], nn.Module]:
        return lambda: CosmoFlow(size)

    return {
        **{f"cosmoflow-{size}": cosmoflow(size) for size in _SIZES["cosmoflow"]},
        **{f"unet3d-{size}": UNet3d for size in _SIZES["unet3d"]},
    }


def volume_inputs(name: str, batch: int) -> dict[str, InputShape]:
    """Inputs of a model of volumes, with what its loss compares with.

    Args:
        name: Of :func:`volume_models`.
        batch: Samples.
    """
    kind, _, size = name.partition("-")
    cube = (int(size),) * 3
    volume = InputShape(shape=(batch, _CHANNELS[kind], *cube), dtype="float32")
    if kind == "cosmoflow":
        targets = InputShape(shape=(batch, _TARGETS), dtype="float32")
        return {"volume": volume, "targets": targets}
    labels = InputShape(shape=(batch, *cube), dtype="int64", high=_CLASSES)
    return {"volume": volume, "labels": labels}


def volume_side(ref: str | None) -> int | None:
    """Values along each side of the samples of :func:`small_volume`; None without."""
    return 32 if ref in volume_models() else None


def small_volume(ref: str | None) -> nn.Module | None:
    """Return a small model of a kind that is built in, with the same modules.

    Args:
        ref: Of :func:`volume_models`; None is returned for others.
    """
    if ref not in volume_models():
        return None
    if str(ref).startswith("unet3d"):
        return UNet3d(width=2)
    return CosmoFlow(32, width=2, dense=(8, 4))
