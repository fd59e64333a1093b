"""A transformer of any shape, as Megatron-LM and the like run it: few, fused kernels.

transformers' own classes are no stand-in for them: their norms and rotations are many
small kernels, GPT-2 cannot be split along tp, gpt-oss attends without a fused kernel,
Llama 4 shows every token to every expert, and Mamba's scan keeps its masks.

For tracing alone. A norm is one kernel whichever kind it is, a rotation of queries or
keys one pass, routing is balanced, and a scan's values are not those of a trained one;
its products, bytes and parameters are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from planner.measurements.known_models import ModelShape

__all__ = ["ReferenceModel"]

#: Tokens of a chunk of a scan, as in mamba_ssm and Megatron-LM.
_CHUNK = 128

#: How tp divides them (Shoeybi et al. 2019, arXiv:1909.08053), as in a config.
_STYLES = {
    "layers.*.*.fused_in": "colwise",
    "layers.*.*.query_up": "colwise",
    "layers.*.*.key_up": "colwise",
    "layers.*.*.out": "rowwise",
    "layers.*.*.shared.fused_in": "colwise",
    "layers.*.*.shared.out": "rowwise",
}


def _norm(shape: ModelShape, size: int) -> nn.Module:
    return nn.LayerNorm(size, bias=shape.bias)


def _activate(shape: ModelShape, x: torch.Tensor) -> torch.Tensor:
    if shape.gated:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up
    if shape.activation == "gelu":
        return functional.gelu(x)
    return functional.relu(x).square()


class _Attention(nn.Module):
    """Multi-head or grouped attention, queries, keys and values in one product."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.size, self.group = shape.head_size, shape.heads // shape.kv_heads
        self.causal = shape.family != "bert"
        inside = shape.heads * shape.head_size
        fused = inside + 2 * shape.kv_heads * shape.head_size
        self.fused_in = nn.Linear(shape.hidden, fused, bias=shape.bias)
        self.query_norm = _norm(shape, self.size) if shape.qk_norm else None
        self.key_norm = _norm(shape, self.size) if shape.qk_norm else None
        self.out = nn.Linear(inside, shape.hidden, bias=shape.bias)

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
        batch, seq, _ = x.shape
        parts = self.fused_in(x).view(batch, seq, -1, self.group + 2, self.size)
        query, key, value = parts.split([self.group, 1, 1], dim=3)
        query, key = query.reshape(batch, seq, -1, self.size), key.squeeze(3)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if turn is not None:
            query, key = query * turn, key * turn
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.squeeze(3).transpose(1, 2),
            is_causal=self.causal,
            enable_gqa=self.group > 1,
        )
        made: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return made


