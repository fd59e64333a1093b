"""Optimizers of torch that a plan can name: states, arithmetic, and who takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["OPTIMIZERS", "OptimizerKind", "OptimizerName"]

OptimizerName = Literal[
    "AdamW", "Adam", "SGD", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """Facts of an optimizer, counted in its single-tensor path in ``torch/optim``.

    Attributes:
        states: Tensors of a parameter's size that it keeps, without momentum.
        passes: Reads and writes of a scalar in a fused update.
        ops: Ops of an update on a CPU.
        fused: Whether torch has one kernel for DTensors.
        betas: Its two factors by default; None if it has none.
        momentum: Whether it takes one, and keeps a tensor for it.
    """

    states: int
    passes: float
    ops: float
    fused: bool = False
    betas: tuple[float, float] | None = None
    momentum: bool = False


_BETAS = (0.9, 0.999)

#: By the class's name in ``torch.optim``.
OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "AdamW": OptimizerKind(states=2, passes=7, ops=12, fused=True, betas=_BETAS),
    "Adam": OptimizerKind(states=2, passes=7, ops=12, fused=True, betas=_BETAS),
    "SGD": OptimizerKind(states=0, passes=3, ops=1, momentum=True),
    # Op by op on lists: a pass of two reads and a write each.
    "NAdam": OptimizerKind(states=2, passes=24, ops=8, betas=_BETAS),
    "RAdam": OptimizerKind(states=2, passes=24, ops=8, betas=_BETAS),
    "Adamax": OptimizerKind(states=2, passes=18, ops=6, betas=_BETAS),
    "Adagrad": OptimizerKind(states=1, passes=12, ops=4),
    "RMSprop": OptimizerKind(states=1, passes=12, ops=4, momentum=True),
}

assert set(OPTIMIZERS) == set(get_args(OptimizerName))
