"""Place the candidates for the job at the head on hosts, and decide it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.history import remember
from envs.stream.contention import (
    CHOSEN,
    ask,
    chosen_stretch,
    link_stretch,
    refresh,
    sent_bytes_per_s,
    step_seconds,
    sum_loads,
)
from envs.stream.events import Rewards, drop_head
from envs.stream.state import TOTALS, StreamState
from envs.stream.tables import StreamTables
from planner.simulate.compiled import compiled, inlined, inner

__all__ = [
    "OUTCOMES",
    "Options",
    "decide",
    "empty_options",
    "list_options",
    "place",
]

Flags = NDArray[np.bool_]
Index = NDArray[np.int64]
Array = NDArray[np.float64]


@inlined
def _tightest_switch(domains: Index, enough: Flags, free: Index, wanted: int) -> int:
    """Find the switch with enough hosts and the fewest free devices, or -1."""
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
    """Take hosts of one switch, those with the fewest free devices first."""
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
    """Find hosts for a job of a candidate shape, by best fit.

    At the innermost level at which a switch joins enough hosts, take the switch whose
    hosts have the fewest free devices; below it, take the hosts with the fewest free
    devices that suffice, so that the largest holes stay. Ties go to lower numbers.

    Args:
        kind_of_host: Shape [hosts].
        switches: Switch of each host at each level. Shape [r, hosts].
        free: Free devices of each host. Shape [hosts].
        kind: Kind of host of the shape.
        wanted: Hosts of the shape.
        per_host: Devices on each host.
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


#: Outcomes of a decision. ``refused`` if a candidate was possible; otherwise
#: ``no_room``, or ``late`` if no candidate meets the deadline even on an empty cluster,
#: or the requested one does not in the current state.
OUTCOMES = ("placed", "refused", "no_room", "late", "waiting")
_PLACED, _REFUSED, _NO_ROOM, _LATE, _WAITING = range(len(OUTCOMES))

_SAME_TIME_S = 1e-7
_T_PLACED, _T_REWARD = TOTALS.index("placed"), TOTALS.index("reward")
#: Totals that count the blocked outcomes.
_COUNTED = tuple(TOTALS.index(name) for name in ("refused", "no_room", "late"))


class Options(NamedTuple):
    """Candidates of one decision. c candidates.

    Attributes:
        possible: True if it fits, there is room, and the deadline is met. Shape [c].
        reach: Level at which its hosts meet; -1 without room. Shape [c].
        given: Its hosts, then -1. Shape [c, most hosts].
        stretch: Stretch of the links between its hosts. Shape [c].
        jct_s: Time to its end if nothing changes; infinite if it cannot run. Shape [c].
        harmed: Running jobs that would miss their deadline because of it, if it is
            possible. Shape [c].
    """

    possible: Flags
    reach: Index
    given: Index
    stretch: Array
    jct_s: Array
    harmed: Index


def empty_options(tables: StreamTables) -> Options:
    """Allocate candidates, to be filled in."""
    count, most = len(tables.degrees), int(tables.hosts.max())
    return Options(
        possible=np.zeros(count, dtype=np.bool_),
        reach=np.zeros(count, dtype=np.int64),
        given=np.zeros((count, most), dtype=np.int64),
        stretch=np.ones(count),
        jct_s=np.zeros(count),
        harmed=np.zeros(count, dtype=np.int64),
    )


@inner
def _harmed(
    tables: StreamTables,
    state: StreamState,
    reach: int,
    more: Array,
    more_duty: float,
    more_shift: float,
) -> int:
    """Count running jobs that a further request would make miss their deadline."""
    own = np.zeros(len(more))
    found, now, grid = 0, state.clock[0], tables.stretches
    domains, capacity = tables.switches[reach - 1], tables.capacity[reach]
    load, largest = state.load[reach], state.largest[reach]
    for slot in range(len(state.running)):
        if not state.running[slot] or state.reach[slot] != reach:
            continue
        if state.ends_s[slot] > state.due_s[slot]:
            continue
        given = state.given[slot]
        model, choice = state.model[slot], state.choice[slot]
        if tables.bursts[0] == CHOSEN:
            stretch = chosen_stretch(
                tables,
                state,
                slot,
                model,
                choice,
                reach,
                given,
                more,
                more_duty,
                more_shift,
            )
        else:
            duty = tables.duty[model, choice, reach]
            width, each = tables.bandwidth[choice, reach], tables.per_host[choice]
            ask(domains, given, sent_bytes_per_s(duty, width, each), own)
            stretch = link_stretch(
                domains,
                load,
                largest,
                capacity,
                given,
                more,
                own,
                duty,
                state.busy[reach],
                more_duty,
                tables.bursts[0],
            )
        prices = tables.step_s[model, choice, reach]
        rate = prices[0] / step_seconds(prices, grid, stretch)
        if now + state.left_s[slot] / rate > state.due_s[slot] + _SAME_TIME_S:
            found += 1
    return found


