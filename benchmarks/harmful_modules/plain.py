"""A plain causal language model of four blocks, with places for a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "BATCH",
    "HEADS",
    "INNER",
    "LAYERS",
    "SEQ",
    "SIZE",
    "VOCAB",
    "WIDTH",
    "Apply",
    "Attention",
    "Block",
    "Build",
    "Function",
    "Mlp",
    "Model",
    "Tensor",
    "between",
    "mixing",
    "model",
    "on_heads",
]

SEQ, BATCH = 16, 8
VOCAB, WIDTH, INNER, HEADS, LAYERS = 96, 32, 64, 4, 4
SIZE = WIDTH // HEADS

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]
Build = Callable[[], nn.Module]


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return self.function(x)


class Attention(nn.Module):
    """Causal self-attention; ``heads`` changes q, k and v, ``out`` what comes of it."""

    def __init__(
        self,
        heads: Function | None = None,
        out: Function | None = None,
    ) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)
        self.heads, self.out = heads, out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of tokens. Shapes [batch, heads, seq, head size]."""
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v. Shape [batch, heads, seq, head size] each."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if self.heads is not None:
            q, k = self.heads(q), self.heads(k)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        """Attend and project. Shape [batch, seq, width]."""
        y = self.attend(*self.project(x))
        if self.out is not None:
            y = self.out(y)
        return self.o(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    """Two linear layers with a function of features between them."""

    def __init__(self, between: Function | None = None, inner: int = INNER) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(inner, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the stream. Shape [batch, seq, width]."""
        y = functional.gelu(self.up(x))
        return self.down(self.between(y) if self.between is not None else y)


class Block(nn.Module):
    """A block; ``mix`` is added to the stream beside attention and MLP."""

    def __init__(
        self,
        attention: nn.Module | None = None,
        mlp: nn.Module | None = None,
        mix: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = attention if attention is not None else Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = mlp if mlp is not None else Mlp()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        """Add to the stream. Shape [batch, seq, width]."""
        if self.mix is not None:
            x = x + self.mix(x)
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """The language model; ``block`` makes its blocks."""

    def __init__(self, block: Build = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Embedding(2 * SEQ, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """Embed tokens and positions. Shape [batch, seq, width]."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.embed(input_ids) + self.place(position_ids)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        """Return logits. Shape [batch, seq, vocabulary]."""
        x = self.enter(input_ids, position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def model(**parts: Build) -> Build:
    """Return a maker of the model whose blocks have other parts."""
    return lambda: Model(lambda: Block(**{k: make() for k, make in parts.items()}))


def mixing(function: Function) -> Build:
    """Return a maker of the model that adds a function of the stream to it."""
    return model(mix=lambda: Apply(function))


def between(function: Function, inner: int = INNER) -> Build:
    """Return a maker of the model with a function in the MLP, to ``inner`` features."""
    return model(mlp=lambda: Mlp(function, inner))


def on_heads(make: Build) -> Build:
    """Return a maker of the model with a module on what its heads return."""
    return model(attention=lambda: Attention(out=make()))
