"""Tiles and waves: how much more than a product's FLOPs a GPU spends time on.

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

from planner.cost.kernel_table import KernelTable
from planner.schema.cluster import DeviceType
from planner.simulate.compiled import compiled

__all__ = ["padding", "tile_factors"]

Array = NDArray[np.float64]

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
