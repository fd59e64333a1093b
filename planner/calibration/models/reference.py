"""A transformer of any shape, as Megatron-LM and the like run it.

transformers' own classes are no stand-in for them: their norms and rotations are many
small kernels, GPT-2 cannot be split along tp, gpt-oss attends without a fused kernel,
Llama 4 shows every token to every expert, and Mamba's scan keeps its masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from planner.calibration.models.reference_layers import STYLES, Layer
from planner.calibration.models.shapes import ModelShape

__all__ = ["ReferenceModel"]


@dataclass(frozen=True, kw_only=True)
class _Config:
    """What :mod:`planner.capture.read` reads of a model."""

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
            **STYLES,
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
    """Parts of each layer."""
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
    """A model to be traced; see :mod:`planner.calibration.models.reference_layers`.

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
        self.layers = nn.ModuleList(Layer(shape, part) for part in _letters(shape))
        self.head = _Head(shape)
        if shape.tied:
            self.head.logits.weight = self.embedding.tokens.weight

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits.

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
