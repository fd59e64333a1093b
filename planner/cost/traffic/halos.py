"""Bytes and seconds of halos: what ranks that share samples send for convolutions.

    bytes = sum over dims of (before + behind) * N * C * (other local sizes) * b

for each convolution or pooling in forward, with the halos of the dims before among the
other sizes; as many come back in backward, but for layers that read nothing but inputs.
Nothing hides them. Samples are gathered whole before the first op that needs them so,
and gradients are reduced and scattered there.

Source: executors/strategies/halo.py; Oyama et al. 2020, arXiv 2007.12856, section 3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import Combinations
from planner.cost.kernels.blocks import BlockClasses
from planner.graph import Block, ModelGraph
from planner.schema.halo import best_split, halo_values
from planner.units import dtype_bytes

__all__ = ["halo_bytes", "halo_traffic"]

Array = NDArray[np.float64]


def halo_bytes(block: Block, factors: tuple[int, ...], element: int) -> tuple[int, int]:
    """Bytes that a rank sends for a block in forward and in backward, at the trace.

    Args:
        block: Of the model.
        factors: Shards along each spatial dimension.
        element: Bytes of a value.
    """
    sizes = [
        (
            layer.channels * halo_values(layer.windows, layer.sizes, factors) * element,
            layer.trained,
        )
        for layer in block.spatial
    ]
    forward = sum(size for size, _ in sizes)
    return forward, sum(size for size, trained in sizes if trained)


def halo_traffic(
    graph: ModelGraph,
    classes: BlockClasses,
    combos: Combinations,
    line: Array,
    samples: Array,
) -> tuple[Array, Array, Array]:
    """Traffic of every class of blocks under every combination.

    Args:
        graph: The model.
        classes: Its blocks.
        combos: Degrees and microbatches.
        line: Of a message to the next rank. Shape [combinations, 2, 2].
        samples: Activation bytes of whole samples over those of the trace. Shape
            [combinations].

    Returns:
        Seconds of forward and backward, bytes that a rank sends in both, and what it
        gathers in a forward. Shapes [combinations, classes].
    """
    shape = (len(combos), len(classes.blocks))
    seconds, sent, gathered = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    element = dtype_bytes(graph.dtype)
    for degree in np.unique(combos.cp[combos.cp > 1]).tolist():
        rows = np.flatnonzero(combos.cp == degree)
        factors = best_split(graph.spatial, degree) or (degree,)
        for index, block in enumerate(classes.blocks):
            for part in halo_bytes(block, factors, element):
                size = part * samples[rows]
                calls = sum(
                    factor > 1 and any(window.halo)
                    for layer in block.spatial
                    for factor, window in zip(factors, layer.windows, strict=False)
                )
                seconds[rows, index] += _messages(line[rows], calls, size)
                sent[rows, index] += size
            whole = block.sample_bytes * samples[rows]
            gathered[rows, index] = whole
            each = whole / degree
            hops = 2 * (degree - 1) * (block.sample_bytes > 0)
            seconds[rows, index] += _messages(line[rows], hops, hops * each)
            sent[rows, index] += hops * each
    return seconds, sent, gathered


def _messages(line: Array, calls: int, size_bytes: Array) -> Array:
    """Seconds of several messages one after the other, by the faster of two ways.

    Args:
        line: Fixed seconds and seconds per byte of each. Shape [n, 2, 2].
        calls: Number of messages.
        size_bytes: Of all together. Shape [n].
    """
    first, second = (calls * line[:, k, 0] + line[:, k, 1] * size_bytes for k in (0, 1))
    return np.minimum(first, second)
