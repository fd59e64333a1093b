"""Open tours: the order in which a pipeline passes through groups of devices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled

__all__ = ["EXACT_GROUPS", "open_tour"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Most groups for an exact tour: time and memory double with each further group.
EXACT_GROUPS = 12


@compiled
def _held_karp(edges: Array) -> tuple[float, Index]:
    """Find the exact tour, over subsets and last groups. Source: Held and Karp 1962."""
    count = len(edges)
    best = np.full((1 << count, count), np.inf)
    before = np.full((1 << count, count), -1, dtype=np.int64)
    for group in range(count):
        best[1 << group, group] = 0.0
    for subset in range(1, 1 << count):
        for last in range(count):
            here = best[subset, last]
            if here == np.inf:
                continue
            for following in range(count):
                if subset >> following & 1:
                    continue
                grown = subset | 1 << following
                total = here + edges[last, following]
                if total < best[grown, following]:
                    best[grown, following] = total
                    before[grown, following] = last
    subset = (1 << count) - 1
    last = int(np.argmin(best[subset]))
    total = best[subset, last]
    path = np.empty(count, dtype=np.int64)
    for place in range(count - 1, -1, -1):
        path[place] = last
        subset, last = subset & ~(1 << last), before[subset, last]
    return total, path


@compiled
def _length(edges: Array, path: Index) -> float:
    total = 0.0
    for place in range(1, len(path)):
        total += edges[path[place - 1], path[place]]
    return total


@compiled
def _nearest_first(edges: Array, start: int) -> Index:
    """Return the path from ``start`` that always goes on to the nearest group left."""
    count = len(edges)
    left = np.ones(count, dtype=np.bool_)
    path = np.empty(count, dtype=np.int64)
    here = start
    for place in range(count):
        path[place] = here
        left[here] = False
        nearest = -1
        for group in range(count):
            if left[group] and (
                nearest < 0 or edges[here, group] < edges[here, nearest]
            ):
                nearest = group
        here = nearest
    return path


@compiled
def _two_opt(edges: Array, path: Index) -> None:
    """Reverse runs of the path, in place, until none makes it shorter."""
    count = len(path)
    better = True
    while better:
        better = False
        for first in range(count - 1):
            for last in range(first + 1, count):
                change = 0.0
                if first > 0:
                    ahead = path[first - 1]
                    change += edges[ahead, path[last]] - edges[ahead, path[first]]
                if last < count - 1:
                    after = path[last + 1]
                    change += edges[path[first], after] - edges[path[last], after]
                if change < -1e-12 * (1.0 + abs(edges[path[first], path[last]])):
                    path[first : last + 1] = path[first : last + 1][::-1].copy()
                    better = True


@compiled
def open_tour(edges: Array) -> tuple[float, Index]:
    """Find the shortest path through all groups, which does not return.

    Exact up to :data:`EXACT_GROUPS`; beyond, the best of nearest-first paths from
    every start, each improved by reversing runs.

    Args:
        edges: Symmetric distances. Shape [k, k].
    Returns:
        Its length, and the groups in order. Shape [k].
    """
    count = len(edges)
    if count <= EXACT_GROUPS:
        return _held_karp(edges)
    shortest, kept = np.inf, np.arange(count)
    for start in range(count):
        path = _nearest_first(edges, start)
        _two_opt(edges, path)
        length = _length(edges, path)
        if length < shortest:
            shortest, kept = length, path
    return shortest, kept
