"""Optimizers that a plan can name: states, arithmetic, and who takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["OPTIMIZERS", "OptimizerKind", "OptimizerName"]

OptimizerName = Literal[
    "AdamW",
    "Adam",
    "SGD",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "RMSprop",
    "Muon",
    "Adafactor",
    "AdamW8bit",
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
        module: That has the class.
        elementwise: Whether a number's update depends on that number alone, so that any
            part of a tensor can be updated by itself.
        whole: Whether it takes whole tensors alone, and none that ranks divide.
        matrix_states: Tensors that it keeps of a matrix of a hidden layer; None for as
            many as of any parameter.
        factored: Whether it keeps rows and columns of tensors in place of tensors.
        state_bytes: Bytes of a scalar of a state; None for the plan's ``state_dtype``.
    """

    states: int
    passes: float
    ops: float
    fused: bool = False
    betas: tuple[float, float] | None = None
    momentum: bool = False
    module: str = "torch.optim"
    elementwise: bool = True
    whole: bool = False
    matrix_states: int | None = None
    factored: bool = False
    state_bytes: float | None = None


_BETAS = (0.9, 0.999)

#: By the class's name.
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
    # Of matrices: momentum, then products, which :mod:`planner.cost.optimizer_states`
    # counts. AdamW has all other parameters.
    "Muon": OptimizerKind(
        states=2, passes=12, ops=8, betas=_BETAS, elementwise=False, matrix_states=1
    ),
    # Two norms, the product of rows and columns, and three passes over what it gives.
    "Adafactor": OptimizerKind(
        states=1, passes=18, ops=8, elementwise=False, whole=True, factored=True
    ),
    # A byte, and of 256 a scale in float32; of less than 4,096 it keeps float32.
    "AdamW8bit": OptimizerKind(
        states=2,
        passes=4,
        ops=14,
        betas=_BETAS,
        module="torchao.optim",
        elementwise=False,
        state_bytes=1 + 4 / 256,
    ),
}

assert set(OPTIMIZERS) == set(get_args(OptimizerName))
