"""Collectives with a gradient: what tensor and sequence parallelism are made of.

Each works on plain tensors of one tp rank. The names say what forward does; backward
is its transpose. Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022,
section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "all_to_all",
    "copy_to_region",
    "exchange_rows",
    "gather",
    "gather_to_region",
    "is_copy_to_region",
    "reduce_from_region",
    "reduce_scatter",
    "scatter",
]


#: torch 2.13 renamed these; 2.11 knows the old names alone.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # A fresh tensor: selective recomputation may have kept the argument.
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


def _all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, dim: int
) -> torch.Tensor:
    size = group.size()
    parts = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    _GATHER(parts, tensor.contiguous(), group=group)
    return parts if dim == 0 else torch.cat(parts.chunk(size), dim)


def _reduce_scatter(
    tensor: torch.Tensor, group: dist.ProcessGroup, dim: int
) -> torch.Tensor:
    size = group.size()
    parts = torch.cat(tensor.chunk(size, dim)) if dim else tensor.contiguous()
    result = tensor.new_empty((parts.shape[0] // size, *parts.shape[1:]))
    _SCATTER(result, parts, group=group)
    return result


def _own_chunk(
    tensor: torch.Tensor, group: dist.ProcessGroup, dim: int
) -> torch.Tensor:
    return tensor.chunk(group.size(), dim)[group.rank()].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_reduce(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: Any, dim: int, partial: bool
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.partial = group, dim, partial
        return _all_gather(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = _reduce_scatter if ctx.partial else _own_chunk
        return back(grads[0], ctx.group, ctx.dim), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_gather(grads[0], ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_chunk(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_gather(grads[0], ctx.group, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: Any, split: int, join: int
    ) -> torch.Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _trade(tensor, group, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _trade(grads[0], ctx.group, ctx.join, ctx.split), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        group: Any,
        sends: Sequence[int],
        receives: Sequence[int],
    ) -> torch.Tensor:
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        return _exchange(rows, group, sends, receives)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = _exchange(grads[0], ctx.group, ctx.receives, ctx.sends)
        return back, None, None, None


def _trade(
    tensor: torch.Tensor, group: dist.ProcessGroup, split: int, join: int
) -> torch.Tensor:
    size = group.size()
    parts = torch.stack(tensor.chunk(size, split)).contiguous()
    result = torch.empty_like(parts)
    dist.all_to_all_single(result, parts, group=group)
    return torch.cat(result.unbind(), join)


def _exchange(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    sends: Sequence[int],
    receives: Sequence[int],
) -> torch.Tensor:
    result = rows.new_empty((sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(
        result, rows.contiguous(), list(receives), list(sends), group=group
    )
    return result


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def is_copy_to_region(node: torch.autograd.graph.Node) -> bool:
    """Return True for the node that :func:`copy_to_region` leaves in a graph."""
    return node.name() == "_CopyBackward"


def copy_to_region(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Enter a region that each rank computes a part of: the gradient is summed."""
    return _apply(_Copy, tensor, group)


def reduce_from_region(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Leave such a region with the sum over ranks; the gradient passes."""
    return _apply(_Reduce, tensor, group)


def gather_to_region(
    tensor: torch.Tensor, group: dist.ProcessGroup, dim: int
) -> torch.Tensor:
    """Enter such a region from shards along ``dim``; the gradient is summed, sharded.

    Args:
        tensor: Shard of this rank, all of one shape.
        group: Ranks in order of their shards.
        dim: Dimension that is sharded.
    """
    return _apply(_Gather, tensor, group, dim, True)


def gather(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Put shards together for a computation that every rank repeats in full.

    Each rank then has the whole gradient, of which it keeps its own shard.
    """
    return _apply(_Gather, tensor, group, dim, False)


def reduce_scatter(
    tensor: torch.Tensor, group: dist.ProcessGroup, dim: int
) -> torch.Tensor:
    """Leave a region into shards along ``dim``: each rank has its shard of the sum."""
    return _apply(_ReduceScatter, tensor, group, dim)


def scatter(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Keep this rank's shard of what every rank has; gradients are put together."""
    return _apply(_Scatter, tensor, group, dim)


def all_to_all(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, split: int, join: int
) -> torch.Tensor:
    """Trade the sharding of one dimension for that of another.

    Args:
        tensor: Whole along ``split``, which the group's size divides; a shard along
            ``join``.
        group: Ranks in order of their shards.
        split: Dimension that will be sharded.
        join: Dimension that will be whole.
    """
    return _apply(_AllToAll, tensor, group, split, join)


def exchange_rows(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    sends: Sequence[int],
    receives: Sequence[int],
) -> torch.Tensor:
    """Send consecutive rows to each rank, and receive some of each.

    Args:
        rows: In order of the ranks they are for. Shape [sum(sends), ...].
        group: The ranks.
        sends: Rows for each rank.
        receives: Rows from each rank; what they send to this one.

    Returns:
        Rows in order of the ranks they come from. Shape [sum(receives), ...].
    """
    return _apply(_ExchangeRows, rows, group, sends, receives)
