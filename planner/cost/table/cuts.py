"""The cut of a chain of units into stages whose slowest stage is fastest.

The exact answer for a whole table of problems at once: bisection on the bottleneck; a
greedy fill decides whether a bottleneck is reachable and, if it is not, which is the
next one worth trying. On mixed devices, where the greedy fill may fail wrongly, a
dynamic program finds the bottleneck. Source: the linear partitioning problem, Pinar and
Aykanat 2004, "Fast optimal load balancing algorithms for 1D partitioning", section 2
(probe with prefix sums and bisection) and its exact bisection (bounds moved to
bottlenecks that a cut can have).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled, inner

__all__ = ["balanced_bounds"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


_ROUNDS = 26

#: Rounds of bisection that only bound the bottleneck from above.
_ROUGH_ROUNDS = 10

#: Share of the bottleneck to which it is found.
_PRECISION = 1e-8

#: What :func:`_fill` says when all units are placed.
_PLACED = -1.0


# Loops in place of array expressions, which numba takes seconds to compile.
@inner
def _fill(
    prefix: Array, combo: int, types: Index, stages: int, limit: float, bounds: Index
) -> float:
    """Give each stage as many units as fit under ``limit``.

    Returns:
        :data:`_PLACED` if all units found a stage; otherwise the least limit under
        which some stage would take a unit more, below which nothing changes.
    """
    units = prefix.shape[2] - 1
    start = 0
    bounds[0] = 0
    following = np.inf
    for stage in range(stages):
        sums = prefix[types[stage], combo]
        last = units - (stages - stage - 1)
        target = sums[start] + limit
        low, high = start + 1, last
        while low < high:
            middle = (low + high + 1) // 2
            if sums[middle] <= target:
                low = middle
            else:
                high = middle - 1
        if sums[low] > target * (1 + 1e-12):
            least: float = min(following, sums[low] - sums[start])
            return least
        if low < last:
            following = min(following, sums[low + 1] - sums[start])
        start = low
        bounds[stage + 1] = start
    return _PLACED if start == units else following


@inner
def _fill_mixed(
    prefix: Array, combo: int, types: Index, stages: int, limit: float, bounds: Index
) -> bool:
    """Place all units under ``limit`` in stages on devices of different types.

    Filling up each stage is then not always right: it may leave the next one, which
    must hold something, a unit that only a later device is fast enough for. So all
    starts are followed that are in reach.
    """
    units = prefix.shape[2] - 1
    limit *= 1 + 1e-12
    reached = np.zeros((stages + 1, units + 1), dtype=np.bool_)
    reached[0, 0] = True
    for stage in range(stages):
        sums = prefix[types[stage], combo]
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
        sums, stop = prefix[types[stage], combo], bounds[stage + 1]
        for start in range(stop - 1, -1, -1):
            if reached[stage, start] and sums[stop] - sums[start] <= limit:
                bounds[stage] = start
                break
    return True


@inner
def _least_bottleneck(
    prefix: Array, combo: int, types: Index, stages: int, most: float
) -> float:
    """Seconds of the slowest stage of the best cut on devices of different types.

    By stage and number of units placed so far: a stage grows backward until it alone
    is slower than the best cut found for that number.

    Args:
        prefix: Seconds of all units before each. Shape [T, combinations, units + 1].
        combo: Which combination.
        types: Device type of each stage.
        stages: How many.
        most: Bottleneck of some cut.
    """
    units = prefix.shape[2] - 1
    above = most * (1 + 1e-9)
    least = np.full((2, units + 1), np.inf)
    least[0, 0] = 0.0
    for stage in range(stages):
        sums = prefix[types[stage], combo]
        before, after = least[stage % 2], least[1 - stage % 2]
        after[:] = np.inf
        for stop in range(stage + 1, units - (stages - stage - 1) + 1):
            best = above
            for start in range(stop - 1, stage - 1, -1):
                own = sums[stop] - sums[start]
                if own >= best:
                    break
                best = min(best, max(own, before[start]))
            if best < above:
                after[stop] = best
    found: float = min(most, least[stages % 2, units])
    return found


@inner
def _even_out(sums: Array, stages: int, limit: float, bounds: Index) -> None:
    """Move boundaries so that stages are alike, none slower than ``limit``.

    A greedy fill makes the first stages full and the last ones nearly empty. Here each
    stage ends as near as it can to its share of what is left, but not before the rest
    fits into the stages behind it.

    Args:
        sums: Seconds of all units before each. Shape [units + 1].
        stages: How many.
        limit: Seconds that no stage may exceed; some cut keeps to it.
        bounds: Boundaries of such a cut; written to.
    """
    units = len(sums) - 1
    # At first, where each stage must start at the earliest.
    for stage in range(stages - 1, 0, -1):
        start = bounds[stage + 1] - 1
        floor = sums[bounds[stage + 1]] - limit * (1 + 1e-12)
        while start > stage and sums[start - 1] >= floor:
            start -= 1
        bounds[stage] = start
    for stage in range(stages - 1):
        start = bounds[stage]
        share = (sums[units] - sums[start]) / (stages - stage)
        most = units - (stages - stage - 1)
        stop = max(start + 1, bounds[stage + 1])
        while stop < most and sums[stop + 1] - sums[start] <= limit * (1 + 1e-12):
            over, under = sums[stop + 1] - sums[start], sums[stop] - sums[start]
            if over - share > share - under:
                break
            stop += 1
        bounds[stage + 1] = stop


@inner
def _balance_equal(
    prefix: Array, combo: int, types: Index, stages: int, bounds: Index
) -> bool:
    """Bisect for stages on devices of one type, skipping limits that change nothing.

    A stage is full at the mean at the latest with the unit that crosses it, which
    bounds the bottleneck from above. Each fill that fails names the next limit worth
    trying, each that succeeds has a slowest stage no slower than the limit.
    """
    sums = prefix[types[0], combo]
    mean, largest = sums[-1] / stages, 0.0
    for unit in range(len(sums) - 1):
        largest = max(largest, sums[unit + 1] - sums[unit])
    low, high = max(mean, largest) * (1 - 1e-12), (mean + largest) * (1 + 1e-9)
    for _ in range(_ROUNDS):
        if high - low <= _PRECISION / 2 * high:
            break
        middle = 0.5 * (low + high)
        following = _fill(prefix, combo, types, stages, middle, bounds)
        if following == _PLACED:
            slowest = 0.0
            for stage in range(stages):
                slowest = max(slowest, sums[bounds[stage + 1]] - sums[bounds[stage]])
            high = min(middle, slowest)
        else:
            low = max(middle, following * (1 - 1e-12))
    # A little above the bottleneck, where rounding of equal sums does not matter.
    limit = high * (1 + _PRECISION / 2)
    if _fill(prefix, combo, types, stages, limit, bounds) != _PLACED:
        return False
    _even_out(sums, stages, limit, bounds)
    return True


@inner
def _balance_mixed(
    prefix: Array, combo: int, types: Index, stages: int, bounds: Index
) -> bool:
    """Bound the bottleneck by greedy fills, then find the least."""
    low, high = 0.0, 0.0
    for kind in range(len(prefix)):
        high = max(high, prefix[kind, combo, -1])
    for _ in range(_ROUGH_ROUNDS):
        middle = 0.5 * (low + high)
        if _fill(prefix, combo, types, stages, middle, bounds) == _PLACED:
            high = middle
        else:
            low = middle
    limit = _least_bottleneck(prefix, combo, types, stages, high)
    # A little above the bottleneck, where rounding of equal sums does not matter.
    limit *= 1 + _PRECISION / 2
    placed = _fill(prefix, combo, types, stages, limit, bounds) == _PLACED
    return placed or _fill_mixed(prefix, combo, types, stages, limit, bounds)


@compiled
def _balance_all_equal(
    prefix: Array, combo: Index, types: Index, stages: Index, bounds: Index
) -> None:
    for row in range(len(combo)):
        problem = (prefix, combo[row], types[row], stages[row], bounds[row])
        _finish(_balance_equal(*problem), stages[row], prefix.shape[2] - 1, bounds[row])


@compiled
def _balance_all_mixed(
    prefix: Array, combo: Index, types: Index, stages: Index, bounds: Index
) -> None:
    for row in range(len(combo)):
        problem = (prefix, combo[row], types[row], stages[row], bounds[row])
        _finish(_balance_mixed(*problem), stages[row], prefix.shape[2] - 1, bounds[row])


@inner
def _finish(placed: bool, stages: int, units: int, bounds: Index) -> None:
    """Pad the boundaries; as many units each if no cut was found."""
    for stage in range(stages + 1):
        if not placed:
            bounds[stage] = stage * units // stages
    for stage in range(stages + 1, len(bounds)):
        bounds[stage] = units


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
    other = types != types[:, :1]
    mixed = (other & (np.arange(types.shape[1]) < stages[:, None])).any(axis=1)
    # Apart, so that what only mixed devices need is compiled only for them.
    for rows, balance in ((~mixed, _balance_all_equal), (mixed, _balance_all_mixed)):
        if rows.any():
            found = bounds[rows]
            balance(prefix, combo[rows], types[rows], stages[rows], found)
            bounds[rows] = found
    return bounds
