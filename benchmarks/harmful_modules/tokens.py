"""Tokens meet outside the attention, or depend on their positions in other ways."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harmful_modules.plain import (
    SEQ,
    SIZE,
    VOCAB,
    WIDTH,
    Attention,
    Build,
    Function,
    Model,
    Tensor,
    between,
    mixing,
    model,
)

__all__ = ["POSITIONS", "TOKENS"]


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
    return torch.einsum("btd,btde->bte", k, states) / WIDTH


def _recurrence(x: Tensor) -> Tensor:
    state, made = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = state * 0.5 + token
        made.append(state)
    return torch.stack(made, 1)


def _hand_made_attention(x: Tensor) -> Tensor:
    scores = x @ x.transpose(1, 2) / math.sqrt(WIDTH)
    unseen = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(unseen, -1e4).softmax(-1) @ x


def _pool(x: Tensor) -> Tensor:
    return x.unflatten(1, (-1, 2)).mean(2).repeat_interleave(2, 1)


def _chosen(x: Tensor) -> Tensor:
    best = x.sum(-1).topk(4, 1).indices
    return torch.zeros_like(x).scatter(
        1,
        best[..., None].expand(-1, -1, WIDTH),
        x.gather(1, best[..., None].expand(-1, -1, WIDTH)),
    )


_FUNCTIONS: dict[str, Function] = {
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
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

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
        self.mix = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.reshape(x.shape[0], -1, 2 * WIDTH)).reshape(x.shape)


class _Grams(Model):
    """Embeds each token with the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Embedding(53, WIDTH)

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        before = functional.pad(input_ids, (1, 0))[:, :-1]
        pairs = self.pairs((input_ids * 7 + before) % 53)
        return super().enter(input_ids, position_ids) + pairs


class _Prefix(Model):
    """Reads the sum of all tokens before each."""

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        return super().enter(input_ids.cumsum(1) % VOCAB, position_ids)


class _Window(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        gap = place[:, None] - place
        mask = (gap >= 0) & (gap < 4)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class _Offset(Model):
    """Counts positions from padding_idx + 1, as RoBERTa does."""

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device) + 2
        return super().enter(input_ids, position_ids)


class _MaskedPositions(Model):
    """Counts positions of tokens that are not padding."""

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            mask = input_ids.ne(5).int()
            position_ids = mask.cumsum(1) * mask
        return super().enter(input_ids, position_ids)


class _OwnPositions(Model):
    """Has an argument for positions and does not use it."""

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        return super().enter(input_ids, None)


class _Unplaced(Model):
    """Adds the first positions whatever is said, and the said ones too."""

    def enter(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        own = torch.arange(input_ids.shape[1], device=input_ids.device)
        return super().enter(input_ids, position_ids) + self.place(own)


class _Rotary(Attention):
    """Turns q and k by angles of its own count of tokens."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        angle = torch.arange(x.shape[1], device=x.device)[:, None].to(x.dtype)
        angle = angle * torch.logspace(0, -2, SIZE // 2, device=x.device).to(x.dtype)
        cos, sin = angle.cos(), angle.sin()

        def turn(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

        return turn(q), turn(k), v


#: Modules in which tokens meet.
TOKENS: dict[str, Build] = {
    **{name: mixing(function) for name, function in _FUNCTIONS.items()},
    "causal conv": model(mix=_CausalConv),
    "gru": model(mix=_Recurrent),
    "token mlp": model(mix=_TokenMlp),
    "pairs of tokens": model(mix=_Pairs),
    "shift in the mlp": between(_shift),
    "mean in the mlp": between(lambda y: y - y.mean(1, True)),
    "n-grams": _Grams,
    "prefix sums of ids": _Prefix,
    "window mask": model(attention=_Window),
}
#: Modules that count positions in their own way.
POSITIONS: dict[str, Build] = {
    "offset positions": _Offset,
    "positions of a mask": _MaskedPositions,
    "unused positions": _OwnPositions,
    "two positions": _Unplaced,
    "own rotary": model(attention=_Rotary),
}
