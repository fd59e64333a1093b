"""Factors by which the shape of a kernel keeps a device from its peak.

A product is made tile by tile, as many at a time as there are processors. The last
tiles of a row or column are computed whole, and the last wave takes as long as a full
one. Libraries choose among tiles of several shapes, and split long sums where there
are too few tiles.
Source: NVIDIA, Matrix Multiplication Background User's Guide, sections "Tile
quantization" and "Wave quantization".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.constants import DeviceConstants
from planner.cost.kernels.blocks import KernelTable
from planner.schema.cluster import DeviceType
from planner.simulate.compiled import compiled

__all__ = [
    "head_share",
    "inner_factors",
    "padding",
    "tile_factors",
    "unaligned_factors",
]

Array = NDArray[np.float64]


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
    """What attention reaches at a head size, over what it does at 128. [kernels].

    Small heads leave less to do between two exponentials. Source: Dao 2023
    (FlashAttention-2), figures 4 and 5: size 64 reaches five sixths of size 128.
    Documents of devices, which no fit has been at, say nothing of it.
    """
    if not reach.inner_ramp:
        return np.ones(len(table.k))
    share = table.k / (table.k + _HEAD_RAMP) * (128 + _HEAD_RAMP) / 128
    return np.asarray(np.where(table.kind == 1, share, 1.0))


def inner_factors(
    table: KernelTable, ramp: float, rows: Array, tp: Array
) -> tuple[Array, Array]:
    """Time of products of some inner length over that of endless ones.

    Forward sums over k, the input's gradient over n, the weight's over tokens.

    Args:
        table: Kernels at the traced batch.
        ramp: Inner length that reaches half of the rate.
        rows: Length of m. Shape [combinations, kernels].
        tp: Shape [combinations, 1].
    Returns:
        Of forward and of backward. Shapes [combinations, kernels].
    """
    style, product = table.style[None, :], table.kind[None, :] == 0
    k = np.maximum(np.where(style == 1, table.k / tp, table.k), 1.0)
    n = np.maximum(np.where(style == 0, table.n / tp, table.n), 1.0)
    m = np.maximum(rows, 1.0)
    weights = table.trained & (table.weight_bytes > 0)
    backward = np.where(weights, (1 / n + 1 / m) / 2, 1 / n)
    return (
        np.asarray(np.where(product, 1 + ramp / k, 1.0)),
        np.asarray(np.where(product, 1 + ramp * backward, 1.0)),
    )


def unaligned_factors(table: KernelTable, tp: Array, scores: bool) -> Array:
    """Time of products whose rows do not begin at 16 bytes, over that of others.

    Tensor cores read 8 numbers of 2 bytes at once; rows of other lengths take slower
    kernels. Fused attention pads its heads itself.
    Sources: NVIDIA, Matrix Multiplication Background, section 2; the factors: see
    :data:`_UNALIGNED`.

    Args:
        table: Kernels at the traced batch.
        tp: Shape [combinations, 1].
        scores: Whether attention is made of products.
    Returns:
        Shape [combinations, kernels].
    """
    style = table.style[None, :]
    k = np.where(style == 1, table.k / tp, table.k)
    n = np.where(style == 0, table.n / tp, table.n)
    odd = (k % _ALIGNED != 0) | (n % _ALIGNED != 0)
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


def padding(table: KernelTable, device: DeviceType, rows: Array, tp: Array) -> Array:
    """Computed over useful FLOPs, from output tiles of 128 x 128 on GPUs.

    CPUs show no such steps at the sizes that matter.

    Args:
        table: Kernels at the traced batch.
        device: On which they run.
        rows: Length of m. Shape [combinations, kernels].
        tp: Shape [combinations, 1].
    Returns:
        Shape [combinations, kernels].
    """
    if device.backend == "gloo":
        return np.ones((len(rows), len(table.k)))
    m = np.maximum(rows, 1.0)
    n = np.maximum(np.where(table.style[None, :] == 0, table.n / tp, table.n), 1.0)
    padded = _padded(m, 128) * _padded(n, 128) / (m * n)
    return np.asarray(np.where(table.kind[None, :] == 0, padded, 1.0))


@compiled
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
    table: KernelTable, device: DeviceType, rows: Array, tp: Array, ep: Array
) -> tuple[Array, Array]:
    """Time of products over that of their FLOPs alone, by tiles and waves.

    Forward makes m x n, the input's gradient m x k, the weight's k x n.

    Args:
        table: Kernels at the traced batch.
        device: With its number of processors; without it, tiles alone count.
        rows: Length of m. Shape [combinations, kernels].
        tp: Shape [combinations, 1]; likewise ep.
    Returns:
        Of forward and of backward; 1 where a kernel is no product. Shapes
        [combinations, kernels].
    """
    if device.processors is None or device.backend == "gloo":
        padded = padding(table, device, rows, tp)
        return padded, padded
    style = table.style[None, :]
    n = np.maximum(np.where(style == 0, table.n / tp, table.n), 1.0)
    k = np.maximum(np.where(style == 1, table.k / tp, table.k), 1.0)
    experts = np.where(table.expert_share > 0, ep, 1.0)
    forward, backward = np.ones((2, *rows.shape))
    _fill(
        np.maximum(rows, 1.0),
        np.ascontiguousarray(np.broadcast_to(n, rows.shape)),
        np.ascontiguousarray(np.broadcast_to(k, rows.shape)),
        np.maximum(table.batch[None, :] / experts, 1.0),
        table.kind == 0,
        table.trained & (table.weight_bytes > 0),
        float(device.processors),
        _TILES,
        forward,
        backward,
    )
    return forward, backward
