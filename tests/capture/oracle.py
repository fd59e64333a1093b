"""Bytes and FLOPs of a real run, measured by torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from planner.capture.inputs import read_inputs
from planner.capture.run import compute_loss


def saved_bytes(module: torch.nn.Module, inputs: Mapping[str, Any]) -> float:
    """Bytes of distinct storages that autograd keeps; weights and buffers left out."""
    weights = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*module.parameters(), *module.buffers())
    }
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # The tensor is held, so that an address is not used twice.
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    module.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _loss(module, inputs)
    del loss
    return float(sum(size for size, _ in kept.values()))


def flops(module: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[float, float]:
    """FLOPs of forward and of backward, by FlopCounterMode."""
    module.train()
    with FlopCounterMode(display=False) as forward:
        loss = _loss(module, inputs)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return float(forward.get_total_flops()), float(backward.get_total_flops())


def _loss(module: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    return compute_loss(module(**inputs), "auto", read_inputs(module, inputs)).value


Build = Callable[[], torch.nn.Module]
