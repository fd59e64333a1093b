"""A stand-in for fused attention that no device needs to run.

Stock scaled dot product attention on CPU takes the math path as soon as dropout or
unequal head sizes are involved and keeps the S x S scores. No training run does, so
while a model is read the function is replaced by one op forward and one op backward
that keep what a flash kernel keeps: q, k, v, the output, and one log-sum-exp per row.

Source: Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import torch

from planner.capture.torch_private import patched_function

__all__ = ["AttentionKind", "fused_attention", "fused_attention_patched"]

#: Self-attention without dropout or any mask but a causal one; or anything else.
AttentionKind = Literal["causal", "full", "other"]

_new_library: Any = torch.library.Library
_LIBRARY: Any = _new_library("meshwright", "DEF")
_LIBRARY.define("attention(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor lse) -> (Tensor, Tensor, Tensor)"
)


def _attention_meta(
    q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # Kernels lay the output out as [batch, sequence, heads, head size], so that the
    # transpose that follows in every model needs no copy.
    *lead, heads, length, _ = q.shape
    out = q.new_empty((*lead, length, heads, v.shape[-1])).transpose(-3, -2)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _attention_backward_meta(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in tensors[1:4])


_LIBRARY.impl("attention", _attention_meta, "Meta")
_LIBRARY.impl("attention_backward", _attention_backward_meta, "Meta")


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        out, lse = torch.ops.meshwright.attention(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.ops.meshwright.attention_backward(grad, *ctx.saved_tensors)


def _kind(query: Any, key: Any, causal: bool) -> AttentionKind:
    if query.shape[-2] != key.shape[-2]:
        return "other"
    return "causal" if causal else "full"


def fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Shapes of attention, without its arithmetic; for fake tensors only.

    Args:
        q: Queries. Shape [..., heads, m, d].
        k: Keys. Shape [..., kv_heads, n, d].
        v: Values. Shape [..., kv_heads, n, e].

    Returns:
        The output. Shape [..., heads, m, e].
    """
    result: torch.Tensor = _FusedAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
    return result


def fused_attention_patched(
    kinds: set[AttentionKind],
) -> contextlib.AbstractContextManager[None]:
    """While open, ``scaled_dot_product_attention`` is the stand-in.

    Calls that no flash kernel takes keep torch's own path: fewer than four
    dimensions, or a mask that needs a gradient.

    Args:
        kinds: Is given the kind of every call.
    """
    stock = torch.nn.functional.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *more: Any,
        **how: Any,
    ) -> torch.Tensor:
        mask = more[0] if more else how.get("attn_mask")
        causal = more[2] if len(more) > 2 else how.get("is_causal", False)
        dropout = more[1] if len(more) > 1 else how.get("dropout_p", 0.0)
        plain = mask is None and not dropout and query.dim() == 4
        kinds.add(_kind(query, key, causal) if plain else "other")
        learned = mask is not None and mask.requires_grad
        if query.dim() < 4 or learned:
            return stock(query, key, value, *more, **how)
        return fused_attention(query, key, value)

    return patched_function(attention)
