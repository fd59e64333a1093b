"""Gradients of weights: what they are made from, and what summing them up moves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.division import Division
from planner.cost.kernel_table import KERNEL_KINDS, KernelTable

__all__ = ["summed_bytes", "weight_gradient_bytes"]

Array = NDArray[np.float64]


def summed_bytes(table: KernelTable, part: Division, passes: float) -> Array:
    """Bytes that adding a microbatch's gradients to the sum moves, as traced.

    Whatever the number of tokens, so that small microbatches pay for it. Kernels of
    their own do it, unless products of weight gradients add to the sum themselves.
    Shape [combinations, kernels].

    Args:
        table: Kernels at the traced batch.
        part: What a device has of them.
        passes: ``gradient_passes`` of the recipe.
    """
    return np.asarray(part.weights * np.where(table.trained, passes, 0.0))


def weight_gradient_bytes(table: KernelTable, element: float, tp: Array) -> Array:
    """Gradients from which weight gradients are made. Shape [combinations, kernels].

    Of everything that reads trained weights: the gradient of its output, which is
    what torch keeps between the two halves of a split backward.
    Source: torch.distributed.pipelining._backward, stage_backward_input, torch 2.13.

    Args:
        table: Kernels at the traced batch.
        element: Bytes of an activation as traced.
        tp: Shape [combinations].
    """
    product = (table.kind != KERNEL_KINDS.index("attention")) & (
        table.kind != KERNEL_KINDS.index("memory")
    )
    # What is no product writes as much as it reads.
    output = np.where(
        product, table.batch * table.m * table.n * element, table.forward_bytes / 2
    )
    kept = np.where(table.trained, table.count * output, 0.0)
    divided = (table.style == 0) | (table.style == 2)
    return np.asarray(np.where(divided, kept / tp[:, None], kept))
