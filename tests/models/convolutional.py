"""ResNet-50 (He et al. 2016, table 1) and a 3-D U-Net (Cicek et al. 2016)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, inner: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        outer = 4 * channels
        self.conv1 = nn.Conv2d(inner, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, outer, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + kept)


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inner = width
        for index, depth in enumerate(depths):
            channels = width * 2**index
            blocks = []
            for number in range(depth):
                stride = 2 if index and not number else 1
                blocks.append(Bottleneck(inner, channels, stride))
                inner = 4 * channels
            setattr(self, f"layer{index + 1}", nn.Sequential(*blocks))
        self.stages = len(depths)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inner, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for index in range(self.stages):
            x = getattr(self, f"layer{index + 1}")(x)
        return self.fc(self.avgpool(x).flatten(1))


def _twice(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(inner, outer, 3, padding=1, bias=False),
        nn.InstanceNorm3d(outer, affine=True),
        nn.ReLU(),
        nn.Conv3d(outer, outer, 3, padding=1, bias=False),
        nn.InstanceNorm3d(outer, affine=True),
        nn.ReLU(),
    )


class UNet3d(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(depth + 1)]
        self.inc = _twice(1, sizes[0])
        self.down = nn.ModuleList(_twice(a, b) for a, b in pairwise(sizes))
        self.pool = nn.MaxPool3d(2)
        self.rise = nn.ModuleList(
            nn.ConvTranspose3d(b, a, 2, 2)
            for a, b in zip(sizes[-2::-1], sizes[:0:-1], strict=True)
        )
        self.up = nn.ModuleList(_twice(2 * size, size) for size in sizes[-2::-1])
        self.out = nn.Conv3d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [self.inc(x)]
        for block in self.down:
            kept.append(block(self.pool(kept[-1])))
        x = kept.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([kept.pop(), rise(x)], 1))
        return self.out(x)
