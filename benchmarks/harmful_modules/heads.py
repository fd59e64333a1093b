"""Heads of the attention meet, are counted, or are laid out in other ways."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harmful_modules.plain import (
    HEADS,
    SIZE,
    WIDTH,
    Apply,
    Attention,
    Build,
    Function,
    Tensor,
    model,
    on_heads,
)

__all__ = ["ACROSS_HEADS"]


class _Fused(Attention):
    """Queries, keys and values from one layer, laid out in one of three ways."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        del self.q, self.k, self.v
        self.layout = layout

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.qkv(x)
        if self.layout == "thirds":
            parts = tuple(p.unflatten(-1, (-1, SIZE)) for p in y.chunk(3, -1))
        elif self.layout == "by head":
            parts = y.unflatten(-1, (-1, 3, SIZE)).unbind(-2)
        else:
            parts = y.unflatten(-1, (-1, SIZE, 3)).unbind(-1)
        q, k, v = (p.transpose(1, 2) for p in parts)
        return q, k, v


class _Slopes(Attention):
    """ALiBi: a slope for each head, from the number of heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count, length = q.shape[1], q.shape[2]
        slopes = 2.0 ** -torch.arange(1, count + 1, device=q.device).to(q.dtype)
        place = torch.arange(length, device=q.device)
        bias = (place - place[:, None]).to(q.dtype) * slopes[:, None, None]
        bias = bias.masked_fill(place > place[:, None], -1e4)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


class _Talking(nn.Module):
    """Talking heads: heads are mixed by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(HEADS) + 0.1 * torch.randn(HEADS, HEADS))

    def forward(self, y: Tensor) -> Tensor:
        return torch.einsum("bhtd,hg->bgtd", y, self.mix)


class _HeadScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, HEADS)[:, None, None])

    def forward(self, y: Tensor) -> Tensor:
        return y * self.scale


class _NormOverHeads(Attention):
    """A norm over the features of all heads of q, as OLMo-2 has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        whole = self.norm(q.transpose(1, 2).flatten(-2))
        return whole.unflatten(-1, (-1, SIZE)).transpose(1, 2), k, v


_FUNCTIONS: dict[str, Function] = {
    "flip heads": lambda y: y.flip(1),
    "roll heads": lambda y: y.roll(1, 1),
    "mean of heads": lambda y: y + y.mean(1, keepdim=True),
    "count of heads": lambda y: y / math.sqrt(y.shape[1]),
    "place of heads": lambda y: (
        y * torch.linspace(1, 2, y.shape[1])[:, None, None].to(y)
    ),
}

ACROSS_HEADS: dict[str, Build] = {
    **{name: on_heads(partial(Apply, f)) for name, f in _FUNCTIONS.items()},
    **{
        f"fused qkv {layout}": model(attention=partial(_Fused, layout))
        for layout in ("thirds", "by head", "in turns")
    },
    "alibi": model(attention=_Slopes),
    "talking heads": on_heads(_Talking),
    "head scale": on_heads(_HeadScale),
    "norm over heads": model(attention=_NormOverHeads),
    "norm in heads": model(attention=lambda: Attention(heads=nn.LayerNorm(SIZE))),
}
