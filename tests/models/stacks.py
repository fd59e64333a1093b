"""Modules inside modules, called in every way that a pipeline must keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from planner.capture.volumes import CosmoFlow, UNet3d
from tests.models.convolutional import ResNet

WIDTH = 12


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).relu()


class Gate(nn.Module):
    """Takes keywords and constants, returns a mapping with a tuple and a None in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x: torch.Tensor,
        *,
        scale: float | torch.Tensor,
        double: bool = False,
        mask: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        out = self.inner(x) * scale * (2 if double else 1)
        if mask is not None:
            out = out * mask
        return {"out": out, "none": None, "more": (out.sin(), [x + 1])}


class Keywords(nn.Module):
    """Its inputs have names that Python uses, as those of torch's own modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(4))

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002
        id: torch.Tensor,  # noqa: A002
    ) -> torch.Tensor:
        mask = (id > 0).float()
        found = self.gates[0](input, scale=0.5, double=True, mask=mask)
        found = self.gates[1](found["more"][1][0], scale=found["out"])
        found = self.gates[2](x=found["out"], scale=found["more"][0], mask=mask)
        out: torch.Tensor = self.gates[3](found["out"], scale=1.5)["out"]
        return out


class Recurrent(nn.Module):
    """Calls modules several times: one, two in turn, and a Sequential of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Residual())
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(self.one(x)).relu())
        x = self.two(self.one(x).tanh())
        out: torch.Tensor = self.last(self.body(self.body(x)))
        return out


class Shape(nn.Module):
    """Is given a tensor of which it reads the shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
        assert like is not None
        out: torch.Tensor = self.inner(x) / like.shape[-1] ** 0.5
        return out


class Writes(nn.Module):
    """Fills a mask, adds to activations and lets modules change them, all in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), Shape()
        self.relu = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x)
        mask[:, 0] = 1
        mask[:, 1:3].fill_(2)
        keep = torch.zeros_like(x)
        x = self.one(self.norm(x)) * mask
        keep[:, :4] = x[:, 2:6]
        x = self.two(x, x.cos())
        x = self.relu(x + keep)
        keep += x
        out: torch.Tensor = self.last(x) + keep * mask
        return out


def _shared() -> nn.Module:
    block = Residual()
    return nn.Sequential(block, block, Residual(), block, Residual(), nn.ReLU())


def _perceptron() -> nn.Module:
    layers: list[nn.Module] = []
    for number in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=number % 2 == 0)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5))


def _nested() -> nn.Module:
    inner = nn.Sequential(Residual(), nn.Sequential(Residual(), Residual()))
    return nn.Sequential(nn.Sequential(Residual(), nn.Tanh(), Residual()), inner)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A model to cut into stages.

    Attributes:
        build: Makes it.
        units: Where it may be cut, in order of execution.
        shapes: Of one sample, by input.
        integers: Inputs that are token-like, below 4.
    """

    build: Callable[[], nn.Module]
    units: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"input": (WIDTH,)}
    )
    integers: frozenset[str] = frozenset()


_X = {"x": (WIDTH,)}

STACKS: Mapping[str, Stack] = {
    "blocks": Stack(
        build=lambda: nn.Sequential(*(Residual() for _ in range(8))),
        units=tuple(str(index) for index in range(8)),
    ),
    "perceptron": Stack(build=_perceptron, units=("0", "2", "4", "6", "8")),
    "nested": Stack(build=_nested, units=("0.0", "0.2", "1.0", "1.1.0", "1.1.1")),
    "shared": Stack(build=_shared, units=("0", "2", "4")),
    "keywords": Stack(
        build=Keywords,
        units=tuple(f"gates.{index}" for index in range(4)),
        shapes={"input": (WIDTH,), "id": (WIDTH,)},
        integers=frozenset({"id"}),
    ),
    "recurrent": Stack(
        build=Recurrent,
        units=("one", "two", "body.0", "body.2", "last"),
        shapes=_X,
    ),
    "writes": Stack(build=Writes, units=("one", "two", "relu", "last"), shapes=_X),
    "cosmoflow": Stack(
        build=lambda: CosmoFlow(16, width=2, dense=(8, 4)),
        units=("blocks.0", "blocks.1", "dense.0", "dense.1", "head"),
        shapes={"volume": (4, 16, 16, 16)},
    ),
    "unet3d": Stack(
        build=lambda: UNet3d(width=2),
        units=(
            *(f"down.{level}" for level in range(3)),
            "bottom",
            *(f"{part}.{level}" for level in range(3) for part in ("up", "joined")),
            "head",
        ),
        shapes={"volume": (1, 16, 16, 16)},
    ),
    "resnet": Stack(
        build=lambda: ResNet((2, 1, 1, 1), 4),
        units=(
            *("conv1", "bn1", "layer1.0", "layer1.1"),
            *("layer2.0", "layer3.0", "layer4.0", "fc"),
        ),
        shapes={"x": (3, 32, 32)},
    ),
}
