"""Which hosts a job is given: best fit that minds the switches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import inlined

__all__ = ["place"]

Flags = NDArray[np.bool_]
Index = NDArray[np.int64]


@inlined
def _tightest_switch(domains: Index, enough: Flags, free: Index, wanted: int) -> int:
    """The switch that joins enough hosts and is left the fullest, or -1."""
    count = len(free)
    best, least = -1, 1 << 60
    for switch in range(count):
        members, left = 0, 0
        for host in range(count):
            if domains[host] == switch and enough[host]:
                members += 1
                left += free[host]
        if members >= wanted and left < least:
            best, least = switch, left
    return best


@inlined
def _give_tightest(
    domains: Index, switch: int, enough: Flags, free: Index, wanted: int, given: Index
) -> None:
    """Give hosts of one switch, those that are left the fullest first."""
    for index in range(wanted):
        best, least = -1, 1 << 60
        for host in range(len(free)):
            if enough[host] and domains[host] == switch and free[host] < least:
                best, least = host, free[host]
        given[index] = best
        enough[best] = False


@inlined
def place(
    kind_of_host: Index,
    switches: Index,
    free: Index,
    kind: int,
    wanted: int,
    per_host: int,
    enough: Flags,
    given: Index,
) -> int:
    """Hosts for a job of a candidate shape.

    Under the innermost level at which a switch joins enough hosts, the switch whose
    hosts have the fewest free devices; under it the hosts with the fewest free devices
    that are enough, so that the largest holes stay. Ties go to lower numbers.

    Args:
        kind_of_host: Shape [hosts].
        switches: Of each host at each level. Shape [r, hosts].
        free: Free devices of each host. Shape [hosts].
        kind: Of the hosts that the shape is of.
        wanted: Hosts of the shape.
        per_host: Devices of each.
        enough: Overwritten. Shape [hosts].
        given: Filled in with the hosts, then -1. Shape [most hosts].
    Returns:
        The level at which they meet, 0 for one host; -1 without room.
    """
    for index in range(len(given)):
        given[index] = -1
    found, tightest, least = 0, -1, 1 << 60
    for host in range(len(free)):
        enough[host] = kind_of_host[host] == kind and free[host] >= per_host
        if enough[host]:
            found += 1
            if free[host] < least:
                tightest, least = host, free[host]
    if found < wanted:
        return -1
    if wanted == 1:
        given[0] = tightest
        return 0
    for level in range(1, len(switches)):
        switch = _tightest_switch(switches[level], enough, free, wanted)
        if switch >= 0:
            _give_tightest(switches[level], switch, enough, free, wanted, given)
            return level
    return -1
