"""Time of products and attention of a model by surfaces that were fitted to kernels.

Forward kernels were measured. The products of a backward pass are those of the
transposed operands: with an output of m x n and inner length k, the input's gradient is
(m, k, n), the weight's (n, k, m). Attention's backward takes the time of its forward
times its FLOPs over the forward's, over what backward reaches of forward's rate
(:attr:`planner.cost.recipes.Recipe.attention_backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.kernels.blocks import KERNEL_KINDS, KernelTable
from planner.cost.kernels.low_precision import format_rate
from planner.cost.kernels.shapes import Division, unaligned_factors
from planner.cost.recipes import Recipe
from planner.cost.surfaces import Surfaces
from planner.units import dtype_bytes

__all__ = ["ProductTimes", "product_times"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

_ATTENTION = KERNEL_KINDS.index("attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """Seconds of one op of each kernel, 0 if it is no product. Shapes [C, kernels].

    Attributes:
        forward: Of the forward.
        inputs: Of the gradient of the input; of both inputs where there is no weight.
        weights: Of the gradient of the weight.
    """

    forward: Array
    inputs: Array
    weights: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pricing:
    """Facts that decide of the time of products.

    Attributes:
        table: Kernels at the traced batch.
        part: What a device has of them.
        surfaces: Of the device.
        recipe: Of the framework.
        narrow: Dtype of products that recipes for low precision convert.
        wide: Of all others.
        causal: Whether attention is.
    """

    table: KernelTable
    part: Division
    surfaces: Surfaces
    recipe: Recipe
    narrow: str
    wide: str
    causal: bool


def product_times(
    table: KernelTable,
    part: Division,
    surfaces: Surfaces,
    recipe: Recipe,
    *,
    dtypes: tuple[str, str],
    causal: bool,
    slower: tuple[float, float] = (1.0, 1.0),
    newer: bool = False,
) -> ProductTimes:
    """Price products and attention.

    Args:
        table: Kernels at the traced batch.
        part: What a device has of them.
        surfaces: Of the device.
        recipe: Of the framework.
        dtypes: Of products that recipes for low precision convert, and of all others.
        causal: Whether attention is.
        slower: Time of products over that of current libraries; likewise attention of
            fused kernels.
        newer: Whether the device is newer than Ampere.
    """
    by = _Pricing(
        table=table,
        part=part,
        surfaces=surfaces,
        recipe=recipe,
        narrow=dtypes[0],
        wide=dtypes[1],
        causal=causal,
    )
    forward, inputs, weights = np.zeros((3, *part.m.shape))
    # As many products as the backward has FLOPs of the forward's.
    ratio = np.round(table.backward_flops / np.maximum(table.forward_flops, 1.0))
    weighted = table.weight_bytes > 0
    own = weighted & table.trained & (ratio > 0)
    for columns, seconds, summed in _products(by):
        m, n, k, many = (x[:, columns] for x in (part.m, part.n, part.k, part.products))
        forward[:, columns] = seconds(m, n, k, many)
        wanted = np.where(own, ratio >= 2, ratio > 0)[columns]
        first = np.where(wanted, seconds(m, k, n, many), 0.0)
        second = summed(n, k, m, many)
        other = np.where(((ratio >= 2) & ~weighted)[columns], second, 0.0)
        inputs[:, columns] = first + other
        weights[:, columns] = np.where(own[columns], second, 0.0)
    columns = np.flatnonzero(table.kind == _ATTENTION)
    if len(columns):
        price = _fused_attention if recipe.fused_attention else _attention
        forward[:, columns], inputs[:, columns] = price(by, columns)
    fused = (table.kind == _ATTENTION) & recipe.fused_attention
    odd = np.ones_like(part.m)
    if dtype_bytes(dtypes[1]) <= 2:
        scores = not recipe.fused_attention
        odd = unaligned_factors(table, part, scores=scores, newer=newer)
    odd = odd * np.where(fused, slower[1], slower[0])
    found = (forward * odd, inputs * odd, weights * odd)
    return ProductTimes(forward=found[0], inputs=found[1], weights=found[2])


#: Seconds of products of (m, n, k, how many).
_Seconds = Callable[[Array, Array, Array, Array], Array]


def _products(by: _Pricing) -> Iterator[tuple[Index, _Seconds, _Seconds]]:
    """Yield columns of products, and seconds of those that sum over features, or rows.

    Products of experts have one matrix each; the gradients of these are plain products
    of as many.
    """
    table = by.table
    product = (table.kind <= KERNEL_KINDS.index("conv")) & (table.kind != _ATTENTION)
    narrow = table.low_precision & (by.narrow != by.wide)
    grouped = table.expert & (table.batch > 1)
    for dtype, of_dtype in ((by.wide, ~narrow), (by.narrow, narrow)):
        rate = format_rate(dtype)
        plain = by.surfaces.products(dtype)
        experts = by.surfaces.experts(dtype)

        def summed(m: Array, n: Array, k: Array, many: Array) -> Array:
            return np.asarray(plain.seconds(m, n, k, many) / rate)  # noqa: B023

        def of_experts(m: Array, n: Array, k: Array, many: Array) -> Array:
            return np.asarray(experts.product(m * many, many, n, k) / rate)  # noqa: B023

        for mask, seconds in ((~grouped, summed), (grouped, of_experts)):
            columns = np.flatnonzero(product & of_dtype & mask)
            if len(columns):
                yield columns, seconds, summed


def _shape(by: _Pricing, columns: Index) -> tuple[Array, Array, Array, Array]:
    """Heads of all samples, queries, keys and head size. Shapes [C, columns]."""
    queries = by.table.m[columns] / by.part.hops
    keys, size = by.table.n[columns], by.table.k[columns]
    heads = np.maximum(by.part.scores[:, columns] / (queries * keys), 1.0)
    shape = heads.shape
    return heads, queries, np.broadcast_to(keys, shape), np.broadcast_to(size, shape)


#: Share of the peak in float32 that fused attention reaches. On an H200 that of
#: GPT-2 medium took 59 ms, forward and backward (`python -m benchmarks.one_gpu`,
#: 2026-11-26).
_WIDE_ATTENTION = 0.36


def _fused_attention(by: _Pricing, columns: Index) -> tuple[Array, Array]:
    """Seconds of forward and backward. Shapes [C, columns].

    A ring has a kernel for each rank's keys, of which the queries of a part of a causal
    sequence see half on average.
    """
    table, recipe = by.table, by.recipe
    heads, queries, keys, size = _shape(by, columns)
    skips = by.causal and recipe.causal_share < 1
    surface, hops = by.surfaces.attention(causal=skips), by.part.hops
    once = surface.seconds(heads, queries, 1.0, 1.0, size, keys=keys)
    if (hops > 1).any():
        full = by.surfaces.attention(causal=False)
        seen = keys / hops * (recipe.causal_share if skips else 1.0)
        part = hops * full.seconds(heads, queries, 1.0, 1.0, size, keys=seen)
        once = np.where(hops > 1, part, once)
    if dtype_bytes(by.wide) > 2:
        peak = by.surfaces.products(by.wide).chip.peak_flops_per_s
        halved = recipe.causal_share if skips else 1.0
        work = 4 * halved * heads * queries * keys * size
        once = np.maximum(once, work / (peak * _WIDE_ATTENTION))
    flops = table.backward_flops[columns] + table.recompute_flops[columns]
    ratio = flops / np.maximum(table.forward_flops[columns], 1.0)
    reach = recipe.attention_forward / recipe.attention_backward
    return once, once * ratio * reach


def _attention(by: _Pricing, columns: Index) -> tuple[Array, Array]:
    """Seconds of the products alone, where scores are written. Shapes [C, columns]."""
    surface = by.surfaces.products(by.wide)
    heads, queries, keys, size = _shape(by, columns)
    once = surface.seconds(queries, keys, size, heads)
    once = once + surface.seconds(queries, size, keys, heads)
    wanted = by.table.backward_flops[columns] > 0
    return once, np.where(wanted, 2 * once, 0.0)
