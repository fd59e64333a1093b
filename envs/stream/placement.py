"""Which hosts a job is given: best fit that minds the switches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.stream.tables import StreamTables
from planner.simulate.compiled import compiled

__all__ = ["place"]

Index = NDArray[np.int64]


@compiled
def _enough(tables: StreamTables, free: Index, choice: int, host: int) -> bool:
    """Whether a host is of the shape's kind and has as many free devices."""
    alike = tables.kind_of_host[host] == tables.kinds[choice]
    return bool(alike and free[host] >= tables.per_host[choice])


@compiled
def _tightest_switch(tables: StreamTables, free: Index, choice: int, level: int) -> int:
    """Of a level, the switch that joins enough hosts and is left the fullest, or -1."""
    count = len(free)
    best, least = -1, 1 << 60
    for switch in range(count):
        members, left = 0, 0
        for host in range(count):
            joined = tables.switches[level, host] == switch
            if joined and _enough(tables, free, choice, host):
                members += 1
                left += free[host]
        if members >= tables.hosts[choice] and left < least:
            best, least = switch, left
    return best


@compiled
def _tightest_host(
    tables: StreamTables,
    free: Index,
    choice: int,
    level: int,
    switch: int,
    given: Index,
) -> int:
    """Of one switch, the host that is not given yet and is left the fullest."""
    best, least = -1, 1 << 60
    for host in range(len(free)):
        taken = tables.switches[level, host] != switch
        for other in given:
            taken = taken or other == host
        if not taken and free[host] < least and _enough(tables, free, choice, host):
            best, least = host, free[host]
    return best


@compiled
def place(tables: StreamTables, free: Index, choice: int, given: Index) -> int:
    """Hosts for a job of a candidate shape.

    Under the innermost level at which a switch joins enough hosts, the switch whose
    hosts have the fewest free devices; under it the hosts with the fewest free devices
    that are enough, so that the largest holes stay. Ties go to lower numbers.

    Args:
        tables: Of the network.
        free: Free devices of each host. Shape [hosts].
        choice: Index of the shape.
        given: Filled in with the hosts, then -1. Shape [most hosts].
    Returns:
        The level at which they meet, 0 for one host; -1 without room.
    """
    given[:] = -1
    wanted = tables.hosts[choice]
    levels = len(tables.switches) if wanted > 1 else 1
    for level in range(0 if wanted == 1 else 1, levels):
        switch = _tightest_switch(tables, free, choice, level)
        if switch < 0:
            continue
        for index in range(wanted):
            given[index] = _tightest_host(tables, free, choice, level, switch, given)
        return level
    return -1
