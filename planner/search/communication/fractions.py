"""Parts of a tensor for ranks of unlike bandwidth, where each part's rank sums it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError

__all__ = ["balanced_fractions", "balanced_parts"]


def balanced_fractions(bandwidth: Sequence[float | None]) -> NDArray[np.float64]:
    """Return the parts for which the slowest rank is fastest.

    A rank that sums a part ``w`` of a tensor sends ``1 + (p - 2) w`` of it, and gets
    as much. Ranks that could be done before the others get more; one too slow for any
    part sums none.

    Args:
        bandwidth: Bytes/s of each rank, 0 if it is to sum none; None for the mean of
            the others.
    Returns:
        Parts, which add up to 1. Shape [ranks].
    Raises:
        StrategyError: If a bandwidth is negative or no rank may sum.

    Source: Ryabinin et al. 2021, Moshpit SGD, arXiv 2103.03239, appendix on load
    balancing: max_i (1 + (p - 2) w_i) / b_i.
    """
    known = [value for value in bandwidth if value is not None and value > 0]
    mean = float(np.mean(known)) if known else 1.0
    rates = np.array([mean if value is None else value for value in bandwidth], float)
    if not len(rates) or not np.isfinite(rates).all() or rates.min() < 0:
        raise StrategyError(f"bandwidth={tuple(bandwidth)}; give numbers, 0 or more")
    if not rates.any():
        raise StrategyError(
            f"bandwidth={tuple(bandwidth)}: no rank can sum; give one above 0"
        )
    if len(rates) <= 2:
        return np.asarray((rates > 0) / np.count_nonzero(rates))
    # Seconds t of the k fastest: the sum over them of (t b - 1) / (p - 2) is 1.
    order = np.argsort(-rates, kind="stable")
    fast = rates[order]
    k = np.arange(1, len(rates) + 1)
    seconds = (len(rates) - 2 + k) / np.cumsum(fast)
    takes_part = seconds * fast > 1
    count = int(np.flatnonzero(takes_part)[-1]) + 1
    parts = np.zeros(len(rates))
    parts[order[:count]] = (seconds[count - 1] * fast[:count] - 1) / (len(rates) - 2)
    return np.asarray(parts / parts.sum())


def balanced_parts(
    size: int, bandwidth: Sequence[float | None], smallest: int = 0
) -> tuple[int, ...]:
    """Return numbers of elements by :func:`balanced_fractions`, rounded.

    Args:
        size: Elements of the tensor.
        bandwidth: As there.
        smallest: Fewer elements are not worth a rank's while: it gets none, unless all
            would.
    """
    parts = balanced_fractions(bandwidth)
    kept = parts * size >= smallest
    if kept.any():
        parts = np.where(kept, parts, 0.0)
    exact = parts / parts.sum() * size
    whole = np.floor(exact).astype(int)
    rest = size - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:rest]] += 1
    return tuple(int(value) for value in whole)
