"""Whole tensors out of the shards that the ranks hold."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from executors.trainer import Trainer

__all__ = ["full_gradients", "full_parameters"]


def _whole(named: list[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    local: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if tensor is not None:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            local[name] = whole.detach().cpu().clone()
    everything: list[dict[str, torch.Tensor]] = [
        {} for _ in range(dist.get_world_size())
    ]
    dist.all_gather_object(everything, local)
    merged: dict[str, torch.Tensor] = {}
    for part in everything:
        for name, tensor in part.items():
            merged.setdefault(name, tensor)
    return merged


def full_parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every parameter of the model, whole, on the CPU of every rank; collective.

    Meant for models that one process can hold; tied parameters appear once.
    """
    return _whole([(name, p) for name, p in trainer.named_parameters()])


def full_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradients of the last step, clipped if the plan clips; see parameters."""
    return _whole([(name, p.grad) for name, p in trainer.named_parameters()])
