"""Free devices over time: breakpoints, and plans that are added and taken away.

A profile has breakpoints ``times`` and the devices that are ``free`` from each to the
next, the last without end. The first breakpoint is now.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import inner

__all__ = ["Profile", "add_runs", "find", "merge", "merge_runs", "split", "without"]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


class Profile(NamedTuple):
    """Breakpoints, and the devices that are free from each to the next."""

    times: Floats
    free: Index


@inner
def find(times: Floats, count: int, at: float) -> int:
    """Return the first breakpoint that is not before a time."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if times[middle] >= at:
            high = middle
        else:
            low = middle + 1
    return low


@inner
def split(times: Floats, free: Index, count: int, at: float) -> int:
    """Make a breakpoint of a time, if it is none; return the number of breakpoints."""
    where = find(times, count, at)
    if where < count and times[where] == at:
        return count
    for index in range(count, where, -1):
        times[index], free[index] = times[index - 1], free[index - 1]
    times[where] = at
    free[where] = free[where - 1]
    return count + 1


@inner
def _add(
    times: Floats, free: Index, count: int, start: float, end: float, devices: int
) -> int:
    """Add devices from a time to another; return the number of breakpoints."""
    if devices == 0 or end <= start:
        return count
    count = split(times, free, count, start)
    count = split(times, free, count, end)
    for index in range(find(times, count, start), find(times, count, end)):
        free[index] += devices
    return count


@inner
def add_runs(
    times: Floats,
    free: Index,
    count: int,
    starts: Floats,
    devices: Index,
    runs: int,
    sign: int,
) -> int:
    """Add a plan's devices, or take them away; return the number of breakpoints."""
    for run in range(runs - 1):
        count = _add(
            times, free, count, starts[run], starts[run + 1], sign * devices[run]
        )
    return count


@inner
def merge(times: Floats, free: Index, count: int, at: float) -> int:
    """Drop a breakpoint at which nothing changes; return how many are left."""
    where = find(times, count, at)
    if where == 0 or where >= count or free[where] != free[where - 1]:
        return count
    for index in range(where, count - 1):
        times[index], free[index] = times[index + 1], free[index + 1]
    return count - 1


@inner
def merge_runs(
    times: Floats, free: Index, count: int, starts: Floats, runs: int
) -> int:
    """Drop breakpoints of a plan at which nothing changes; return how many are left."""
    for run in range(runs):
        count = merge(times, free, count, starts[run])
    return count


@inner
def without(
    profile: Profile,
    count: int,
    starts: Floats,
    devices: Index,
    runs: int,
    until: float,
    found: Profile,
) -> int:
    """Write a profile without a plan, up to a time; return its breakpoints there.

    Args:
        profile: The profile.
        count: Number of its breakpoints.
        starts: Beginnings of the plan's runs.
        devices: Devices in them.
        runs: Number of them.
        until: The time.
        found: The profile without the plan; written.
    """
    times, free = profile
    index, run, kept = 0, 0, 0
    base, held = 0, 0
    while True:
        at = times[index] if index < count else np.inf
        if run < runs:
            at = min(at, starts[run])
        if at >= until:
            return kept
        if index < count and times[index] == at:
            base = free[index]
            index += 1
        if run < runs and starts[run] == at:
            held = devices[run]
            run += 1
        if kept == 0 or found.free[kept - 1] != base + held:
            found.times[kept], found.free[kept] = at, base + held
            kept += 1