class _LatentAttention(nn.Module):
    """Latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        size, turned, heads = shape.head_size, shape.rotary_size, shape.heads
        rank, self.query_down = shape.query_rank or shape.hidden, None
        if shape.query_rank:
            down = nn.Linear(shape.hidden, rank, bias=False)
            self.query_down = nn.Sequential(down, _norm(shape, rank))
        self.query_up = nn.Linear(rank, heads * (size + turned), bias=False)
        self.key_down = nn.Linear(shape.hidden, shape.key_rank + turned, bias=False)
        self.key_norm = _norm(shape, shape.key_rank)
        self.key_up = nn.Linear(shape.key_rank, heads * 2 * size, bias=False)
        self.out = nn.Linear(heads * size, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
        batch, seq, _ = x.shape
        size, turned = self.shape.head_size, self.shape.rotary_size
        query = self.query_up(x if self.query_down is None else self.query_down(x))
        query = query.view(batch, seq, -1, size + turned)
        small, shared = self.key_down(x).split([self.shape.key_rank, turned], dim=-1)
        whole = self.key_up(self.key_norm(small)).view(batch, seq, -1, 2 * size)
        key, value = whole.split([size, size], dim=-1)
        shared = shared.unsqueeze(2)
        if turn is not None:
            still, moving = query.split([size, turned], dim=-1)
            query = torch.cat([still, moving * turn], dim=-1)
            shared = shared * turn
        shared = shared.expand(-1, -1, key.shape[2], -1)
        key = torch.cat([key, shared], dim=-1)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
        )
        made: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return made


class _Mlp(nn.Module):
    def __init__(self, shape: ModelShape, inner: int) -> None:
        super().__init__()
        self.shape = shape
        wide = inner * (2 if shape.gated else 1)
        self.fused_in = nn.Linear(shape.hidden, wide, bias=shape.bias)
        self.out = nn.Linear(inner, shape.hidden, bias=shape.bias)

    def forward(
        self, x: torch.Tensor, turn: torch.Tensor | None = None
    ) -> torch.Tensor:
        made: torch.Tensor = self.out(_activate(self.shape, self.fused_in(x)))
        return made


class _Experts(nn.Module):
    """All experts of a layer, each with an equal share of the tokens."""

    def __init__(self, shape: ModelShape, size: int) -> None:
        super().__init__()
        self.shape, self.num_experts = shape, shape.experts
        inner = shape.expert_inner
        wide = inner * (2 if shape.gated else 1)
        self.up = nn.Parameter(torch.empty(shape.experts, size, wide))
        self.down = nn.Parameter(torch.empty(shape.experts, inner, size))

    def forward(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        count, top = chosen.shape
        order = chosen.flatten().argsort()
        rows = tokens.index_select(0, order // top)
        lack = -rows.shape[0] % self.num_experts
        rows = functional.pad(rows, (0, 0, 0, lack)) if lack else rows
        hidden = torch.bmm(rows.view(self.num_experts, -1, rows.shape[1]), self.up)
        made = torch.bmm(_activate(self.shape, hidden), self.down).flatten(0, 1)
        back = made.index_select(0, order.argsort()).view(count, top, -1)
        return (back * weights.unsqueeze(-1)).sum(dim=1)


class _MixtureOfExperts(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.top = shape.experts_per_token
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        size = shape.latent or shape.hidden
        self.experts = _Experts(shape, size)
        self.shared = _Mlp(shape, shape.shared_inner) if shape.shared_inner else None
        latent = bool(shape.latent)
        self.narrow = nn.Linear(shape.hidden, size, bias=False) if latent else None
        self.widen = nn.Linear(size, shape.hidden, bias=False) if latent else None

    def forward(
        self, x: torch.Tensor, turn: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(dim=-1).topk(self.top, dim=-1)
        inside = tokens if self.narrow is None else self.narrow(tokens)
        made: torch.Tensor = self.experts(inside, chosen, weights)
        made = made if self.widen is None else self.widen(made)
        made = made.view_as(x)
        return made if self.shared is None else made + self.shared(x)


class _Scan(nn.Module):
    """Mamba-2 in its dual form (Dao and Gu 2024, arXiv:2405.21060, section 6).

    Within a chunk it is attention without a softmax (C queries, B keys, X values of
    all heads of a group), traced as the fused kernel; between chunks a product with B
    makes the state, one with C reads it. The short convolution is one pass.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.inside = shape.scan_heads * shape.scan_head_size
        self.shared = shape.scan_groups * shape.scan_state
        channels = self.inside + 2 * self.shared
        width = self.inside + channels + shape.scan_heads
        self.fused_in = nn.Linear(shape.hidden, width, bias=False)
        self.taps = nn.Parameter(torch.empty(channels, 4))
        self.norm = _norm(shape, self.inside)
        self.out = nn.Linear(self.inside, shape.hidden, bias=False)

    def forward(
        self, x: torch.Tensor, turn: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch, seq, _ = x.shape
        size = math.gcd(seq, _CHUNK)
        chunks, groups = batch * seq // size, self.shape.scan_groups
        widths = [self.inside, self.inside + 2 * self.shared, self.shape.scan_heads]
        gate, mixed, step = torch.split(self.fused_in(x), widths, dim=-1)
        mixed = functional.silu(mixed * self.taps.sum(dim=-1))
        widths = [self.inside, self.shared, self.shared]
        value, key, query = torch.split(mixed, widths, dim=-1)
        value = value.view(batch, seq, self.shape.scan_heads, -1)
        value = value * functional.softplus(step).unsqueeze(-1)
        value = value.view(chunks, size, groups, -1).transpose(1, 2)
        key = key.reshape(chunks, size, groups, -1).transpose(1, 2)
        query = query.reshape(chunks, size, groups, -1).transpose(1, 2)
        near = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        state = torch.matmul(key.transpose(2, 3), value)
        made = (near + torch.matmul(query, state)).transpose(1, 2)
        made = self.norm(made.reshape(batch, seq, -1) * functional.silu(gate))
        turned: torch.Tensor = self.out(made)
        return turned


def _part(shape: ModelShape, letter: str) -> nn.Module:
    if letter == "*":
        return _LatentAttention(shape) if shape.key_rank else _Attention(shape)
    if letter == "-":
        return _Mlp(shape, shape.inner)
    return _Scan(shape) if letter == "M" else _MixtureOfExperts(shape)


_NAMES = {"*": "attention", "-": "mlp", "E": "moe", "M": "scan"}


class _Layer(nn.Module):
    """A layer: parts, each behind a norm and beside the residual stream.

    Args:
        shape: Figures of the model.
        letters: Its parts: M scan, * attention, - MLP, E experts.
    """

    def __init__(self, shape: ModelShape, letters: str) -> None:
        super().__init__()
        self.names = [_NAMES[letter] for letter in letters]
        for letter, name in zip(letters, self.names, strict=True):
            self.add_module(f"{name}_norm", _norm(shape, shape.hidden))
            self.add_module(name, _part(shape, letter))

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
        """Return the stream after this layer.

        Args:
            x: Residual stream. Shape [batch, seq, hidden].
            turn: What queries and keys are multiplied with in the place of a rotation,
                shape [seq, 1, features]; None where positions are learned.
        """
        for name in self.names:
            norm, part = self.get_submodule(f"{name}_norm"), self.get_submodule(name)
            x = x + part(norm(x), turn)
        return x


@dataclass(frozen=True, kw_only=True)
class _Config:
    """Figures of a model that :mod:`planner.capture.read` reads."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    model_type: str
    base_model_tp_plan: dict[str, str] = field(
        default_factory=lambda: {
            "embedding.tokens": "embedding_rowwise",
            "head.logits": "colwise",
            **_STYLES,
        }
    )


class _Embedding(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        learned = nn.Embedding(shape.seq, shape.hidden) if shape.positions else None
        self.positions = learned

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.tokens(ids)
        return made if self.positions is None else made + self.positions(places)


class _Head(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden, bias=shape.bias)
        self.logits = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.logits(self.norm(x))
        return made


def _letters(shape: ModelShape) -> list[str]:
    """Return the parts of each layer."""
    if shape.pattern:
        return list(shape.pattern)
    return [
        "*E"
        if shape.experts
        and index >= shape.dense_first
        and (index + 1) % shape.expert_every == 0
        else "*-"
        for index in range(shape.layers)
    ]


class ReferenceModel(nn.Module):
    """A model to be traced.

    Args:
        shape: Its figures.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.config = _Config(
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.inner,
            vocab_size=shape.vocab,
            max_position_embeddings=shape.seq,
            model_type=shape.family,
        )
        self.turned = 0 if shape.positions or shape.pattern else shape.head_size
        if shape.rotary_size:
            self.turned = shape.rotary_size
        self.embedding = _Embedding(shape)
        self.layers = nn.ModuleList(_Layer(shape, part) for part in _letters(shape))
        self.head = _Head(shape)
        if shape.tied:
            self.head.logits.weight = self.embedding.tokens.weight

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits.

        Args:
            input_ids: Tokens. Shape [batch, seq].
            position_ids: Their positions, counted from 0 by default. Shape [seq].
        Returns:
            Shape [batch, seq, vocab].
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embedding(input_ids, position_ids)
        turn = None
        if self.turned:
            rates = torch.arange(self.turned, device=x.device)
            turn = torch.outer(position_ids, rates).to(x.dtype).cos().unsqueeze(1)
        for layer in self.layers:
            x = layer(x, turn)
        logits: torch.Tensor = self.head(x)
        return logits
