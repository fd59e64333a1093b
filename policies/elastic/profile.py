"""Free devices over time: breakpoints, and plans that are added and taken away.

A profile has breakpoints ``times`` and the devices that are ``free`` from each to the
next, the last without end. The first breakpoint is now.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import inlined, inner

__all__ = ["Profile", "find", "merge", "split", "with_plan"]

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
def merge(times: Floats, free: Index, count: int, at: float) -> int:
    """Drop a breakpoint at which nothing changes; return how many are left."""
    where = find(times, count, at)
    if where == 0 or where >= count or free[where] != free[where - 1]:
        return count
    for index in range(where, count - 1):
        times[index], free[index] = times[index + 1], free[index + 1]
    return count - 1


@inlined
def with_plan(
    profile: Profile,
    count: int,
    starts: Floats,
    devices: Index,
    runs: int,
    sign: int,
    until: float,
    found: Profile,
) -> int:
    """Write a profile with a plan's devices, up to a time; return its breakpoints.

    Args:
        profile: The profile; the free devices change at each breakpoint.
        count: Number of its breakpoints.
        starts: Beginnings of the plan's runs.
        devices: Devices in them.
        runs: Number of them.
        sign: 1 to add the devices, -1 to take them away.
        until: The time.
        found: The profile with them; written.
    """
    times, free = profile
    index, kept, held, last = 0, 0, 0, find(times, count, until)
    for run in range(runs + 1):
        end = last
        if run < runs and starts[run] < until:
            end = find(times, last, starts[run])
        # Slices spare a look at each index for being below 0.
        copied_at, copied = found.times[kept:], found.free[kept:]
        from_at, from_free = times[index:end], free[index:end]
        for at in range(len(from_at)):
            copied_at[at] = from_at[at]
        for at in range(len(from_free)):
            copied[at] = from_free[at] + held
        kept, index = kept + end - index, end
        if run == runs or starts[run] >= until:
            break
        held = sign * devices[run]
        if index < last and times[index] == starts[run]:
            index += 1
        value = free[index - 1] + held
        if kept == 0 or found.free[kept - 1] != value:
            found.times[kept], found.free[kept] = starts[run], value
            kept += 1
    return kept
