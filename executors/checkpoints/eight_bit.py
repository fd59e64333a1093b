"""States of 8 bits in checkpoints: float32 there, and the same codes again when read.

torchao keeps a byte a number, an index into a table of 256 values from about -0.993 (0
where all are positive) to 1, and the largest absolute value of each 256 consecutive
numbers. Blocks are of a rank's part, so that another mesh has others, and reads the
numbers. On the same mesh codes and scales are those that were saved, to the bit: a
block's largest number is written as 1 or -1 times its scale.

The only file that knows torchao's class of states. Seen to work with torchao 0.18.
Source: torchao/optim/subclass_8bit.py and quant_utils.py.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["decoded", "is_eight_bit", "new_eight_bit", "plain"]

#: States that may have 8 bits, and whether they have a sign.
_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}


def is_eight_bit(state: object) -> bool:
    """Return True for a state of 8 bits, or a DTensor of parts that are."""
    module = sys.modules.get("torchao.optim.subclass_8bit")
    local = state.to_local() if isinstance(state, DTensor) else state
    return module is not None and isinstance(local, module.OptimState8bit)


def decoded(state: torch.Tensor) -> torch.Tensor:
    """Return a state's numbers in float32, which encode to the same codes and scales.

    Args:
        state: One that :func:`is_eight_bit` finds.

    Returns:
        Tensor of its shape, a DTensor of one.
    """
    if not isinstance(state, DTensor):
        return _numbers(state)
    return DTensor.from_local(
        _numbers(state.to_local()),
        state.device_mesh,
        state.placements,
        run_check=False,
        shape=state.shape,
        stride=state.stride(),
    )


def _numbers(state: Any) -> torch.Tensor:
    table = state.qmap.clone()
    if state.signed:
        # Where no number is positive, the first code alone tells the block's scale.
        table[0] = -1.0
    blocks = table[state.codes.int()].view(len(state.scale), -1)
    numbers: torch.Tensor = blocks * state.scale.view(-1, 1)
    return numbers.view(state.codes.shape)


def plain(state: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a state of 8 bits on the CPU; another tensor as it is."""
    return decoded(state).cpu() if is_eight_bit(state) else state


def new_eight_bit(
    optimizer: torch.optim.Optimizer, key: str, parameter: nn.Parameter
) -> torch.Tensor | None:
    """Return an empty state as an optimizer would make it; None if it has no 8 bits.

    Args:
        optimizer: Of any class.
        key: Name of the state.
        parameter: What the state is of. Small ones have no states of 8 bits.
    """
    make = getattr(optimizer, "_new_buffer", None)
    if make is None or key not in _SIGNED:
        return None
    state: torch.Tensor = make(parameter.detach(), _SIGNED[key])
    return state if is_eight_bit(state) else None
