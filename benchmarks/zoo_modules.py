"""Small modules that mean harm: each does one thing that a split may get wrong.

Most are a causal language model of four blocks, whose attention is
``scaled_dot_product_attention``, with one change: an op that mixes tokens beside the
attention, features between its linear layers, or samples; or another way to wire,
share, hold or return things. ``MODULES`` has them by name, in groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["BATCH", "MODULES", "SEQ", "Specimen", "build_module"]

SEQ, BATCH = 16, 8
_VOCAB, _WIDTH, _INNER, _HEADS, _LAYERS = 96, 32, 64, 4, 4
_SIZE = _WIDTH // _HEADS

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """One module of the zoo.

    Attributes:
        group: Kind of harm: ``tokens``, ``positions``, ``features``, ``heads``,
            ``samples``, ``wiring``, ``parameters`` or ``interface``.
        build: Makes the module.
        inputs: Makes example inputs.
    """

    group: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]


MODULES: dict[str, Specimen] = {}


def build_module(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a module of the zoo, always with the same weights, and its inputs."""
    torch.manual_seed(0)
    made = MODULES[name].build().train()
    return made, MODULES[name].inputs()


def _tokens(name: str = "input_ids") -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randint(4, 90, (BATCH, SEQ))}


def _vectors(*names: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(BATCH, _WIDTH) for name in names}


def _add(
    group: str,
    name: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[], dict[str, Tensor]] | None = None,
) -> None:
    MODULES[name] = Specimen(group=group, build=build, inputs=inputs or _tokens())


# -- The plain model -------------------------------------------------------------


