"""Batch norms that take their statistics over all data-parallel ranks.

Each rank has as many values. Their means and variances are put together as Chan et al.
1979 do, "Updating formulae and a pairwise algorithm for computing sample variances";
gradients are those of a batch norm over the whole batch. Unlike
``torch.nn.SyncBatchNorm``, which wants GPUs, these run on any device.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from executors.mesh import ProcessMesh
from planner.errors import ExecutionError

__all__ = ["calibrate_batch_norms", "synchronise_batch_norms"]


def synchronise_batch_norms(
    model: nn.Module, place: ProcessMesh, axes: Sequence[str] = ("shard", "replicate")
) -> None:
    """Make the batch norms of a model part see the samples of all ranks, in place.

    Args:
        model: The part.
        place: Where this process stands.
        axes: Of the ranks that take statistics together.

    Raises:
        ExecutionError: If a batch norm is of a class that computes in its own way.
    """
    groups = [place.group(axis) for axis in axes]
    wide = tuple(group for group in groups if group is not None)
    if not wide:
        return
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if type(module).forward is not _BatchNorm.forward:
            raise ExecutionError(
                f"{name} is a {type(module).__name__}, whose forward is its own, so "
                f"that its statistics cannot be taken over data-parallel ranks; use "
                f"data parallel 1, or pin semantics=approximate"
            )
        module.forward = types.MethodType(_Forward(wide), module)  # type: ignore[method-assign]


@torch.no_grad()
def calibrate_batch_norms(
    model: nn.Module, batches: Iterable[Mapping[str, torch.Tensor]]
) -> None:
    """Take the running statistics of a model anew, in place, as the mean over batches.

    Weights, modes of modules and other buffers of the batch norms stay as they are.

    Args:
        model: Whose batch norms track running statistics; others are left alone.
        batches: Inputs of forward by name, on the model's device; at least one.

    Raises:
        ExecutionError: If there are no batches.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    ]
    kept = [(norm, norm.momentum, norm.training) for norm in norms]
    seen = 0
    for norm in norms:
        norm.reset_running_stats()
        # None takes the mean of all batches.
        norm.momentum = None
        norm.training = True
    try:
        for batch in batches:
            model(**batch)
            seen += 1
    finally:
        for norm, momentum, training in kept:
            norm.momentum, norm.training = momentum, training
    if norms and not seen:
        raise ExecutionError(
            "no batches to take running statistics of batch norms from; give at least "
            "one"
        )


class _Forward:
    """``forward`` of a batch norm, over the ranks of some groups."""

    def __init__(self, groups: tuple[dist.ProcessGroup, ...]) -> None:
        self.groups = groups

    def __call__(
        self, norm: _BatchNorm, value: torch.Tensor, copies: int = 1
    ) -> torch.Tensor:
        """Return the normalised values.

        Args:
            norm: The batch norm.
            value: Of this rank.
            copies: Ranks that have the same values.
        """
        norm._check_input_dim(value)  # type: ignore[no-untyped-call]
        if not (norm.training or norm.running_mean is None):
            return _BatchNorm.forward(norm, value)
        ranks = math.prod(group.size() for group in self.groups)
        values = ranks * value.numel() // value.shape[1]
        count = values // copies
        if count < 2:
            raise ValueError(
                f"expected more than one value a channel in training, got {count}"
            )
        made: tuple[torch.Tensor, ...] = _Normalised.apply(  # type: ignore[no-untyped-call]
            value, norm.weight, norm.bias, norm.eps, values, self.groups
        )
        result, mean, variance = made
        if norm.training and norm.track_running_stats:
            _follow(norm, mean, variance, count)
        return result


