"""Layers are wired, shared or called in other ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harmful_modules.plain import (
    INNER,
    LAYERS,
    VOCAB,
    WIDTH,
    Attention,
    Block,
    Build,
    Mlp,
    Model,
    Tensor,
    model,
)

__all__ = ["WIRING"]

Parts = dict[str, Callable[[], Any]]
Returned = Callable[[Any, Tensor, Tensor], Tensor]


class _Wired(nn.Module):
    """Attention plain; the MLP does what usually is done outside of it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), _Way(*_WAYS[way])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return self.mlp(self.norm2(x), x)


class _Way(nn.Module):
    """An MLP with parts of its own, and what it returns."""

    def __init__(self, parts: Parts, returned: Returned) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        for name, make in parts.items():
            setattr(self, name, make())
        self.returned = returned

    def run(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        y = self.up(x)
        return self.down(functional.gelu(y if beside is None else y + beside))

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        return self.returned(self, x, stream)


def _ramp(least: float, most: float) -> nn.Parameter:
    return nn.Parameter(torch.linspace(least, most, WIDTH))


def _twice(mlp: Any, x: Tensor, stream: Tensor) -> Tensor:
    y: Tensor = mlp.run(x)
    return stream + y + y.detach()


def _low_rank(width: int) -> Parts:
    return {
        "low": lambda: nn.Linear(WIDTH, 4, bias=False),
        "high": lambda: nn.Linear(4, width, bias=False),
    }


#: Parts of an MLP, and what it returns of its input and of the stream around it.
_WAYS: dict[str, tuple[Parts, Returned]] = {
    "residual passed in": ({}, lambda m, x, s: s + m.run(x)),
    "residual of the input": ({}, lambda m, x, _: m.run(x) + x),
    "post-norm": (
        {"after": lambda: nn.LayerNorm(WIDTH)},
        lambda m, x, s: m.after(m.run(x) + s),
    ),
    "layer scale": (
        {"scale": lambda: _ramp(0.5, 1.5)},
        lambda m, x, s: s + m.run(x) * m.scale,
    ),
    "bias": (
        {"bias": lambda: _ramp(-0.5, 0.5)},
        lambda m, x, s: s + m.run(x) + m.bias,
    ),
    "output gate": (
        {"gate": lambda: nn.Linear(WIDTH, WIDTH)},
        lambda m, x, s: s + m.run(x) * m.gate(x).sigmoid(),
    ),
    "adapter": (_low_rank(INNER), lambda m, x, s: s + m.run(x, m.high(m.low(x)))),
    "adapter around both": (
        _low_rank(WIDTH),
        lambda m, x, s: s + m.run(x) + m.high(m.low(x)),
    ),
    "added twice": ({}, _twice),
}


class _Skip(Model):
    """The first block's output is read by the last, as in a U-net."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = first = self.layers[0](self.enter(input_ids, position_ids))
        for layer in self.layers[1:-1]:
            x = layer(x)
        return self.head(self.norm(self.layers[-1](x + first)))


class _Shared(Model):
    """One block, called four times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = self.enter(input_ids, position_ids)
        for _ in range(LAYERS):
            x = self.layers[0](x)
        return self.head(self.norm(x))


class _SharedMlp(Model):
    """All blocks hold the same MLP."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.mlp = self.layers[0].mlp


class _Tied(Model):
    """Embedding and head share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class _TiedByFunction(Model):
    """The embedding's weight is read as a head, and there is no module of it."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = self.enter(input_ids, position_ids)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.embed.weight)


class _Around(nn.Embedding):
    """A table with a second way in, which hooks do not see."""

    def around(self, index: Tensor) -> Tensor:
        return super().forward(index)


class _LookedUpAround(Model):
    """Looks a table up by another method than ``forward``, as ProphetNet does."""

    embed: _Around

    def __init__(self) -> None:
        super().__init__()
        self.embed = _Around(VOCAB, WIDTH)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = self.enter(input_ids, position_ids)
        for layer in self.layers:
            x = layer(x)
        x = x + 0.5 * self.embed.around(input_ids)
        return self.head(self.norm(x))


class _Functional(Mlp):
    """Reads a weight of its own linear layer once more."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.up(x))
        return self.down(y) + 0.1 * self.up.weight.mean()


class _Twice(Mlp):
    """Calls each layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class _Parallel(Block):
    """Attention and MLP side by side, as GPT-J has."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return x + self.attention(y) + self.mlp(y)


WIRING: dict[str, Build] = {
    **{way: partial(Model, partial(_Wired, way)) for way in _WAYS},
    "skip over blocks": _Skip,
    "shared block": _Shared,
    "shared mlp": _SharedMlp,
    "tied head": _Tied,
    "tied head by function": _TiedByFunction,
    "table looked up around forward": _LookedUpAround,
    "weight read again": model(mlp=_Functional),
    "mlp called twice": model(mlp=_Twice),
    "parallel branches": partial(Model, _Parallel),
}
