"""Jobs that share links: a fluid model.

Each job sends between its hosts at a mean rate: its devices behind a link, times their
bandwidth, times the share of a step in which they send (its duty). A link carries what
its devices could send together over the network's oversubscription, and at least what
the largest of its jobs sends alone, because the planner's price holds for a job alone.
Where jobs ask for more, the link is slowed down (*stretched*) for all of them by what
is asked over what is carried; a job is slowed down as its plan was priced with the
links between its hosts slowed down by the most stretched one. What a job asks for does
not shrink while it is slowed down, so that nothing has to be iterated.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.stream.state import StreamState
from envs.stream.tables import StreamTables
from planner.simulate.compiled import compiled

__all__ = ["link_stretch", "refresh", "sent_bytes_per_s", "step_seconds", "sum_loads"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@compiled
def step_seconds(
    tables: StreamTables, model: int, choice: int, reach: int, stretch: float
) -> float:
    """Seconds of a step with links slowed down, between two prices in a straight line.

    Beyond the last price the line goes on.
    """
    prices, grid = tables.step_s[model, choice, reach], tables.stretches
    index = 0
    while index < len(grid) - 2 and stretch > grid[index + 1]:
        index += 1
    seconds: float = prices[0]
    if stretch > grid[0] and np.isfinite(seconds):
        slope = (prices[index + 1] - prices[index]) / (grid[index + 1] - grid[index])
        seconds = prices[index] + slope * (stretch - grid[index])
    return seconds


@compiled
def sent_bytes_per_s(
    tables: StreamTables, model: int, choice: int, reach: int
) -> float:
    """What one host of a job sends to the others, on average over a step."""
    rate: float = tables.duty[model, choice, reach] * tables.bandwidth[choice, reach]
    return rate * int(tables.per_host[choice])


@compiled
def sum_loads(tables: StreamTables, state: StreamState) -> None:
    """Fill in what running jobs ask of every link, and the most that one asks."""
    state.load[:] = 0.0
    state.largest[:] = 0.0
    one = np.zeros(state.load.shape[1])
    for slot in range(len(state.running)):
        reach = state.reach[slot]
        if not state.running[slot] or reach == 0:
            continue
        rate = sent_bytes_per_s(tables, state.model[slot], state.choice[slot], reach)
        one[:] = 0.0
        for host in state.given[slot]:
            if host >= 0:
                one[tables.switches[reach - 1, host]] += rate
        for domain in range(len(one)):
            state.load[reach, domain] += one[domain]
            state.largest[reach, domain] = max(
                state.largest[reach, domain], one[domain]
            )


@compiled
def link_stretch(
    tables: StreamTables,
    state: StreamState,
    given: Index,
    reach: int,
    more: Array,
) -> float:
    """Stretch of the most stretched link between hosts.

    Args:
        tables: Of the network.
        state: With loads summed.
        given: The hosts, then -1. Shape [most hosts].
        reach: Level at which they meet.
        more: Asked of the links of that level besides, by one job. Shape [hosts].
    """
    most = 1.0
    if reach == 0:
        return most
    for host in given:
        if host < 0:
            break
        domain = tables.switches[reach - 1, host]
        asked = state.load[reach, domain] + more[domain]
        carried = max(
            tables.capacity[reach, domain], state.largest[reach, domain], more[domain]
        )
        if asked > carried:
            most = max(most, asked / carried)
    return most


@compiled
def refresh(tables: StreamTables, state: StreamState) -> None:
    """Work out anew how fast every running job goes, and when it ends."""
    sum_loads(tables, state)
    none = np.zeros(state.load.shape[1])
    now = state.clock[0]
    for slot in range(len(state.running)):
        if not state.running[slot]:
            continue
        model, choice = state.model[slot], state.choice[slot]
        reach = state.reach[slot]
        stretch = link_stretch(tables, state, state.given[slot], reach, none)
        alone = tables.step_s[model, choice, reach, 0]
        state.stretch[slot] = stretch
        state.rate[slot] = alone / step_seconds(tables, model, choice, reach, stretch)
        state.ends_s[slot] = now + state.left_s[slot] / state.rate[slot]
