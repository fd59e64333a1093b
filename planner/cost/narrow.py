"""Products in float8 and float4: how fast they are, and what casting costs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.constants import DeviceConstants
from planner.cost.kernel_table import KernelTable
from planner.cost.peaks import peak_flops_per_s
from planner.schema.cluster import DeviceType

__all__ = ["cast_bytes", "narrow_rates"]

Array = NDArray[np.float64]

#: Times that a dtype is half as wide as bfloat16, of those that recipes cast products
#: to as they run.
_HALVINGS = {"float8": 1, "float8_rowwise": 1, "float4": 2}
#: Rate of products whose rows have scales of their own over those with one a tensor:
#: torchao's table for Llama 3 8B on 8 H100 (torchao/float8/README.md, 0.10) gains 10 %
#: over bfloat16 where one scale gains 25 %; with products that take three fifths of a
#: step, .4 of it left of them under one scale and .51 under many.
_ROWWISE = 0.78
#: Bytes moved to cast an operand over its own: two read, two written, of two.
_CAST_PASSES = 2.0


def narrow_rates(
    table: KernelTable, device: DeviceType, dtype: str, constants: DeviceConstants
) -> Array:
    """FLOP/s that very large kernels reach. Shape [1, kernels]."""
    halvings = _HALVINGS.get(dtype, 0)
    wide = dtype.removesuffix("_rowwise")
    peak = np.full(table.narrow[None, :].shape, peak_flops_per_s(device, wide))
    if wide != dtype:
        peak *= _ROWWISE
    if halvings:
        # Each halving of the width loses the same share to scales.
        peak *= constants.float8_efficiency**halvings
        peak[:, ~table.narrow] = peak_flops_per_s(device, "bfloat16")
    return peak * constants.matmul_efficiency


def cast_bytes(table: KernelTable, dtype: str) -> tuple[Array, Array]:
    """Moved to make narrow operands, forward and backward. Shapes [kernels].

    Of a product's input forward and of its output's gradient backward, over the bytes
    of either: read once, and written as it is and transposed, in one byte each.
    Weights are cast once a step, which is next to nothing.
    """
    if dtype not in _HALVINGS:
        return np.zeros(len(table.k)), np.zeros(len(table.k))
    into = table.k / np.maximum(table.k + table.n, 1)
    moved = np.where(table.narrow, _CAST_PASSES * table.forward_bytes, 0.0)
    return moved * into, moved * (1 - into) * table.trained