@compiled
def list_options(
    tables: StreamTables, state: StreamState, out: Options, least: int | np.int64
) -> None:
    """List the candidates for the head.

    Args:
        tables: Tables of jobs and network.
        state: State with a head.
        out: Filled in.
        least: If positive, stop at the first possible candidate of at least this
            degree; later ones count as impossible, and ``harmed`` is not computed.
    """
    more = np.zeros(len(state.free))
    enough = np.zeros(len(state.free), dtype=np.bool_)
    sum_loads(tables, state)
    model, size = state.waiting.model[0], state.waiting.size[0]
    now, due = state.clock[0], state.waiting.due_s[0]
    switches, capacity, grid = tables.switches, tables.capacity, tables.stretches
    out.possible[:] = False
    for choice in range(len(tables.degrees)):
        given = out.given[choice]
        reach = place(
            tables.kind_of_host,
            switches,
            state.free,
            tables.kinds[choice],
            tables.hosts[choice],
            tables.per_host[choice],
            enough,
            given,
        )
        out.reach[choice] = reach
        out.stretch[choice], out.harmed[choice] = 1.0, 0
        out.jct_s[choice] = np.inf
        if reach < 0:
            continue
        prices, stretch = tables.step_s[model, choice, reach], 1.0
        if not np.isfinite(prices[0]):
            continue
        if reach > 0:
            domains, width = switches[reach - 1], tables.bandwidth[choice, reach]
            duty = tables.duty[model, choice, reach]
            ask(
                domains,
                given,
                sent_bytes_per_s(duty, width, tables.per_host[choice]),
                more,
            )
            if tables.bursts[0] == CHOSEN:
                stretch = chosen_stretch(
                    tables,
                    state,
                    np.int64(-1),
                    model,
                    choice,
                    reach,
                    given,
                    more,
                    0.0,
                    0.0,
                )
            else:
                stretch = link_stretch(
                    domains,
                    state.load[reach],
                    state.largest[reach],
                    capacity[reach],
                    given,
                    more,
                    more,
                    duty,
                    state.busy[reach],
                    duty,
                    tables.bursts[0],
                )
        jct_s = size * tables.steps[model] * step_seconds(prices, grid, stretch)
        out.stretch[choice], out.jct_s[choice] = stretch, jct_s
        if now + jct_s > due + _SAME_TIME_S:
            continue
        out.possible[choice] = True
        if least > 0 and tables.degrees[choice] >= least:
            return
        if least == 0 and reach > 0:
            duty = tables.duty[model, choice, reach]
            shift = tables.shifts[choice]
            out.harmed[choice] = _harmed(tables, state, reach, more, duty, shift)


@inner
def _start(
    tables: StreamTables, state: StreamState, options: Options, choice: int
) -> None:
    """Give the head its devices: on each host those of the lowest numbers."""
    slot = 0
    while state.running[slot]:
        slot += 1
    waiting, reach = state.waiting, options.reach[choice]
    model, size = waiting.model[0], waiting.size[0]
    state.running[slot] = True
    state.model[slot], state.choice[slot] = model, choice
    state.reach[slot] = reach
    for index in range(len(options.given[choice])):
        state.given[slot, index] = options.given[choice, index]
    steps = size * tables.steps[model]
    state.left_s[slot] = steps * tables.step_s[model, choice, reach, 0]
    state.started_s[slot] = state.clock[0]
    state.arrived_s[slot], state.due_s[slot] = waiting.arrived_s[0], waiting.due_s[0]
    state.size[slot] = size
    for host in options.given[choice]:
        if host < 0:
            break
        wanted = tables.per_host[choice]
        state.free[host] -= wanted
        for device in range(len(state.holder)):
            if wanted == 0:
                break
            if tables.host_of_device[device] == host and state.holder[device] == -1:
                state.holder[device] = slot
                wanted -= 1
    refresh(tables, state)


@inner
def _outcome(
    tables: StreamTables, state: StreamState, options: Options, choice: int
) -> int:
    """Return the outcome of placing the head, or of turning it away (choice -1)."""
    if choice >= 0:
        if options.possible[choice]:
            return _PLACED
        return _LATE if np.isfinite(options.jct_s[choice]) else _NO_ROOM
    for other in range(len(options.possible)):
        if options.possible[other]:
            return _REFUSED
    fastest = state.waiting.size[0] * tables.fastest_s[state.waiting.model[0]]
    in_time = state.clock[0] + fastest <= state.waiting.due_s[0] + _SAME_TIME_S
    return _NO_ROOM if in_time else _LATE


@compiled
def decide(
    tables: StreamTables,
    state: StreamState,
    options: Options,
    rewards: Rewards,
    action: int,
) -> int:
    """Place the head, turn it away, or let it wait.

    Args:
        tables: Tables of jobs and network.
        state: State with a head; changed.
        options: Candidates of this decision.
        rewards: Rewards of jobs.
        action: 0 turns the job away, 1 + i takes the i-th candidate, one more than
            there are candidates lets it wait.
    Returns:
        Number of the outcome in OUTCOMES.
    """
    if action == 1 + len(options.possible):
        state.counts[2] = 1
        return _WAITING
    model, size = state.waiting.model[0], state.waiting.size[0]
    work = size * tables.sequential_jct_s[model]
    longest = state.waiting.due_s[0] - state.waiting.arrived_s[0]
    outcome = _outcome(tables, state, options, action - 1)
    if outcome == _PLACED:
        _start(tables, state, options, action - 1)
        state.totals[_T_PLACED] += 1
        paid = rewards.work * work / rewards.mean_work_s
        state.totals[_T_REWARD] += rewards.accepted + paid
    else:
        state.totals[_COUNTED[outcome - 1]] += 1
        state.totals[_T_REWARD] += rewards.blocked
    remember(state.seen, longest / work)
    drop_head(state, np.int64(0))
    return outcome
