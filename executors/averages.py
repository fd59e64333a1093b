"""Exponential moving average of the weights, beside an optimizer's own states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["AVERAGE", "averaged_weights", "keep_average"]

#: Key of the average among the states of a parameter.
AVERAGE = "average"


def keep_average(
    optimizer: torch.optim.Optimizer, decay: float | None
) -> torch.optim.Optimizer:
    """Average the weights behind each step of an optimizer, which is returned.

    The average begins with the weights behind the first step, as
    ``torch.optim.swa_utils.AveragedModel`` does. It is a state of each parameter,
    sharded as the parameter is, so that it is in checkpoints.

    Args:
        optimizer: Of this rank's parameters.
        decay: Share of the average that a step keeps; None to keep none.
    """
    if decay is not None:

        def average(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            _average(optimizer, decay)

        optimizer.register_step_post_hook(average)
    return optimizer


@torch.no_grad()
def _average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    averages, weights = [], []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None and not optimizer.state.get(parameter):
                # It has never been trained.
                continue
            state = optimizer.state[parameter]
            if AVERAGE not in state:
                state[AVERAGE] = parameter.detach().clone()
            elif parameter.numel():
                averages.append(_local(state[AVERAGE]))
                weights.append(_local(parameter.detach()))
    if averages:
        torch._foreach_lerp_(averages, weights, 1 - decay)


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A block in which parameters have the values of their averages.

    Args:
        optimizer: That :func:`keep_average` was given. Parameters that it has not
            trained yet keep their values.
    """
    pairs = [
        (_local(parameter.detach()), _local(state[AVERAGE]))
        for parameter, state in optimizer.state.items()
        if AVERAGE in state
    ]
    _exchange(pairs)
    try:
        yield
    finally:
        _exchange(pairs)


@torch.no_grad()
def _exchange(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for first, second in pairs:
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
