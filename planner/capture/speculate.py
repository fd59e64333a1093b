"""Stand-ins for results that depend on data, so that a fake trace can go on.

``item()``, ``nonzero`` and boolean masks ask for values that fake tensors do not have.
Each is answered with a plausible value, and what was assumed is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MASK_FRACTION", "Answer", "run_or_assume"]

#: Share of a boolean mask that is taken to be true.
MASK_FRACTION = 0.5

#: Told (op name, what was assumed) for every stand-in.
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
    """A plausible result and what it assumes; None where there is no rule."""
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
    """Indexing arguments with each boolean mask replaced by integer indices.

    Fake tensors call ``nonzero`` for a mask below the point where it can be answered.
    """
    indices: list[Any] = []
    rows = 1
    for index in args[1]:
        if _is_mask(index):
            rows = _chosen(index.numel())
            indices += [_indices(index, rows) for _ in range(index.dim())]
        else:
            indices.append(index)
    rest = list(args[2:])
    if rest and isinstance(rest[0], torch.Tensor) and rest[0].dim():
        values = rest[0]
        if values.shape[0] not in {1, rows}:
            rest[0] = values.new_empty((rows, *values.shape[1:]))
    return (args[0], indices, *rest), rows


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
        fake: Whether tensors hold no data; real ones never need a stand-in.
        record: Told of each assumption.

    Returns:
        The result, and the arguments it was computed with.
    """
    if not fake:
        return func(*args, **kwargs), args
    if func.overloadpacket in _INDEXING and any(_is_mask(index) for index in args[1]):
        masks = [index for index in args[1] if _is_mask(index)]
        replaced, rows = _without_masks(args)
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
