"""Jobs that share links: a fluid model.

Each job sends between its hosts at a mean rate: its devices behind a link, times their
bandwidth, times the share of a step in which they send (its duty). A link carries what
its devices could send together over the network's oversubscription, and at least what
the largest of its jobs sends alone, because the planner's price holds for a job alone.
Where jobs request more, the link is slowed down (*stretched*) for all of them by the
ratio of requested to carried; a job takes the price of its plan with the links between
its hosts slowed down by the most stretched one. A slowed job does not request less, so
that no iteration is needed.

That is so where bursts of sending are *spread* over a step. Where they *collide*, a job
sends at its full rate for a share of a step, and meets what the others send on average:
its part of the request counts as if it sent all the time. Where they are *shifted*, the
jobs of a link send one after the other, as long as a step has time for all of them
(:mod:`planner.simulate.time_shifts`), and collide else. Where shifts are *chosen*, a
job meets what another sends in the part of a step in which both do; steps count as
equally long.

Functions that are called for every candidate or slot take arrays one by one: passing a
tuple counts references of all its arrays, which costs 0.3 us a call and made listing
candidates many times slower.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.stream.state import StreamState
from envs.stream.tables import StreamTables
from planner.simulate.compiled import compiled, inlined, inner

__all__ = [
    "CHOSEN",
    "ask",
    "chosen_stretch",
    "link_stretch",
    "refresh",
    "sent_bytes_per_s",
    "step_seconds",
    "sum_loads",
]

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


@inner
def sum_loads(tables: StreamTables, state: StreamState) -> None:
    """Fill in each link's requested rate, the largest of a job, and duties."""
    state.load[:] = 0.0
    state.largest[:] = 0.0
    state.busy[:] = 0.0
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
            if one[domain] > 0:
                state.busy[reach, domain] += tables.duty[model, choice, reach]
            state.largest[reach, domain] = max(
                state.largest[reach, domain], one[domain]
            )


@inlined
def ask(domains: Index, given: Index, rate: float, out: Array) -> None:
    """Fill in the rate that a job requests of each link of its level. [hosts]."""
    for host in range(len(out)):
        out[host] = 0.0
    for host in given:
        if host >= 0:
            out[domains[host]] += rate


@inlined
def link_stretch(
    domains: Index,
    load: Array,
    largest: Array,
    capacity: Array,
    given: Index,
    more: Array,
    own: Array,
    duty: float,
    busy: Array,
    more_duty: float,
    bursts: int,
) -> float:
    """Stretch of the most stretched link between hosts that meet at a level.

    Args:
        domains: Link of each host at that level. Shape [hosts].
        load: Requested rate of each link. Shape [hosts].
        largest: Largest request of a single job. Shape [hosts].
        capacity: Capacity of each link. Shape [hosts].
        given: The hosts, then -1. Shape [most hosts].
        more: Further request by one job. Shape [hosts].
        own: Part of ``load`` or ``more`` that the job itself requests. Shape [hosts].
        duty: Share of a step in which it sends.
        busy: Shares of a step in which jobs send, added up. Shape [hosts].
        more_duty: Such share of the further request.
        bursts: 0 if they are spread, 1 if they collide, 2 if they are shifted.
    """
    most = 1.0
    for host in given:
        if host < 0:
            break
        domain = domains[host]
        asked = load[domain] + more[domain]
        carried = max(capacity[domain], largest[domain], more[domain])
        if bursts > 0 and duty > 0:
            sending = busy[domain] + (more_duty if more[domain] > 0 else 0.0)
            if bursts == 1 or sending > 1 + 1e-9:
                peak = own[domain] / duty
                asked += peak - own[domain]
                carried = max(carried, peak)
        if asked > carried:
            most = max(most, asked / carried)
    return most


#: Number of ``chosen`` in :data:`envs.stream.tables.BURSTS`.
CHOSEN = 3


