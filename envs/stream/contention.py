"""Jobs that share links: a fluid model.

Each job sends between its hosts at a mean rate: its devices behind a link, times their
bandwidth, times the share of a step in which they send (its duty). A link carries what
its devices could send together over the network's oversubscription, and at least what
the largest of its jobs sends alone, because the planner's price holds for a job alone.
Where jobs request more, the link is slowed down (*stretched*) for all of them by the
ratio of requested to carried; a job takes the price of its plan with the links between
its hosts slowed down by the most stretched one. A slowed job does not request less, so
that no iteration is needed.

Functions that are called for every candidate or slot take arrays one by one: passing a
tuple counts references of all its arrays, which costs 0.3 us a call and made listing
candidates many times slower.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.stream.state import StreamState
from envs.stream.tables import StreamTables
from planner.simulate.compiled import compiled, inlined

__all__ = ["link_stretch", "refresh", "sent_bytes_per_s", "step_seconds", "sum_loads"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@inlined
def step_seconds(prices: Array, grid: Array, stretch: float) -> float:
    """Interpolate the seconds of a step with links slowed down linearly.

    Args:
        prices: ``step_s`` of a job in a shape at a level. Shape [s].
        grid: ``stretches`` of the prices; extrapolated beyond the last. Shape [s].
        stretch: Factor by which links are slowed down.
    """
    index = 0
    while index < len(grid) - 2 and stretch > grid[index + 1]:
        index += 1
    seconds: float = prices[0]
    if stretch > grid[0] and np.isfinite(seconds):
        slope = (prices[index + 1] - prices[index]) / (grid[index + 1] - grid[index])
        seconds = prices[index] + slope * (stretch - grid[index])
    return seconds


@inlined
def sent_bytes_per_s(duty: float, bandwidth: float, per_host: int) -> float:
    """Mean rate over a step at which one host of a job sends to the others."""
    return duty * bandwidth * per_host


@compiled
def sum_loads(tables: StreamTables, state: StreamState) -> None:
    """Fill in the requested rate of every link, and the largest of a single job."""
    state.load[:] = 0.0
    state.largest[:] = 0.0
    one = np.zeros(state.load.shape[1])
    for slot in range(len(state.running)):
        reach = state.reach[slot]
        if not state.running[slot] or reach == 0:
            continue
        model, choice = state.model[slot], state.choice[slot]
        rate = sent_bytes_per_s(
            tables.duty[model, choice, reach],
            tables.bandwidth[choice, reach],
            tables.per_host[choice],
        )
        one[:] = 0.0
        for host in state.given[slot]:
            if host >= 0:
                one[tables.switches[reach - 1, host]] += rate
        for domain in range(len(one)):
            state.load[reach, domain] += one[domain]
            state.largest[reach, domain] = max(
                state.largest[reach, domain], one[domain]
            )


@inlined
def link_stretch(
    domains: Index,
    load: Array,
    largest: Array,
    capacity: Array,
    given: Index,
    more: Array,
) -> float:
    """Stretch of the most stretched link between hosts that meet at a level.

    Args:
        domains: Link of each host at that level. Shape [hosts].
        load: Requested rate of each link. Shape [hosts].
        largest: Largest request of a single job. Shape [hosts].
        capacity: Capacity of each link. Shape [hosts].
        given: The hosts, then -1. Shape [most hosts].
        more: Further request by one job. Shape [hosts].
    """
    most = 1.0
    for host in given:
        if host < 0:
            break
        domain = domains[host]
        asked = load[domain] + more[domain]
        carried = max(capacity[domain], largest[domain], more[domain])
        if asked > carried:
            most = max(most, asked / carried)
    return most


@compiled
def refresh(tables: StreamTables, state: StreamState) -> None:
    """Update the speed and the end of every running job."""
    sum_loads(tables, state)
    none = np.zeros(state.load.shape[1])
    now, step_s, grid = state.clock[0], tables.step_s, tables.stretches
    switches, capacity = tables.switches, tables.capacity
    load, largest = state.load, state.largest
    for slot in range(len(state.running)):
        if not state.running[slot]:
            continue
        reach, stretch = state.reach[slot], 1.0
        if reach > 0:
            stretch = link_stretch(
                switches[reach - 1],
                load[reach],
                largest[reach],
                capacity[reach],
                state.given[slot],
                none,
            )
        prices = step_s[state.model[slot], state.choice[slot], reach]
        state.stretch[slot] = stretch
        state.rate[slot] = prices[0] / step_seconds(prices, grid, stretch)
        state.ends_s[slot] = now + state.left_s[slot] / state.rate[slot]