class _Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _Attention(nn.Module):
    """Causal self-attention; ``heads`` changes q, k and v, ``out`` what comes of it."""

    def __init__(
        self,
        heads: Callable[[Tensor], Tensor] | None = None,
        out: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.q = nn.Linear(_WIDTH, _WIDTH)
        self.k = nn.Linear(_WIDTH, _WIDTH)
        self.v = nn.Linear(_WIDTH, _WIDTH)
        self.o = nn.Linear(_WIDTH, _WIDTH)
        self.heads, self.out = heads, out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            layer(x).unflatten(-1, (-1, _SIZE)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if self.heads is not None:
            q, k = self.heads(q), self.heads(k)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(*self.project(x))
        if self.out is not None:
            y = self.out(y)
        return self.o(y.transpose(1, 2).flatten(-2))


class _Mlp(nn.Module):
    """Two linear layers with a function of features between them."""

    def __init__(self, between: Function | None = None, inner: int = _INNER) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _INNER)
        self.down = nn.Linear(inner, _WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.up(x))
        return self.down(self.between(y) if self.between is not None else y)


class _Block(nn.Module):
    """A block; ``mix`` is added to the stream beside attention and MLP."""

    def __init__(
        self,
        attention: nn.Module | None = None,
        mlp: nn.Module | None = None,
        mix: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(_WIDTH)
        self.attention = attention if attention is not None else _Attention()
        self.norm2 = nn.LayerNorm(_WIDTH)
        self.mlp = mlp if mlp is not None else _Mlp()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        if self.mix is not None:
            x = x + self.mix(x)
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Model(nn.Module):
    """The language model; ``block`` makes its blocks."""

    def __init__(self, block: Callable[[], nn.Module] = _Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCAB, _WIDTH)
        self.place = nn.Embedding(2 * SEQ, _WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(_LAYERS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCAB, bias=False)

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.embed(input_ids) + self.place(position_ids)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = self.enter(input_ids, position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _model(**parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: _Model(lambda: _Block(**{k: make() for k, make in parts.items()}))


_add("plain", "plain", _Model)


# -- Tokens meet outside attention -----------------------------------------------


def _shift(x: Tensor) -> Tensor:
    return functional.pad(x, (0, 0, 1, 0))[:, :-1]


def _counted(x: Tensor) -> Tensor:
    count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
    return x.cumsum(1) / count[:, None]


def _decay(x: Tensor) -> Tensor:
    length = torch.arange(x.shape[1], device=x.device)
    gaps = (length[:, None] - length).clamp(min=0).to(x.dtype)
    return torch.einsum("ts,bsd->btd", (-gaps).exp().tril(), x) / 4


def _windows(x: Tensor) -> Tensor:
    return functional.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)


def _linear_attention(x: Tensor) -> Tensor:
    k = functional.elu(x) + 1
    states = torch.einsum("btd,bte->btde", k, x).cumsum(1) / x.shape[1]
    return torch.einsum("btd,btde->bte", k, states) / _WIDTH


def _recurrence(x: Tensor) -> Tensor:
    state, made = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = state * 0.5 + token
        made.append(state)
    return torch.stack(made, 1)


def _hand_made_attention(x: Tensor) -> Tensor:
    scores = x @ x.transpose(1, 2) / math.sqrt(_WIDTH)
    unseen = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(unseen, -1e4).softmax(-1) @ x


def _pool(x: Tensor) -> Tensor:
    return x.unflatten(1, (-1, 2)).mean(2).repeat_interleave(2, 1)


def _chosen(x: Tensor) -> Tensor:
    best = x.sum(-1).topk(4, 1).indices
    return torch.zeros_like(x).scatter(
        1,
        best[..., None].expand(-1, -1, _WIDTH),
        x.gather(1, best[..., None].expand(-1, -1, _WIDTH)),
    )


_TOKEN_FUNCTIONS: dict[str, Function] = {
    "token shift": _shift,
    "roll tokens": lambda x: x.roll(1, 1),
    "flip tokens": lambda x: x.flip(1),
    "cumsum tokens": _counted,
    "cummax tokens": lambda x: x.cummax(1).values,
    "logcumsumexp tokens": lambda x: x.logcumsumexp(1),
    "mean tokens": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "max tokens": lambda x: x.amax(1, keepdim=True).expand_as(x),
    "softmax tokens": lambda x: x.softmax(1) * x,
    "sort tokens": lambda x: x.sort(1).values,
    "fft tokens": lambda x: torch.fft.fft(x.float(), dim=1).real.to(x.dtype) / SEQ,
    "unfold tokens": _windows,
    "linear attention": _linear_attention,
    "decay matrix": _decay,
    "hand-made attention": _hand_made_attention,
    "recurrence": _recurrence,
    "first token": lambda x: x[:, :1].expand_as(x),
    "last token": lambda x: x[:, -1:].expand_as(x),
    "difference": lambda x: functional.pad(x.diff(dim=1), (0, 0, 1, 0)),
    "standardise tokens": lambda x: (
        (x - x.mean(1, True)) / (x.std(1, keepdim=True) + 1)
    ),
    "pool tokens": _pool,
    "mixture of depths": _chosen,
    "length scale": lambda x: x * x.shape[1] / 8,
    "place scale": lambda x: (
        x * torch.arange(x.shape[1], device=x.device)[:, None].to(x.dtype) / 8
    ),
}


class _CausalConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(_WIDTH, _WIDTH, 3, groups=_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(_WIDTH, _WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class _TokenMlp(nn.Module):
    """A linear layer over the tokens, as MLP-Mixer has."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(SEQ, SEQ)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


class _Pairs(nn.Module):
    """A linear layer over two tokens side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * _WIDTH, 2 * _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.reshape(x.shape[0], -1, 2 * _WIDTH)).reshape(x.shape)


for _name, _function in _TOKEN_FUNCTIONS.items():
    _add("tokens", _name, _model(mix=lambda f=_function: _Apply(f)))
_add("tokens", "causal conv", _model(mix=_CausalConv))
_add("tokens", "gru", _model(mix=_Recurrent))
_add("tokens", "token mlp", _model(mix=_TokenMlp))
_add("tokens", "pairs of tokens", _model(mix=_Pairs))
_add("tokens", "shift in the mlp", _model(mlp=lambda: _Mlp(_shift)))
_add(
    "tokens", "mean in the mlp", _model(mlp=lambda: _Mlp(lambda y: y - y.mean(1, True)))
)


class _Grams(_Model):
    """Embeds each token with the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Embedding(53, _WIDTH)

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        before = functional.pad(input_ids, (1, 0))[:, :-1]
        pairs = self.pairs((input_ids * 7 + before) % 53)
        return super().enter(input_ids, position_ids) + pairs


class _Prefix(_Model):
    """Reads the sum of all tokens before each."""

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        return super().enter(input_ids.cumsum(1) % _VOCAB, position_ids)


class _Window(_Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        gap = place[:, None] - place
        mask = (gap >= 0) & (gap < 4)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


_add("tokens", "n-grams", _Grams)
_add("tokens", "prefix sums of ids", _Prefix)
_add("tokens", "window mask", _model(attention=_Window))


# -- Positions -------------------------------------------------------------------


class _Offset(_Model):
    """Counts positions from padding_idx + 1, as RoBERTa does."""

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device) + 2
        return super().enter(input_ids, position_ids)


class _MaskedPositions(_Model):
    """Counts positions of tokens that are not padding."""

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            mask = input_ids.ne(5).int()
            position_ids = mask.cumsum(1) * mask
        return super().enter(input_ids, position_ids)


class _OwnPositions(_Model):
    """Has an argument for positions and does not use it."""

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        return super().enter(input_ids, None)


class _Unplaced(_Model):
    """Adds the first positions whatever is said, and the said ones too."""

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        own = torch.arange(input_ids.shape[1], device=input_ids.device)
        return super().enter(input_ids, position_ids) + self.place(own)


class _Rotary(_Attention):
    """Turns q and k by angles of its own count of tokens."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        angle = torch.arange(x.shape[1], device=x.device)[:, None].to(x.dtype)
        angle = angle * torch.logspace(0, -2, _SIZE // 2, device=x.device).to(x.dtype)
        cos, sin = angle.cos(), angle.sin()

        def turn(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

        return turn(q), turn(k), v


_add("positions", "offset positions", _Offset)
_add("positions", "positions of a mask", _MaskedPositions)
_add("positions", "unused positions", _OwnPositions)
_add("positions", "two positions", _Unplaced)
_add("positions", "own rotary", _model(attention=_Rotary))


# -- Features between a colwise and a rowwise layer ------------------------------


def _shuffle(y: Tensor) -> Tensor:
    return y.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)


_FEATURE_FUNCTIONS: dict[str, Function] = {
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
for _name, _function in _FEATURE_FUNCTIONS.items():
    _add("features", _name, _model(mlp=lambda f=_function: _Mlp(f)))
_add(
    "features",
    "maxout",
    _model(mlp=lambda: _Mlp(lambda y: y.unflatten(-1, (-1, 2)).amax(-1), _INNER // 2)),
)


def _gate_halves(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return functional.silu(gate) * up


def _gate_turns(y: Tensor) -> Tensor:
    return functional.silu(y[..., ::2]) * y[..., 1::2]


_add("features", "gate-up halves", _model(mlp=lambda: _Mlp(_gate_halves, _INNER // 2)))
_add("features", "gate-up in turns", _model(mlp=lambda: _Mlp(_gate_turns, _INNER // 2)))


class _Scaled(_Mlp):
    """Features times a parameter."""

    def __init__(self) -> None:
        super().__init__(self.scale)
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, _INNER))

    def scale(self, y: Tensor) -> Tensor:
        return y * self.factor


_add("features", "scaled features", _model(mlp=_Scaled))


# -- Heads -----------------------------------------------------------------------


class _Fused(_Attention):
    """Queries, keys and values from one layer, laid out in one of three ways."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        del self.q, self.k, self.v
        self.layout = layout

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.qkv(x)
        if self.layout == "thirds":
            parts = tuple(p.unflatten(-1, (-1, _SIZE)) for p in y.chunk(3, -1))
        elif self.layout == "by head":
            parts = y.unflatten(-1, (-1, 3, _SIZE)).unbind(-2)
        else:
            parts = y.unflatten(-1, (-1, _SIZE, 3)).unbind(-1)
        q, k, v = (p.transpose(1, 2) for p in parts)
        return q, k, v


class _Slopes(_Attention):
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
        self.mix = nn.Parameter(torch.eye(_HEADS) + 0.1 * torch.randn(_HEADS, _HEADS))

    def forward(self, y: Tensor) -> Tensor:
        return torch.einsum("bhtd,hg->bgtd", y, self.mix)


class _HeadScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, _HEADS)[:, None, None])

    def forward(self, y: Tensor) -> Tensor:
        return y * self.scale


class _NormOverHeads(_Attention):
    """A norm over the features of all heads of q, as OLMo-2 has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        whole = self.norm(q.transpose(1, 2).flatten(-2))
        return whole.unflatten(-1, (-1, _SIZE)).transpose(1, 2), k, v


_HEAD_FUNCTIONS: dict[str, Function] = {
    "flip heads": lambda y: y.flip(1),
    "roll heads": lambda y: y.roll(1, 1),
    "mean of heads": lambda y: y + y.mean(1, keepdim=True),
    "count of heads": lambda y: y / math.sqrt(y.shape[1]),
    "place of heads": lambda y: (
        y * torch.linspace(1, 2, y.shape[1])[:, None, None].to(y)
    ),
}
for _name, _function in _HEAD_FUNCTIONS.items():
    _add(
        "heads",
        _name,
        _model(attention=lambda f=_function: _Attention(out=_Apply(f))),
    )
for _name in ("thirds", "by head", "in turns"):
    _add("heads", f"fused qkv {_name}", _model(attention=lambda n=_name: _Fused(n)))
_add("heads", "alibi", _model(attention=_Slopes))
_add("heads", "talking heads", _model(attention=lambda: _Attention(out=_Talking())))
_add("heads", "head scale", _model(attention=lambda: _Attention(out=_HeadScale())))
_add("heads", "norm over heads", _model(attention=_NormOverHeads))
_add(
    "heads",
    "norm in heads",
    _model(attention=lambda: _Attention(heads=nn.LayerNorm(_SIZE))),
)


# -- Samples meet ----------------------------------------------------------------


class _BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class _Contrast(nn.Module):
    """Two towers, each sample's pair against those of all others, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*(_Mlp() for _ in range(2)))
        self.right = nn.Sequential(*(_Mlp() for _ in range(2)))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a = functional.normalize(self.left(left), dim=-1)
        b = functional.normalize(self.right(right), dim=-1)
        scores = self.scale.exp() * a @ b.T
        own = torch.arange(len(a), device=a.device)
        return functional.cross_entropy(scores, own)


_SAMPLE_FUNCTIONS: dict[str, Function] = {
    "mean samples": lambda x: x - x.mean(0, keepdim=True),
    "roll samples": lambda x: x.roll(1, 0),
    "softmax samples": lambda x: x.softmax(0) * x,
    "sort samples": lambda x: x.sort(0).values,
    "count of samples": lambda x: x * x.shape[0] / 8,
}
for _name, _function in _SAMPLE_FUNCTIONS.items():
    _add("samples", _name, _model(mix=lambda f=_function: _Apply(f)))
_add("samples", "batch norm", _model(mix=_BatchNorm))
_add("samples", "contrast", _Contrast, _vectors("left", "right"))


# -- Wiring around the split layers ----------------------------------------------


class _Wired(nn.Module):
    """Attention plain, the MLP wired in one of many ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attention, self.mlp = _Attention(), _Way(way)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return self.mlp(self.norm2(x), x)


class _Way(nn.Module):
    """An MLP that also does what usually is done outside of it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up = nn.Linear(_WIDTH, _INNER)
        self.down = nn.Linear(_INNER, _WIDTH)
        self.after = nn.LayerNorm(_WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, _WIDTH))
        self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, _WIDTH))
        self.gate = nn.Linear(_WIDTH, _WIDTH)
        self.low = nn.Linear(_WIDTH, 4, bias=False)
        self.high = nn.Linear(4, _INNER, bias=False)
        used = {
            "post-norm": {"after"},
            "layer scale": {"scale"},
            "bias": {"bias"},
            "output gate": {"gate"},
            "adapter": {"low", "high"},
            "adapter around both": {"low", "high"},
        }.get(way, set())
        for name in {"after", "scale", "bias", "gate", "low", "high"} - used:
            delattr(self, name)
        if way == "adapter around both":
            self.high = nn.Linear(4, _WIDTH, bias=False)

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        y = self.up(x)
        if self.way == "adapter":
            y = y + self.high(self.low(x))
        y = self.down(functional.gelu(y))
        if self.way == "residual of the input":
            return y + x
        if self.way == "post-norm":
            return self.after(y + stream)
        if self.way == "layer scale":
            return stream + y * self.scale
        if self.way == "bias":
            return stream + y + self.bias
        if self.way == "output gate":
            return stream + y * self.gate(x).sigmoid()
        if self.way == "adapter around both":
            return stream + y + self.high(self.low(x))
        if self.way == "added twice":
            return stream + y + y.detach()
        return stream + y


for _name in (
    "residual passed in",
    "residual of the input",
    "post-norm",
    "layer scale",
    "bias",
    "output gate",
    "adapter",
    "adapter around both",
    "added twice",
):
    _add("wiring", _name, lambda n=_name: _Model(lambda: _Wired(n)))


class _Skip(_Model):
    """The first block's output is read by the last, as in a U-net."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = first = self.layers[0](self.enter(input_ids, position_ids))
        for layer in self.layers[1:-1]:
            x = layer(x)
        return self.head(self.norm(self.layers[-1](x + first)))


class _Shared(_Model):
    """One block, called four times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block()])

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = self.enter(input_ids, position_ids)
        for _ in range(_LAYERS):
            x = self.layers[0](x)
        return self.head(self.norm(x))


class _SharedMlp(_Model):
    """All blocks hold the same MLP."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.mlp = self.layers[0].mlp


class _Tied(_Model):
    """Embedding and head share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class _Functional(_Mlp):
    """Reads a weight of its own linear layer once more."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.up(x))
        return self.down(y) + 0.1 * self.up.weight.mean()


class _Twice(_Mlp):
    """Calls each layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class _Parallel(_Block):
    """Attention and MLP side by side, as GPT-J has."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return x + self.attention(y) + self.mlp(y)


_add("wiring", "skip over blocks", _Skip)
_add("wiring", "shared block", _Shared)
_add("wiring", "shared mlp", _SharedMlp)
_add("wiring", "tied head", _Tied)
_add("wiring", "weight read again", _model(mlp=_Functional))
_add("wiring", "mlp called twice", _model(mlp=_Twice))
_add("wiring", "parallel branches", lambda: _Model(_Parallel))


# -- Parameters and buffers ------------------------------------------------------


class _Counting(nn.Module):
    """A running mean of what it has seen, in a buffer, which it subtracts."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return 0.1 * (x - self.mean)


class _Complex(nn.Module):
    """Turns pairs of features by complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(_WIDTH // 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turn).flatten(-2).to(x.dtype)


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Unused(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(_WIDTH, _WIDTH)


class _Frozen(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        for layer in self.layers[::2]:
            layer.mlp.requires_grad_(False)


def _weight_norm() -> nn.Module:
    mlp = _Mlp()
    nn.utils.parametrizations.weight_norm(mlp.up)
    return mlp


def _spectral_norm() -> nn.Module:
    mlp = _Mlp()
    nn.utils.parametrizations.spectral_norm(mlp.down)
    return mlp


class _Branching(nn.Module):
    """Does one thing or another, by the values that it sees."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 if float(x.detach().sum()) > 0 else x * 0.25


_add("parameters", "buffer updated", _model(mix=_Counting))
_add("parameters", "complex parameter", _model(mix=_Complex))
_add("parameters", "scalar parameter", _model(mix=_Scalar))
_add("parameters", "unused parameter", _Unused)
_add("parameters", "frozen parameters", _Frozen)
_add("parameters", "weight norm", _model(mlp=_weight_norm))
_add("parameters", "spectral norm", _model(mlp=_spectral_norm))
_add("parameters", "branch on values", _model(mix=_Branching))


# -- What goes in and comes out --------------------------------------------------


class _Named(_Model):
    """Returns logits in a dict."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        return {"logits": super().forward(input_ids, position_ids)}


class _Tuple(_Model):
    """Returns hidden states beside the logits."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        x = self.enter(input_ids, position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)), x


class _Losses(_Model):
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


class _Target(_Model):
    """Takes tokens under a name that means something else."""

    def forward(self, target: Tensor, position_ids: Tensor | None = None) -> Any:
        return super().forward(target, position_ids)


class _Self(_Model):
    """Takes tokens under a name that modules have, too."""

    def forward(self, layers: Tensor, position_ids: Tensor | None = None) -> Any:
        return super().forward(layers, position_ids)


class _Towers(nn.Module):
    """Two towers that meet at the end; only one is deep."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*(_Mlp() for _ in range(4)))
        self.right = _Mlp()
        self.head = nn.Linear(2 * _WIDTH, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.cat((self.left(left), self.right(right)), -1))


_add("interface", "dict output", _Named)
_add("interface", "tuple output", _Tuple)
_add("interface", "several losses", _Losses)
_add("interface", "input named target", _Target, _tokens("target"))
_add("interface", "input named layers", _Self, _tokens("layers"))
_add("interface", "two towers", _Towers, _vectors("left", "right"))
