"""The shape of a model: every figure that its graph follows from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Family", "ModelShape"]

#: ``gpt``: norm, attention, plain MLP, as Megatron-LM and MPT train it; ``bert``: the
#: same, attending both ways; ``hybrid``: one of scan, attention, MLP or experts a
#: layer; ``llama``: RMSNorm, rotary positions, gated MLP; ``moe``: that with experts;
#: ``deepseek``: that with latent attention.
Family = Literal["gpt", "bert", "hybrid", "llama", "moe", "deepseek"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A transformer by its figures. Equal and hashed by them, whatever was assumed.

    Attributes:
        family: What its layers are made of; see :data:`Family`.
        layers: Transformer layers.
        hidden: Size of the residual stream.
        heads: Attention heads (query).
        kv_heads: Key/value heads.
        head_size: Features of a head.
        inner: Features inside the dense MLPs.
        vocab: Token classes, padded as they are held.
        seq: Tokens of a sample.
        gated: Whether MLPs and experts have a gate, as in SwiGLU.
        activation: Of an MLP without a gate.
        tied: Whether the head is the embedding.
        bias: Whether linear layers and norms of ``gpt`` have biases.
        positions: Whether positions are learned, ``seq`` of them.
        qk_norm: Whether queries and keys are normalised.
        experts: Of a layer that has some; 0 without.
        experts_per_token: Of those, how many see a token.
        expert_inner: Features inside one expert.
        shared_inner: Features inside the experts that see every token; 0 without.
        dense_first: Leading layers without experts.
        expert_every: Of so many layers the last has experts.
        latent: Size that tokens are projected to for experts; 0 for ``hidden``.
        query_rank: Latent size of queries, of ``deepseek``; 0 for none.
        key_rank: Latent size of keys and values.
        rotary_size: Features of a head with rotary positions, beside ``head_size``.
        pattern: Layers of a ``hybrid``: M scan, * attention, - MLP, E experts.
        scan_heads: Heads of a Mamba-2 scan.
        scan_head_size: Features of one.
        scan_groups: Groups that share input and output matrices.
        scan_state: Size of the state.
        assumed: What no source says of this measurement, in words.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    seq: int
    gated: bool = False
    activation: Literal["gelu", "relu2"] = "gelu"
    tied: bool = True
    bias: bool = True
    positions: bool = True
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    dense_first: int = 0
    expert_every: int = 1
    latent: int = 0
    query_rank: int = 0
    key_rank: int = 0
    rotary_size: int = 0
    pattern: str = ""
    scan_heads: int = 0
    scan_head_size: int = 64
    scan_groups: int = 8
    scan_state: int = 128
    assumed: tuple[str, ...] = field(default=(), compare=False)
