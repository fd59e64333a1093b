"""A small decoder in plain torch, which processes can start on within seconds."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["decoder"]

_WIDTH, _HEAD, _LAYERS, _VOCAB = 64, 16, 4, 128


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(_WIDTH, _WIDTH) for _ in range(4)
        )
        self.up_proj = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down_proj = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, _HEAD)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        y = functional.gelu(self.up_proj(self.norm2(x)))
        out: torch.Tensor = x + self.down_proj(y)
        return out


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCAB, _WIDTH)
        self.layers = nn.ModuleList(_Block() for _ in range(_LAYERS))
        self.head = nn.Linear(_WIDTH, _VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def decoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and an example of its inputs: 12 samples of 32 tokens."""
    ids = torch.empty(12, 32, dtype=torch.int64, device="meta")
    return _Decoder(), {"input_ids": ids}
