"""What happens to gradients between backward and the optimizer, under any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from executors.mesh import ProcessMesh

__all__ = ["clip_gradients", "gradient_norm", "sum_over_tp"]


#: Axes along which a parameter can be sharded.
_SHARDING = ("shard", "tp", "expert_shard", "ep")


def sum_over_tp(parameters: Sequence[nn.Parameter], place: ProcessMesh) -> None:
    """Sum gradients that each tp rank has a part of, in place, in one all-reduce.

    Args:
        parameters: Whole on every tp rank; equal lists on all of them.
        place: Where this process stands.
    """
    group = place.group("tp")
    if group is None:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = _local(parameter.grad)
            by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


def gradient_norm(
    parameters: Iterable[nn.Parameter], place: ProcessMesh
) -> torch.Tensor:
    """2-norm of the gradient of the whole model, the same on every rank.

    Squares of shards are summed over the axes that shard them, then over the
    pipeline; what an axis replicates is counted once.

    Args:
        parameters: Of this rank; of tied copies, one in the whole pipeline.
        place: Where this process stands.

    Returns:
        A float32 scalar on the device.
    """
    # Squares by the set of axes that shard, as the bits of an index.
    squares = torch.zeros(2 ** len(_SHARDING), device=place.device)
    for parameter in parameters:
        if parameter.grad is not None:
            local = _local(parameter.grad)
            kind = _sharding(parameter.grad)
            squares[kind] += torch.linalg.vector_norm(local, dtype=torch.float32) ** 2
    for bit, axis in enumerate(_SHARDING):
        group = place.group(axis)
        if group is not None:
            kinds = [kind for kind in range(len(squares)) if kind >> bit & 1]
            part = squares[kinds]
            dist.all_reduce(part, group=group)
            squares[kinds] = part
    total = squares.sum()
    group = place.group("pp")
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_gradients(
    parameters: Iterable[nn.Parameter], norm: torch.Tensor, limit: float
) -> None:
    """Scale gradients so that the norm of the whole does not exceed a limit, in place.

    Args:
        parameters: All of this rank, tied copies too.
        norm: From :func:`gradient_norm`.
        limit: Largest norm left alone. The scale is that of
            ``torch.nn.utils.clip_grad_norm_``.
    """
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).mul_(scale)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharding(grad: torch.Tensor) -> int:
    if not isinstance(grad, DTensor):
        return 0
    names = grad.device_mesh.mesh_dim_names or ()
    split = {
        name
        for name, placement in zip(names, grad.placements, strict=True)
        # Not is_shard(): the shards of shards that tp with fully_shard makes say no.
        if not placement.is_replicate()
    }
    return sum((axis in split) << bit for bit, axis in enumerate(_SHARDING))
