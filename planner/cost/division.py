"""What combinations of degrees leave of a kernel on one device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.efficiency import rows_of
from planner.cost.kernel_table import KernelTable

__all__ = ["Division", "divide"]

Array = NDArray[np.float64]


def _byte_shares(table: KernelTable, tp: Array, stream: Array) -> Array:
    """Share of a kernel's activation bytes that one tp rank moves. [combos, kernels].

    A colwise product reads its whole input and writes 1/tp of its output, a rowwise
    one the other way round.
    """
    into = table.k / np.maximum(table.k + table.n, 1)
    one = np.ones((len(tp), len(table.k)))
    shares = np.stack(
        [
            into + (1 - into) / tp,
            into / tp + (1 - into),
            one / tp,
            one / stream,
            one,
        ]
    )
    rows = np.arange(len(tp))[:, None]
    return np.asarray(
        shares[table.style[None, :], rows, np.arange(len(table.k))[None, :]]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What combinations of degrees leave of a kernel. Shapes [combinations, kernels].

    Attributes:
        scale: Tokens of one device over those of the trace. Shape [combinations, 1].
        tp: Shape [combinations, 1].
        stream: Ranks that share the stream between tp's layers. Likewise.
        work: Ranks that share the FLOPs.
        share: Of the activation bytes.
        weights: Bytes of weights on one device.
        rows: Length of a product's first dimension, m.
    """

    scale: Array
    tp: Array
    stream: Array
    work: Array
    share: Array
    weights: Array
    rows: Array


def divide(
    table: KernelTable,
    tokens: Array,
    tp: Array,
    cp: Array,
    ep: Array,
    sequence_parallel: Array,
) -> Division:
    """Divide kernels by degrees.

    Args:
        table: Kernels at the traced batch.
        tokens: Microbatch size over the traced batch. Shape [combinations].
        tp: Shape [combinations]; likewise cp, ep.
        sequence_parallel: 0 or 1. Shape [combinations].
    """
    tp, cp, ep = (x[:, None].astype(float) for x in (tp, cp, ep))
    scale = tokens[:, None] / cp
    stream = np.where(sequence_parallel[:, None] > 0, tp, 1.0)
    style = table.style[None, :]
    return Division(
        scale=scale,
        tp=tp,
        stream=stream,
        work=np.where(style <= 2, tp, np.where(style == 3, stream, 1.0)),
        share=_byte_shares(table, tp, stream),
        weights=table.weight_bytes
        * (1 - table.expert_share + table.expert_share / ep)
        / np.where(style <= 1, tp, 1.0),
        rows=rows_of(table, scale, ep),
    )
