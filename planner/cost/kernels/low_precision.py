"""Peak rates by dtype; products in float8 and float4, and the casts they need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.constants import DeviceConstants
from planner.cost.kernels.blocks import KernelTable
from planner.schema.cluster import DeviceType

__all__ = [
    "cast_bytes",
    "format_rate",
    "gathered_share",
    "low_precision_rates",
    "peak_flops_per_s",
]

Array = NDArray[np.float64]


#: Next wider dtype to fall back on when a device has no peak of its own for one.
_WIDER = {
    "float4": "float8",
    "float8": "bfloat16",
    "bfloat16": "float16",
    "float16": "float32",
    "tensorfloat32": "float32",
    "float32": "float64",
}

#: Bytes of an element in memory.
_WIDTH = {
    "float64": 8,
    "float32": 4,
    "tensorfloat32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8": 1,
    "float8_e4m3fn": 1,
    "float4": 0.5,
    "float4_e2m1fn_x2": 0.5,
}


def peak_flops_per_s(device: DeviceType, dtype: str) -> float:
    """Dense peak of a dtype on a device.

    Its own figure; else that of the next wider dtype that has one, which the products
    can be computed in; else that of the widest narrower dtype, divided by how many
    times as many bytes an element has: whatever makes wide products out of narrow
    units has at least to move them.
    """
    aliases = {"float8": ("float8_e4m3fn",), "float4": ("float4_e2m1fn_x2",)}
    name: str | None = dtype
    while name is not None:
        for alias in aliases.get(name, (name,)):
            if alias in device.peak_flops_per_s:
                return device.peak_flops_per_s[alias]
        name = _WIDER.get(name)
    widths = {known: _WIDTH[known] for known in device.peak_flops_per_s}
    widest = max(widths.values())
    slowest = min(
        device.peak_flops_per_s[known]
        for known, width in widths.items()
        if width == widest
    )
    return slowest * min(1.0, widest / _WIDTH[dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """Format of operands that recipes cast as products run.

    Attributes:
        halvings: Times that it is half as wide as bfloat16.
        cast: Bytes moved to make an operand as it is and transposed, over its own.
        gathered: Bytes of a gather over those of the operand in bfloat16, forward and
            backward.
        rate: Of products, over those with one scale a tensor.
    """

    halvings: int
    cast: float = 2.0
    gathered: tuple[float, float] = (1.0, 1.0)
    rate: float = 1.0


#: To float8 two bytes are read, two written, of two; one that is gathered is transposed
#: there. To float4 an operand is read three times, for the largest value as it is and
#: rotated, for its rows, and for its rotated columns; half a byte and a sixteenth of a
#: scale are written of each. ``mxfp8`` and float4 have scales of blocks along each of
#: two directions: forward gathers an operand for its rows alone, backward for both.
#: Source: TransformerEngine, pytorch/csrc/quantizer.cpp (NVFP4Quantizer::quantize_impl)
#: and pytorch/module/linear.py (set_usage before gather_along_first_dim), 2.8.
#:
#: Scales a row are torchao's: its table for Llama 3 8B on 8 H100
#: (torchao/float8/README.md, 0.10) gains 10 % over bfloat16 where one scale gains 25 %;
#: with products that take three fifths of a step, .4 of it left of them under one scale
#: and .51 under many.
_FORMATS = {
    "float8": _Format(halvings=1, gathered=(0.5, 0.5)),
    "mxfp8": _Format(halvings=1, gathered=(0.5, 1.0)),
    "float8_rowwise": _Format(halvings=1, rate=0.78),
    "float4": _Format(halvings=2, cast=3.5625, gathered=(0.28125, 0.5625)),
}

#: Formats whose operands are cast where they are needed, behind the gather, whatever
#: the recipe: torchao's layers that cast before it take one scale a tensor
#: (torchao/float8/float8_tensor_parallel.py). The others are TransformerEngine's.
_CAST_BEHIND = frozenset({"float8_rowwise"})

#: Peaks of a datasheet that formats go by.
_PEAKS = {"mxfp8": "float8", "float8_rowwise": "float8"}


def low_precision_rates(
    table: KernelTable, device: DeviceType, dtype: str, constants: DeviceConstants
) -> Array:
    """FLOP/s that very large kernels reach. Shape [1, kernels]."""
    found = _FORMATS.get(dtype)
    wide = peak_flops_per_s(device, _PEAKS.get(dtype, dtype))
    peak = np.full(table.low_precision[None, :].shape, wide)
    if found:
        # Each halving of the width loses the same share to scales. Assumption.
        peak *= found.rate * 0.85**found.halvings
        peak[:, ~table.low_precision] = peak_flops_per_s(device, "bfloat16")
    return peak * constants.matmul_efficiency


def format_rate(dtype: str) -> float:
    """Rate of products over those with one scale a tensor; 1 if it is no format."""
    found = _FORMATS.get(dtype)
    return found.rate if found else 1.0


def cast_bytes(
    table: KernelTable, dtype: str, tp: Array, stream: Array, *, before: bool
) -> tuple[Array, Array]:
    """Moved to make low-precision operands, both ways. [combinations, kernels] each.

    Of a product's input forward and of its output's gradient backward, each as it is
    and transposed. Weights are cast once a step, which is next to nothing. What the
    ranks of tp gather, inputs of colwise products and gradients of rowwise ones, each
    casts its part of before, or all of behind.

    Args:
        table: Kernels at the traced batch.
        dtype: Of products.
        tp: Shape [combinations, 1].
        stream: Ranks that share the stream between tp's layers. [combinations, 1].
        before: Whether the recipe casts before it gathers.
    """
    found = _FORMATS.get(dtype)
    if found is None:
        none = np.zeros((len(tp), len(table.k)))
        return none, none
    own = 1 / (stream if before and dtype not in _CAST_BEHIND else np.ones_like(tp))
    style = table.style[None, :]
    colwise, rowwise = style == 0, style == 1
    # Inputs of rowwise products and outputs of colwise ones lie on one rank each.
    given = np.where(colwise, own, np.where(rowwise, 1 / tp, 1.0))
    made = np.where(rowwise, own, np.where(colwise, 1 / tp, 1.0))
    inside = (style == 2) | (style == 5)
    given = np.where(inside, 1 / tp, np.where(style == 3, 1 / stream, given))
    made = np.where(inside, 1 / tp, np.where(style == 3, 1 / stream, made))
    into = table.k / np.maximum(table.k + table.n, 1)
    moved = np.where(table.low_precision, found.cast * table.forward_bytes, 0.0)
    return moved * into * given, moved * (1 - into) * table.trained * made


def gathered_share(dtype: str, *, before: bool) -> tuple[float, float]:
    """Bytes of tp's gathers over those in bfloat16: forward's, and backward's.

    Args:
        dtype: Of products.
        before: Whether the recipe casts before it gathers.
    """
    found = _FORMATS.get(dtype)
    return found.gathered if found and before else (1.0, 1.0)
