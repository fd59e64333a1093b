"""Stand-ins for ops that cannot run, or should not, on tensors without data.

``item()``, ``nonzero`` and boolean masks ask for values that fake tensors do not have.
Each is answered with a plausible value, and what was assumed is recorded.

Stock scaled dot product attention on CPU takes the math path as soon as dropout or
unequal head sizes are involved and keeps the S x S scores. No training run does, so
while a model is read the function is replaced by one op forward and one op backward
that keep what a flash kernel keeps: q, k, v, the output, and one log-sum-exp per row.

Source: Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import torch

from planner.capture.private_apis import known_value, patched_function

__all__ = [
    "Answer",
    "AttentionKind",
    "fused_attention",
    "fused_attention_patched",
    "read_of",
    "run_or_assume",
]

# -- Results that depend on data -------------------------------------------------

#: Share of a boolean mask that is assumed to be true.
MASK_FRACTION = 0.5

#: Function that is called with (op name, assumption) for every stand-in.
Answer = Callable[[str, str], None]

_aten = torch.ops.aten
_INDEXING = frozenset(
    {
        _aten.index,
        _aten.index_put,
        _aten.index_put_,
        _aten._index_put_impl_,
        _aten._unsafe_index,
    }
)
_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in {
        torch.bool,
        torch.uint8,
    }


def _chosen(count: int) -> int:
    return max(1, int(count * MASK_FRACTION))


def _indices(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_zeros(shape, dtype=torch.int64)


def _stand_in(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str] | None:
    """Return a plausible result and its assumption; None if there is no rule."""
    packet, first = func.overloadpacket, args[0]
    rows = _chosen(first.numel())
    if packet is _aten._local_scalar_dense:
        value = (
            False
            if first.dtype == torch.bool
            else 0.0
            if first.is_floating_point()
            else 0
        )
        return value, f"a scalar read from a tensor is {value}"
    if packet is _aten.nonzero:
        return _indices(first, rows, first.dim()), f"{rows} of {first.numel()} are true"
    if packet is _aten.masked_select:
        return first.new_empty((rows,)), f"{rows} of {first.numel()} are selected"
    if packet in {_aten._unique2, _aten.unique_dim, _aten.unique_consecutive}:
        count = first.numel()
        same = (
            first.new_empty((count,)),
            _indices(first, count),
            _indices(first, count),
        )
        return same, "all values are distinct"
    if packet is _aten.repeat_interleave:
        return _indices(first, first.numel()), "every repeat count is 1"
    if packet is _aten.bincount:
        least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        return _indices(first, max(1, int(least))), "no value exceeds minlength"
    if packet is _aten.equal:
        return True, "two tensors are equal"
    return None


def _without_masks(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], int]:
    """Replace each boolean mask of indexing arguments by integer indices.

    Fake tensors call ``nonzero`` for a mask below the point where it can be answered.
    """
    indices: list[Any] = []
    rows = 1
    for index in args[1]:
        if _is_mask(index):
            known = known_value(index)
            rows = _chosen(index.numel()) if known is None else int(known.sum())
            indices += [_indices(index, rows) for _ in range(index.dim())]
        else:
            indices.append(index)
    rest = list(args[2:])
    if rest and isinstance(rest[0], torch.Tensor) and rest[0].dim():
        values = rest[0]
        if values.shape[0] not in {1, rows}:
            rest[0] = values.new_empty((rows, *values.shape[1:]))
    return (args[0], indices, *rest), rows


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Return the shape of grouped products, which torch tells for bfloat16 alone.

    Either factor may have its groups side by side in two dimensions, or stacked in
    three.
    """
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        groups = offsets.numel() if offsets is not None else left.shape[0]
        shape = [groups, *shape]
    return left.new_empty(shape)


def run_or_assume(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    fake: bool,
    record: Answer,
) -> tuple[Any, tuple[Any, ...]]:
    """Run an op, or stand in for it where its result depends on data.

    Args:
        func: The op overload.
        args: As dispatched.
        kwargs: As dispatched.
        fake: True if tensors hold no data; real ones never need a stand-in.
        record: Told of each assumption.

    Returns:
        The result, and the arguments it was computed with.
    """
    if not fake:
        return func(*args, **kwargs), args
    if func.overloadpacket is _aten._grouped_mm and args[0].dtype != torch.bfloat16:
        return _grouped_product(*args, **kwargs), args
    if func.overloadpacket in _INDEXING and any(_is_mask(index) for index in args[1]):
        masks = [index for index in args[1] if _is_mask(index)]
        replaced, rows = _without_masks(args)
        if any(known_value(mask) is None for mask in masks):
            record(str(func), f"a mask selects {rows} of {masks[0].numel()} elements")
        return func(*replaced, **kwargs), replaced
    if not _TAGS.intersection(func.tags):
        return func(*args, **kwargs), args
    try:
        return func(*args, **kwargs), args
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        answer = _stand_in(func, args, kwargs)
        if answer is None:
            raise
    record(str(func), answer[1])
    return answer[0], args


def read_of(func: Any, args: tuple[Any, ...]) -> Literal["truth", "size"] | None:
    """Name what an op read of known values: a truth, or what a size follows from."""
    if func.overloadpacket in _INDEXING:
        masks = filter(_is_mask, args[1])
        return "size" if any(known_value(mask) is not None for mask in masks) else None
    if not _TAGS.intersection(func.tags) or known_value(args[0]) is None:
        return None
    single = func.overloadpacket is _aten._local_scalar_dense
    return "truth" if single and args[0].dtype == torch.bool else "size"


# -- Attention -------------------------------------------------------------------

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
    """Attention without its arithmetic, for fake tensors only.

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
    """While open, replace ``scaled_dot_product_attention`` by the stand-in.

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
