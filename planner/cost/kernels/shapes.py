"""Shapes that degrees leave of kernels, and how far these keep a device from its peak.

A product is made tile by tile, as many at a time as there are processors. The last
tiles of a row or column are computed whole, and the last wave takes as long as a full
one. Libraries choose among tiles of several shapes, and split long sums where there
are too few tiles.
Source: NVIDIA, Matrix Multiplication Background User's Guide, sections "Tile
quantization" and "Wave quantization".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.constants import DeviceConstants
from planner.cost.kernels.blocks import KernelTable
from planner.schema.cluster import DeviceType
from planner.simulate.compiled import compiled, inner

__all__ = [
    "Division",
    "divide",
    "head_share",
    "shape_factors",
    "tile_factors",
    "unaligned_factors",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Kernels divided by combinations of degrees. Shapes [combinations, kernels].

    Attributes:
        scale: Tokens of one device over those of the trace. Shape [combinations, 1].
        tp: Tensor parallel degree. Shape [combinations, 1].
        stream: Ranks that share the stream between tp's layers. Likewise.
        work: Ranks that share the FLOPs.
        share: Share of the activation bytes.
        weights: Bytes of weights on one device.
        m: Length of a product's first dimension, at least 1; likewise n, k. A device
            that has 1/ep of the experts gets ep ranks' tokens.
        products: Products of equal shape, at least 1.
        scores: Attention scores of one kernel.
    """

    scale: Array
    tp: Array
    stream: Array
    work: Array
    share: Array
    weights: Array
    m: Array
    n: Array
    k: Array
    products: Array
    scores: Array


def divide(
    table: KernelTable,
    tokens: Array,
    degrees: Sequence[Array | Index],
    sequence_parallel: Array | Index,
) -> Division:
    """Divide kernels by degrees.

    Args:
        table: Kernels at the traced batch.
        tokens: Microbatch size over the traced batch. Shape [combinations].
        degrees: Of tp, cp and ep. Shapes [combinations].
        sequence_parallel: 0 or 1. Shape [combinations].
    """
    tp, cp, ep = (np.asarray(x[:, None], dtype=float) for x in degrees)
    scale = tokens[:, None] / cp
    stream = np.where(sequence_parallel[:, None] > 0, tp, 1.0)
    style, experts = table.style[None, :], table.expert_share > 0
    # A colwise product reads its whole input and writes 1/tp of its output, a rowwise
    # one the other way round.
    into = table.k / np.maximum(table.k + table.n, 1)
    shares = (into + (1 - into) / tp, into / tp + (1 - into), 1 / tp, 1 / stream)
    scores = np.where(table.kind == 1, table.batch * table.m * table.n, 0.0)
    inside = np.where(style <= 2, tp, 1.0)
    return Division(
        scale=scale,
        tp=tp,
        stream=stream,
        work=np.where(style == 3, stream, inside),
        share=np.select([style == place for place in range(4)], shares, 1.0),
        weights=table.weight_bytes
        * (1 - table.expert_share + table.expert_share / ep)
        / np.where(style <= 1, tp, 1.0),
        m=np.maximum(table.m * scale * np.where(experts, ep, 1.0), 1.0),
        n=np.maximum(np.where(style == 0, table.n / tp, table.n), 1.0),
        k=np.maximum(np.where(style == 1, table.k / tp, table.k), 1.0),
        products=np.maximum(table.batch / np.where(experts, ep, 1.0), 1.0),
        scores=scores * scale / inside,
    )


def shape_factors(
    table: KernelTable,
    part: Division,
    device: DeviceType,
    reach: DeviceConstants,
    *,
    fused_attention: bool,
) -> tuple[Array, Array]:
    """Time of products over that of endless ones, forward and backward.

    Waves are for fitted constants: what documents say of products that reach half of
    their rate has them in it.

    Returns:
        Shapes [combinations, kernels].
    """
    if not reach.inner_ramp:
        padded = _padding(table, part, device)
        return padded, padded
    long = _inner_factors(table, part, reach.inner_ramp)
    tiles = tile_factors(table, part, device)
    odd = unaligned_factors(table, part, scores=not fused_attention)
    return odd * long[0] * tiles[0], odd * long[1] * tiles[1]


#: Head size at which attention would reach half of what endless heads would.
_HEAD_RAMP = 32.0

#: Numbers of 2 bytes in 16.
_ALIGNED = 8

#: An assumption: a vocabulary of 50,304 instead of 50,257 is said to have made nanoGPT
#: about 25 % faster on A100 (A. Karpathy, 2023, not opened again), of whose FLOPs the
#: head's products are a quarter.
_UNALIGNED = 3.0

#: BLOOM's trials on 40 hosts with heads of 150 take 221 s, those with heads of 216 and
#: 7 % fewer weights 160 s (bigscience, chronicles-prequel.md, 2022): scores, which are
#: 2.4 % of the FLOPs. Its 104B with heads of 145, which the figure was not taken from,
#: goes from 32 % too fast to 7 % too slow.
_UNALIGNED_SCORES = 10.0


def head_share(table: KernelTable, reach: DeviceConstants) -> Array:
    """Rate of attention at a head size over that at size 128. Shape [kernels].

    Small heads leave less to do between two exponentials. Source: Dao 2023
    (FlashAttention-2), figures 4 and 5: size 64 reaches five sixths of size 128.
    Documents of devices, which no fit has been at, say nothing of it.
    """
    if not reach.inner_ramp:
        return np.ones(len(table.k))
    share = table.k / (table.k + _HEAD_RAMP) * (128 + _HEAD_RAMP) / 128
    return np.asarray(np.where(table.kind == 1, share, 1.0))


