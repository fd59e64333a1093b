"""Code that stands in for kernels is recognised in what was traced."""

from __future__ import annotations

import torch
from torch import nn

from planner.capture import capture
from planner.graph.fallbacks import fallback_code


class _Scan(nn.Module):
    """A recurrence that goes through the sequence token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        state, kept = torch.zeros_like(x[:, 0]), []
        for token in range(x.shape[1]):
            state = 0.5 * state + x[:, token]
            kept.append(state)
        return torch.stack(kept, 1)


class _Eager(nn.Module):
    """Attention that writes its scores."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.fused = nn.Linear(16, 48), fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 8)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return mixed.transpose(1, 2).flatten(-2)


class _Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, 16), nn.ModuleList([layer])
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def _told(layer: nn.Module) -> tuple[str, ...]:
    inputs = {"input_ids": ((2, 128), "int64")}
    graph = capture(_Model(layer), inputs, loss="cross_entropy", seq_len=128)
    assert fallback_code(graph) == graph.assumptions[-len(fallback_code(graph)) :] or (
        not fallback_code(graph)
    )
    return fallback_code(graph)


def test_a_loop_over_tokens_is_told() -> None:
    (text,) = _told(_Scan())
    assert text.startswith("fallback code: layers.0 goes through the sequence token by")


def test_eager_attention_is_told_with_its_bytes() -> None:
    (text,) = _told(_Eager(fused=False))
    # 2 heads x 128 x 128 scores of a sample, written and in 16 bits.
    assert "layers.0 writes its scores to memory, 65.5 kB a sample" in text


def test_fused_attention_and_plain_layers_are_silent() -> None:
    assert _told(_Eager(fused=True)) == ()
    assert _told(nn.Linear(16, 16)) == ()
