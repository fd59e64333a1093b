"""The optimizer that a plan names, over parameters of several meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planner.schema import Optimizer

__all__ = ["build_optimizer"]


def build_optimizer(
    parameters: Iterable[nn.Parameter], spec: Optimizer
) -> torch.optim.Optimizer:
    """Build it; betas and eps are torch's defaults.

    Parameters are grouped by mesh: the fused-loop ("foreach") kernels refuse lists
    that mix plain tensors, and DTensors of several meshes.

    Args:
        parameters: Those that need a gradient; possibly none.
        spec: Name and arithmetic.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            key = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(key, []).append(parameter)
    # A stage of frozen modules still takes part in steps.
    listed: list[dict[str, Any]] = [{"params": group} for group in groups.values()]
    listed = listed or [{"params": [nn.Parameter(torch.zeros(0))]}]
    if spec.name == "SGD":
        return torch.optim.SGD(
            listed,
            lr=spec.learning_rate,
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
        )
    kind = torch.optim.AdamW if spec.name == "AdamW" else torch.optim.Adam
    return kind(listed, lr=spec.learning_rate, weight_decay=spec.weight_decay)
