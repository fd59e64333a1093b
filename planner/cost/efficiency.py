"""How shapes of kernels keep a device from its peak, each a factor or a count."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.constants import DeviceConstants
from planner.cost.kernel_table import KernelTable

__all__ = [
    "head_share",
    "inner_factors",
    "rows_of",
    "score_elements",
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


def rows_of(table: KernelTable, scale: Array, ep: Array) -> Array:
    """Length of m. A device that has 1/ep of the experts gets ep ranks' tokens.

    Args:
        table: Kernels at the traced batch.
        scale: Tokens of one device over those of the trace. Shape [combinations, 1].
        ep: Shape [combinations, 1].
    Returns:
        Shape [combinations, kernels].
    """
    return np.asarray(table.m * scale * np.where(table.expert_share > 0, ep, 1.0))


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


def score_elements(table: KernelTable, scale: Array, tp: Array) -> Array:
    """Attention scores of one kernel on one device. Shape [combinations, kernels].

    Args:
        table: Kernels at the traced batch.
        scale: Tokens of one device over those of the trace. Shape [combinations, 1].
        tp: Shape [combinations, 1].
    """
    heads = np.where(table.style[None, :] <= 2, tp.astype(float), 1.0)
    whole = np.where(table.kind == 1, table.batch * table.m * table.n, 0.0)
    return np.asarray(whole * scale / heads)