def _inner_factors(
    table: KernelTable, part: Division, ramp: float
) -> tuple[Array, Array]:
    """Time of products of some inner length over that of endless ones.

    Forward sums over k, the input's gradient over n, the weight's over tokens.

    Args:
        table: Kernels at the traced batch.
        part: What a device has of them.
        ramp: Inner length that reaches half of the rate.
    Returns:
        Forward's and backward's. Shapes [combinations, kernels].
    """
    product = table.kind[None, :] == 0
    weights = table.trained & (table.weight_bytes > 0)
    backward = np.where(weights, (1 / part.n + 1 / part.m) / 2, 1 / part.n)
    return (
        np.asarray(np.where(product, 1 + ramp / part.k, 1.0)),
        np.asarray(np.where(product, 1 + ramp * backward, 1.0)),
    )


def unaligned_factors(table: KernelTable, part: Division, *, scores: bool) -> Array:
    """Time of products whose rows do not begin at 16 bytes, over that of others.

    Tensor cores read 8 numbers of 2 bytes at once; rows of other lengths take slower
    kernels. Fused attention pads its heads itself.
    Sources: NVIDIA, Matrix Multiplication Background, section 2; the factors: see
    :data:`_UNALIGNED`.

    Args:
        table: Kernels at the traced batch.
        part: What a device has of them.
        scores: Whether attention is made of products.
    Returns:
        Shape [combinations, kernels].
    """
    odd = (part.k % _ALIGNED != 0) | (part.n % _ALIGNED != 0)
    product = np.where(table.kind[None, :] == 0, _UNALIGNED, 1.0)
    if scores:
        product = np.where(table.kind[None, :] == 1, _UNALIGNED_SCORES, product)
    return np.asarray(np.where(odd, product, 1.0))


#: Rows, columns, and the share of the best rate that such tiles reach: smaller ones
#: read more for each FLOP. The guide's figure 5 has no numbers; assumption.
_TILES = np.array(
    [
        (256.0, 128.0, 1.0),
        (128.0, 256.0, 1.0),
        (128.0, 128.0, 0.95),
        (128.0, 64.0, 0.85),
        (64.0, 64.0, 0.7),
    ]
)

#: Into how many parts a sum is split, each no shorter than this, and what is left of
#: the rate for each halving: parts are added up in memory. Assumption.
_SPLITS, _SHORTEST, _SPLIT_SHARE = (1, 2, 4), 1024.0, 0.9


def _padded(size: Array, tile: int) -> Array:
    """Size rounded up to whole tiles; small sizes to the next multiple of 16."""
    small = np.ceil(size / 16) * 16
    large = np.ceil(size / tile) * tile
    return np.where(size < tile, small, large)


def _padding(table: KernelTable, part: Division, device: DeviceType) -> Array:
    """Computed over useful FLOPs, from output tiles of 128 x 128 on GPUs.

    CPUs show no such steps at the sizes that matter.

    Returns:
        Shape [combinations, kernels].
    """
    if device.backend == "gloo":
        return np.ones_like(part.m)
    padded = _padded(part.m, 128) * _padded(part.n, 128) / (part.m * part.n)
    return np.asarray(np.where(table.kind[None, :] == 0, padded, 1.0))


@inner
def _of_product(
    m: float, n: float, k: float, count: float, processors: float, tiles: Array
) -> float:
    """Time of ``count`` products over that without tiles, by the best choice."""
    best = np.inf
    for place in range(len(tiles)):
        high, wide, share = tiles[place]
        area = np.ceil(m / high) * np.ceil(n / wide) * count
        for split in _SPLITS:
            if split > 1 and k / split < _SHORTEST:
                break
            waves = np.ceil(area * split / processors)
            computed = waves * processors * high * wide / split
            reached = share * _SPLIT_SHARE ** (split // 2)
            best = min(best, computed / (m * n * count) / reached)
    return float(best)


@compiled
def _fill(
    m: Array,
    n: Array,
    k: Array,
    count: Array,
    product: NDArray[np.bool_],
    trained: NDArray[np.bool_],
    processors: float,
    tiles: Array,
    forward: Array,
    backward: Array,
) -> None:
    for row in range(m.shape[0]):
        for kernel in range(m.shape[1]):
            if not product[kernel]:
                continue
            rows, columns, inner = m[row, kernel], n[row, kernel], k[row, kernel]
            many = count[row, kernel]
            forward[row, kernel] = _of_product(
                rows, columns, inner, many, processors, tiles
            )
            found = _of_product(rows, inner, columns, many, processors, tiles)
            if trained[kernel]:
                found += _of_product(inner, columns, rows, many, processors, tiles)
                found /= 2
            backward[row, kernel] = found


def tile_factors(
    table: KernelTable, part: Division, device: DeviceType
) -> tuple[Array, Array]:
    """Time of products over that of their FLOPs alone, by tiles and waves.

    Forward makes m x n, the input's gradient m x k, the weight's k x n.

    Args:
        table: Kernels at the traced batch.
        part: What a device has of them.
        device: With its number of processors; without it, tiles alone count.
    Returns:
        Forward's and backward's; 1 where a kernel is no product. Shapes
        [combinations, kernels].
    """
    if device.processors is None or device.backend == "gloo":
        padded = _padding(table, part, device)
        return padded, padded
    forward, backward = np.ones((2, *part.m.shape))
    m, n, k = (
        np.ascontiguousarray(np.broadcast_to(length, part.m.shape))
        for length in (part.m, part.n, part.k)
    )
    _fill(
        m,
        n,
        k,
        np.ascontiguousarray(part.products),
        table.kind == 0,
        table.trained & (table.weight_bytes > 0),
        float(device.processors),
        _TILES,
        forward,
        backward,
    )
    return forward, backward