@inlined
def _both(duty: float, shift: float, other: float, other_shift: float) -> float:
    """Share of a step in which two jobs send, of duties and shifts within a step."""
    found = 0.0
    for turn in range(-1, 2):
        first = max(shift, other_shift + turn)
        found += max(0.0, min(shift + duty, other_shift + turn + other) - first)
    return min(found, duty, other)


@inner
def chosen_stretch(
    tables: StreamTables,
    state: StreamState,
    slot: int | np.int64,
    model: int,
    choice: int,
    reach: int,
    given: Index,
    more: Array,
    more_duty: float,
    more_shift: float,
) -> float:
    """Stretch of the most stretched link of a job whose shift was chosen.

    Args:
        tables: Tables of jobs and network.
        state: The running jobs.
        slot: Place of the job among them; -1 if it does not run.
        model: Number of the job; likewise choice, reach.
        given: Its hosts, then -1. Shape [most hosts].
        more: Further mean request by one job at the same level. Shape [hosts].
        more_duty: Share of a step in which that one sends, 0 for none.
        more_shift: Its shift.
    """
    duty, shift = tables.duty[model, choice, reach], tables.shifts[choice]
    if duty <= 0:
        return 1.0
    domains, count = tables.switches[reach - 1], len(more)
    met, largest, one = np.zeros(count), np.zeros(count), np.zeros(count)
    for other in range(len(state.running)):
        if other == slot or not state.running[other] or state.reach[other] != reach:
            continue
        which = state.choice[other]
        share = tables.duty[state.model[other], which, reach]
        width, each = tables.bandwidth[which, reach], tables.per_host[which]
        ask(domains, state.given[other], sent_bytes_per_s(1.0, width, each), one)
        part = _both(duty, shift, share, tables.shifts[which]) / duty
        for domain in range(count):
            met[domain] += one[domain] * part
            largest[domain] = max(largest[domain], one[domain] * share)
    if more_duty > 0:
        part = _both(duty, shift, more_duty, more_shift) / duty
        for domain in range(count):
            met[domain] += more[domain] / more_duty * part
            largest[domain] = max(largest[domain], more[domain])
    width, each = tables.bandwidth[choice, reach], tables.per_host[choice]
    ask(domains, given, sent_bytes_per_s(1.0, width, each), one)
    most = 1.0
    for host in given:
        if host >= 0:
            domain = domains[host]
            carried = max(tables.capacity[reach, domain], largest[domain], one[domain])
            most = max(most, (met[domain] + one[domain]) / carried)
    return most


@compiled
def refresh(tables: StreamTables, state: StreamState) -> None:
    """Update the speed and the end of every running job."""
    sum_loads(tables, state)
    none, own = np.zeros(state.load.shape[1]), np.zeros(state.load.shape[1])
    now, step_s, grid = state.clock[0], tables.step_s, tables.stretches
    switches, capacity = tables.switches, tables.capacity
    load, largest = state.load, state.largest
    for slot in range(len(state.running)):
        if not state.running[slot]:
            continue
        reach, stretch = state.reach[slot], 1.0
        model, choice = state.model[slot], state.choice[slot]
        if reach > 0 and tables.bursts[0] == CHOSEN:
            stretch = chosen_stretch(
                tables,
                state,
                slot,
                model,
                choice,
                reach,
                state.given[slot],
                none,
                0.0,
                0.0,
            )
        elif reach > 0:
            duty = tables.duty[model, choice, reach]
            width, each = tables.bandwidth[choice, reach], tables.per_host[choice]
            rate = sent_bytes_per_s(duty, width, each)
            ask(switches[reach - 1], state.given[slot], rate, own)
            stretch = link_stretch(
                switches[reach - 1],
                load[reach],
                largest[reach],
                capacity[reach],
                state.given[slot],
                none,
                own,
                duty,
                state.busy[reach],
                0.0,
                tables.bursts[0],
            )
        prices = step_s[model, choice, reach]
        state.stretch[slot] = stretch
        state.rate[slot] = prices[0] / step_seconds(prices, grid, stretch)
        state.ends_s[slot] = now + state.left_s[slot] / state.rate[slot]
