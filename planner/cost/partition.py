"""The cut of a chain of units into stages whose slowest stage is fastest.

The exact answer for a whole table of strategies at once: bisection on the bottleneck;
a greedy fill decides whether a bottleneck is reachable, or on mixed devices, where it
fails, a search of all starts in reach. Source: the linear partitioning
problem, Pinar and Aykanat 2004, "Fast optimal load balancing algorithms for 1D
partitioning", section 2 (probe with prefix sums and bisection).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled

__all__ = ["balanced_bounds"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

_ROUNDS = 26
#: Share of the bottleneck to which it is found.
_PRECISION = 1e-8


@compiled
def _fill(prefix: Array, types: Index, limit: float, bounds: Index) -> bool:
    """Give each stage as many units as fit under ``limit``; True if all are placed."""
    stages = len(types)
    units = prefix.shape[1] - 1
    start = 0
    bounds[0] = 0
    for stage in range(stages):
        kind = types[stage]
        last = units - (stages - stage - 1)
        target = prefix[kind, start] + limit
        low, high = start + 1, last
        while low < high:
            middle = (low + high + 1) // 2
            if prefix[kind, middle] <= target:
                low = middle
            else:
                high = middle - 1
        if prefix[kind, low] > target * (1 + 1e-12):
            return False
        start = low
        bounds[stage + 1] = start
    placed: bool = start == units
    return placed


@compiled
def _fill_mixed(prefix: Array, types: Index, limit: float, bounds: Index) -> bool:
    """As :func:`_fill`, for stages on devices of different types.

    Filling up each stage is then not always right: it may leave the next one, which
    must hold something, a unit that only a later device is fast enough for. So all
    starts are followed that are in reach.
    """
    stages, units = len(types), prefix.shape[1] - 1
    limit *= 1 + 1e-12
    reached = np.zeros((stages + 1, units + 1), dtype=np.bool_)
    reached[0, 0] = True
    for stage in range(stages):
        sums = prefix[types[stage]]
        for start in range(units):
            if not reached[stage, start]:
                continue
            for stop in range(start + 1, units + 1):
                if sums[stop] - sums[start] > limit:
                    break
                reached[stage + 1, stop] = True
    if not reached[stages, units]:
        return False
    bounds[stages] = units
    for stage in range(stages - 1, -1, -1):
        sums, stop = prefix[types[stage]], bounds[stage + 1]
        for start in range(stop - 1, -1, -1):
            if reached[stage, start] and sums[stop] - sums[start] <= limit:
                bounds[stage] = start
                break
    return True


@compiled
def _place(
    prefix: Array, types: Index, limit: float, bounds: Index, mixed: bool
) -> bool:
    if _fill(prefix, types, limit, bounds):
        return True
    if not mixed:
        return False
    placed: bool = _fill_mixed(prefix, types, limit, bounds)
    return placed


@compiled
def _balance(prefix: Array, types: Index, bounds: Index) -> None:
    stages = len(types)
    units = prefix.shape[1] - 1
    high = 0.0
    for kind in range(prefix.shape[0]):
        high = max(high, prefix[kind, units])
    low = 0.0
    mixed = bool((types != types[0]).any())
    if not mixed:
        # A stage is full at the mean at the latest with the unit that crosses it.
        sums = prefix[types[0]]
        low = sums[units] / stages * (1 - 1e-12)
        high = (low + (sums[1:] - sums[:-1]).max()) * (1 + 1e-9)
    trial = np.empty(stages + 1, dtype=np.int64)
    for _ in range(_ROUNDS):
        if high - low <= _PRECISION * high:
            break
        middle = 0.5 * (low + high)
        if _place(prefix, types, middle, trial, mixed):
            high = middle
            bounds[: stages + 1] = trial
        else:
            low = middle
    if not _place(prefix, types, high, bounds, mixed):
        for stage in range(stages + 1):
            bounds[stage] = stage * units // stages


@compiled
def _balance_all(
    prefix: Array, combo: Index, types: Index, stages: Index, bounds: Index
) -> None:
    for row in range(len(combo)):
        count = stages[row]
        _balance(prefix[:, combo[row]], types[row, :count], bounds[row])
        for stage in range(count + 1, bounds.shape[1]):
            bounds[row, stage] = bounds[row, count]


def balanced_bounds(seconds: Array, combo: Index, types: Index, stages: Index) -> Index:
    """Stage boundaries of many problems.

    Args:
        seconds: Of each unit on each device type. Shape [T, combinations, units].
        combo: Which combination each problem is about. Shape [problems].
        types: Device type of each stage; entries past a problem's stages are not
            read. Shape [problems, most stages].
        stages: Number of stages of each problem, at most units. Shape [problems].
    Returns:
        Unit at which each stage starts, then the number of units for all remaining
        entries. Shape [problems, most stages + 1].
    """
    prefix = np.zeros((*seconds.shape[:2], seconds.shape[2] + 1))
    np.cumsum(seconds, axis=2, out=prefix[:, :, 1:])
    bounds = np.zeros((len(combo), types.shape[1] + 1), dtype=np.int64)
    _balance_all(prefix, combo, types, stages, bounds)
    return bounds