@torch.no_grad()
def _follow(
    norm: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor, count: int
) -> None:
    """Move running statistics toward those of a batch."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    share = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if share is None:
            share = 1.0 / float(norm.num_batches_tracked)
    # The running variance is that of a sample, which divides by one less.
    unbiased = variance * (count / (count - 1))
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share or 0.0)
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share or 0.0)


#: Fewest values that are worth a piece, and most pieces.
_PIECE, _PIECES = 2**16, 16


def _pieces(value: torch.Tensor) -> list[slice]:
    """Channels in pieces of so many values that little more memory is needed."""
    count = value.shape[1]
    pieces = min(max(1, value.numel() // _PIECE), _PIECES, count)
    each = -(-count // pieces)
    return [slice(start, start + each) for start in range(0, count, each)]


class _Normalised(torch.autograd.Function):
    """Values less their mean over their deviation, of the samples of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        count: int,
        groups: tuple[dist.ProcessGroup, ...],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the normalised values, and mean and variance of each channel."""
        wide = torch.promote_types(value.dtype, torch.float32)
        along = [dim for dim in range(value.dim()) if dim != 1]
        pieces = _pieces(value)
        moments = [
            torch.var_mean(value[:, piece].to(wide), along, correction=0)
            for piece in pieces
        ]
        variance, mean = (torch.cat(each) for each in zip(*moments, strict=True))
        for group in groups:
            mean, variance = _together(mean, variance, group)
        inverse = torch.rsqrt(variance + eps)
        shape = [1, -1] + [1] * (value.dim() - 2)
        scale = inverse if weight is None else inverse * weight.to(wide)
        shift = -mean * scale if bias is None else bias.to(wide) - mean * scale
        shift, scale = shift.view(shape), scale.view(shape)
        result = torch.empty_like(value)
        for piece in pieces:
            result[:, piece] = torch.addcmul(
                shift[:, piece], value[:, piece].to(wide), scale[:, piece]
            )
        ctx.save_for_backward(value, weight, mean, inverse)
        ctx.groups, ctx.along, ctx.shape, ctx.count = groups, along, shape, count
        ctx.mark_non_differentiable(mean, variance)
        return result, mean, variance

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of values, weight and bias."""
        value, weight, mean, inverse = ctx.saved_tensors
        wide, shape = mean.dtype, ctx.shape
        middle, steep = mean.view(shape), inverse.view(shape)
        pieces = _pieces(value)

        def unit_of(piece: slice) -> torch.Tensor:
            """Values less their mean over their deviation; a tensor of its own."""
            unit: torch.Tensor = value[:, piece].to(wide, copy=True)
            unit.sub_(middle[:, piece]).mul_(steep[:, piece])
            return unit

        rows = []
        for piece in pieces:
            unit, one = unit_of(piece), grad[:, piece].to(wide)
            sums_of = [one.sum(ctx.along), unit.mul_(one).sum(ctx.along)]
            rows.append(torch.stack(sums_of))
            # Before the next piece's take memory beside them.
            del unit, one
        sums = torch.cat(rows, 1)
        of_bias, of_weight = sums.clone()
        for group in ctx.groups:
            dist.all_reduce(sums, group=group)
        first, second = (sums / ctx.count).unbind()
        scale = inverse if weight is None else inverse * weight.to(wide)
        first, second, scale = (x.view(shape) for x in (first, second, scale))
        of_value = torch.empty_like(value)
        for piece in pieces:
            unit = unit_of(piece).mul_(second[:, piece])
            part = grad[:, piece].to(wide, copy=True)
            part.sub_(first[:, piece]).sub_(unit).mul_(scale[:, piece])
            of_value[:, piece] = part
            del unit, part
        if weight is None:
            return of_value, None, None, None, None, None
        of_weight, of_bias = of_weight.to(weight.dtype), of_bias.to(weight.dtype)
        return of_value, of_weight, of_bias, None, None, None


def _together(
    mean: torch.Tensor, variance: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of the values of all ranks of a group."""
    mine = torch.stack([mean, variance])
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    means, variances = torch.stack(gathered).unbind(1)
    mean = means.mean(0)
    return mean, (variances + (means - mean) ** 2).mean(0)
