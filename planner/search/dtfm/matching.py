"""Matching of two groups of devices so that the slowest pair is as fast as possible."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled

__all__ = ["bottleneck_matching"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@compiled
def _augmented(
    weights: Array, limit: float, row: int, partner: Index, seen: NDArray[np.bool_]
) -> bool:
    """Find a column for ``row`` over edges up to ``limit``: Kuhn's augmenting path.

    Depth-first without recursion: ``column[d]`` is the column of the row at depth d.
    """
    members = len(weights)
    rows = np.empty(members + 1, dtype=np.int64)
    column = np.empty(members + 1, dtype=np.int64)
    rows[0], column[0], depth = row, -1, 0
    while depth >= 0:
        here = rows[depth]
        taken = column[depth] + 1
        while taken < members and (seen[taken] or weights[here, taken] > limit):
            taken += 1
        if taken == members:
            depth -= 1
            continue
        seen[taken] = True
        column[depth] = taken
        if partner[taken] < 0:
            while depth >= 0:
                partner[column[depth]] = rows[depth]
                depth -= 1
            return True
        depth += 1
        rows[depth], column[depth] = partner[taken], -1
    return False


@compiled
def _is_perfect(weights: Array, limit: float, partner: Index) -> bool:
    """Return True if edges up to ``limit`` match all rows; fills ``partner``."""
    members = len(weights)
    partner[:] = -1
    seen = np.zeros(members, dtype=np.bool_)
    for row in range(members):
        seen[:] = False
        if not _augmented(weights, limit, row, partner, seen):
            return False
    return True


@compiled
def bottleneck_matching(weights: Array) -> tuple[float, Index]:
    """Find the perfect matching with the smallest largest weight.

    Bisection over the sorted weights, from the bound that each row and each column
    needs at least its own smallest.

    Args:
        weights: Weights between two groups of equal size. Shape [m, m].
    Returns:
        The largest weight used; and the column of each row. Shape [m].
    """
    members = len(weights)
    bound = -np.inf
    for member in range(members):
        bound = max(bound, weights[member].min(), weights[:, member].min())
    partner = np.empty(members, dtype=np.int64)
    limit = bound
    if not _is_perfect(weights, bound, partner):
        steps = np.unique(weights)
        low, high = int(np.searchsorted(steps, bound)) + 1, len(steps) - 1
        while low < high:
            middle = (low + high) // 2
            if _is_perfect(weights, steps[middle], partner):
                high = middle
            else:
                low = middle + 1
        limit = steps[low]
        _is_perfect(weights, limit, partner)
    column = np.empty(members, dtype=np.int64)
    for taken in range(members):
        column[partner[taken]] = taken
    return limit, column
