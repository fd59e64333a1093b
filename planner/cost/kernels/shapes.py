"""Shapes that degrees leave of kernels, and what odd ones cost.

Source: NVIDIA, Matrix Multiplication Background User's Guide, section "Tile
quantization", for the padding of products to whole tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.kernels.blocks import KernelTable
from planner.schema.cluster import DeviceType

__all__ = ["Division", "divide", "padding", "unaligned_factors"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Kernels divided by combinations of degrees. Shapes [combinations, kernels].

    Attributes:
        scale: Tokens of one device over those of the trace. Shape [combinations, 1], or
            [combinations, kernels] where they differ.
        tp: Tensor parallel degree. Shape [combinations, 1].
        cp: Ranks that share a sequence. Likewise.
        stream: Ranks that share the stream between tp's layers. Likewise.
        work: Ranks that share the FLOPs.
        share: Share of the activation bytes.
        weights: Bytes of weights on one device.
        m: Length of a product's first dimension, at least 1; likewise n, k. A device
            that has 1/ep of the experts gets ep ranks' tokens.
        products: Products of equal shape, at least 1.
        scores: Attention scores of one kernel.
        hops: Kernels that attention is cut into by a ring, one after the other; 1
            without one. Shape [combinations, 1].
    """

    scale: Array
    tp: Array
    cp: Array
    stream: Array
    work: Array
    share: Array
    weights: Array
    m: Array
    n: Array
    k: Array
    products: Array
    scores: Array
    hops: Array


def divide(
    table: KernelTable,
    tokens: Array,
    degrees: Sequence[Array | Index],
    sequence_parallel: Array | Index,
    *,
    ring: bool = True,
    whole: NDArray[np.bool_] | None = None,
) -> Division:
    """Divide kernels by degrees.

    Args:
        table: Kernels at the traced batch.
        tokens: Microbatch size over the traced batch. Shape [combinations].
        degrees: Of tp, cp and ep. Shapes [combinations].
        sequence_parallel: 0 or 1. Shape [combinations].
        ring: Whether keys of a sequence that cp divides come one rank's after the
            other; else each rank has whole sequences of some heads.
        whole: Kernels that every rank of cp runs alike; None for none. Shape [kernels].
    """
    tp, cp, ep = (np.asarray(x[:, None], dtype=float) for x in degrees)
    ranks = cp if whole is None or not whole.any() else np.where(whole, 1.0, cp)
    scale = tokens[:, None] / ranks
    stream = np.where(sequence_parallel[:, None] > 0, tp, 1.0)
    style = table.style[None, :]
    # Experts that are modules of their own have a kernel each, and see as many tokens.
    grouped = table.expert & (table.batch > 1)
    # A colwise product reads its whole input and writes 1/tp of its output, a rowwise
    # one the other way round.
    into = table.k / np.maximum(table.k + table.n, 1)
    shares = (into + (1 - into) / tp, into / tp + (1 - into), 1 / tp, 1 / stream)
    both = style == 5
    scores = np.where(table.kind == 1, table.batch * table.m * table.n, 0.0)
    inside = np.where(both, tp**2, np.where(style <= 2, tp, 1.0))
    return Division(
        scale=scale,
        tp=tp,
        cp=cp,
        stream=stream,
        work=np.where(style == 3, stream, inside),
        share=np.select(
            [*(style == place for place in range(4)), both], (*shares, 1 / tp), 1.0
        ),
        weights=table.weight_bytes
        * np.where(table.expert, 1 / ep, 1.0)
        / np.where(both, tp**2, np.where(style <= 1, tp, 1.0)),
        m=np.maximum(
            table.m
            * scale
            * np.where(grouped, ep, 1.0)
            / np.where(style == 3, stream, 1.0),
            1.0,
        ),
        n=np.maximum(np.where((style == 0) | both, table.n / tp, table.n), 1.0),
        k=np.maximum(np.where((style == 1) | both, table.k / tp, table.k), 1.0),
        products=np.maximum(
            table.batch / np.where(grouped, ep, 1.0) / np.where(style == 2, tp, 1.0),
            1.0,
        ),
        scores=scores * scale / inside,
        hops=cp if ring else np.ones_like(cp),
    )


#: Numbers of 2 bytes in 16.
_ALIGNED = 8

#: Time over that of aligned products where rows begin at 4 or 8 bytes, and where they
#: begin at 2, on Ampere and before, and on newer devices. On an H200 products of 49
#: shapes ran at 260 and at 96 to 150 TFLOP/s, aligned ones at 650 to 700 (`python -m
#: benchmarks.gpu_kernels`, 2026-11-26): cuBLAS takes Ampere's and Turing's kernels.
#: On A100 a vocabulary of 50,304 instead of 50,257 is said to have made nanoGPT about
#: 25 % faster (A. Karpathy, 2023, not opened again), of whose FLOPs the head's products
#: are a quarter; half of that at 4 bytes, as on the H200.
_UNALIGNED = {False: (1.5, 3.0), True: (2.5, 5.0)}

#: BLOOM's trials on 40 hosts with heads of 150 take 221 s, those with heads of 216 and
#: 7 % fewer weights 160 s (bigscience, chronicles-prequel.md, 2022): scores, which are
#: 2.4 % of the FLOPs. Its 104B with heads of 145, which the figure was not taken from,
#: goes from 32 % too fast to 7 % too slow.
_UNALIGNED_SCORES = 10.0


def unaligned_factors(
    table: KernelTable, part: Division, *, scores: bool, newer: bool = False
) -> Array:
    """Time of products whose rows do not begin at 16 bytes, over that of others.

    Tensor cores read 8 numbers of 2 bytes at once; rows of other lengths take slower
    kernels. Fused attention pads its heads itself.
    Sources: NVIDIA, Matrix Multiplication Background, section 2; the factors: see
    :data:`_UNALIGNED`.

    Args:
        table: Kernels at the traced batch.
        part: What a device has of them.
        scores: Whether attention is made of products.
        newer: Whether the device is newer than Ampere.
    Returns:
        Shape [combinations, kernels].
    """
    slower, slowest = _UNALIGNED[newer]
    odd = (part.k % 2 != 0) | (part.n % 2 != 0)
    product = np.where(table.kind[None, :] == 0, np.where(odd, slowest, slower), 1.0)
    if scores:
        product = np.where(table.kind[None, :] == 1, _UNALIGNED_SCORES, product)
    aligned = (part.k % _ALIGNED == 0) & (part.n % _ALIGNED == 0)
    return np.asarray(np.where(aligned, 1.0, product))


def _padded(size: Array, tile: int) -> Array:
    """Size rounded up to whole tiles; small sizes to the next multiple of 16."""
    small = np.ceil(size / 16) * 16
    large = np.ceil(size / tile) * tile
    return np.where(size < tile, small, large)


def padding(table: KernelTable, part: Division, device: DeviceType) -> Array:
    """Computed over useful FLOPs, from output tiles of 128 x 128 on GPUs.

    CPUs show no such steps at the sizes that matter.

    Returns:
        Shape [combinations, kernels].
    """
    if device.backend == "gloo":
        return np.ones_like(part.m)
    padded = _padded(part.m, 128) * _padded(part.n, 128) / (part.m * part.n)
    return np.asarray(np.where(table.kind[None, :] == 0, padded, 1.0))
