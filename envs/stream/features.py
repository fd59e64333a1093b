"""Features of devices and candidates in the job stream.

The first features of a candidate are those of :mod:`envs.ramp.features`: the shares of
the cluster that are free, and free in blocks, at several times after the decision.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.ramp.features import BLOCK_SIZES, NUM_SHARES, OFFSETS
from envs.stream.decisions import Options
from envs.stream.state import StreamState
from envs.stream.tables import StreamTables
from planner.simulate.compiled import compiled, inlined, inner

__all__ = [
    "LONGEST",
    "NUM_CANDIDATE_FEATURES",
    "NUM_DEVICE_FEATURES",
    "write_candidates",
    "write_devices",
]

Floats = NDArray[np.float32]
Index = NDArray[np.int64]

#: Cap of times, in mean intervals.
LONGEST = 40.0

#: Features of a candidate: the shares at each offset; the six of the replay (turns
#: away, ends after the horizon, share of the devices, completion time, share of its
#: last interval in which it no longer runs, share of the time to the deadline that is
#: left); and its share of the hosts, its slowdown by sharing, running jobs that it
#: makes late, the level at which its hosts meet, its speed-up over its devices, whether
#: it lets the job wait, and the share of a step in which its links are busy.
NUM_CANDIDATE_FEATURES = len(OFFSETS) * NUM_SHARES + 13
#: Features of a device: free now and at each of the OFFSETS; time until it is free; its
#: speed; the free share of its host; whether it is unusable.
NUM_DEVICE_FEATURES = 1 + len(OFFSETS) + 4

_SAME_TIME_S = 1e-7
#: Cap of the number of running jobs made late.
_MOST_HARMED = 4


@inlined
def _write_shares(size_of_host: Index, free: Index, usable: int, out: Floats) -> None:
    """Compute the shares of the cluster that are free, and free in blocks of each size.

    A block lies in one host, or is made of whole hosts. Shape [NUM_SHARES].
    """
    total, whole = 0, 0
    for host in range(len(free)):
        total += free[host]
        if free[host] == size_of_host[host]:
            whole += free[host]
    out[0] = total / usable
    for index in range(len(BLOCK_SIZES)):
        size, inside = BLOCK_SIZES[index], 0
        for host in range(len(free)):
            inside += free[host] // size * size
        out[1 + index] = max(inside, whole // size * size) / usable


@inlined
def _take(given: Index, many: int, free: Index) -> None:
    """Add a number of devices of each given host to the free ones."""
    for host in given:
        if host >= 0:
            free[host] += many


@inner
def _write_later(
    tables: StreamTables, state: StreamState, options: Options, out: Floats
) -> None:
    """Write the shares of the cluster at each of the OFFSETS, after each candidate."""
    now, interval = state.clock[0], state.clock[2]
    usable, per_host = tables.usable.sum(), tables.per_host
    sizes, given = tables.size_of_host, options.given
    free = np.empty(len(state.free), dtype=np.int64)
    for offset in range(len(OFFSETS)):
        at_s = now + OFFSETS[offset] * interval + _SAME_TIME_S
        begin, end = offset * NUM_SHARES, (offset + 1) * NUM_SHARES
        for host in range(len(free)):
            free[host] = state.free[host]
        for slot in range(len(state.running)):
            if state.running[slot] and state.ends_s[slot] <= at_s:
                _take(state.given[slot], per_host[state.choice[slot]], free)
        _write_shares(sizes, free, usable, out[0, begin:end])
        for choice in range(len(options.possible)):
            if not options.possible[choice]:
                continue
            shares = out[1 + choice, begin:end]
            if now + options.jct_s[choice] <= at_s:
                for index in range(NUM_SHARES):
                    shares[index] = out[0, begin + index]
                continue
            _take(given[choice], -per_host[choice], free)
            _write_shares(sizes, free, usable, shares)
            _take(given[choice], per_host[choice], free)


@compiled
def write_candidates(
    tables: StreamTables, state: StreamState, options: Options, out: Floats
) -> None:
    """Write features of turning away, each candidate, and waiting if it is possible.

    Args:
        tables: Tables of jobs and network.
        state: State with a head.
        options: Candidates of this decision.
        out: Filled in; zeros where a candidate is not possible. Shape
            [1 + c or 2 + c, NUM_CANDIDATE_FEATURES].
    """
    out[:] = 0.0
    last, count = len(OFFSETS) * NUM_SHARES, len(options.possible)
    _write_later(tables, state, options, out)
    out[0, last] = 1.0
    if len(out) > 1 + count:
        for index in range(last):
            out[1 + count, index] = out[0, index]
        out[1 + count, last + 11] = 1.0
    for choice in range(count):
        if options.possible[choice]:
            _write_own(tables, state, options, choice, out[1 + choice, last:])


@inner
def _write_own(
    tables: StreamTables, state: StreamState, options: Options, choice: int, out: Floats
) -> None:
    now, horizon, interval = state.clock[0], state.clock[1], state.clock[2]
    jct_s, model = options.jct_s[choice], state.waiting.model[0]
    left_s = max(state.waiting.due_s[0] - now, 1e-9)
    work = state.waiting.size[0] * tables.sequential_jct_s[model]
    degree = tables.degrees[choice]
    intervals = jct_s / interval
    out[1] = now + jct_s > horizon + _SAME_TIME_S
    out[2] = degree / tables.usable.sum()
    out[3] = min(intervals, LONGEST) / LONGEST
    out[4] = np.ceil(intervals) - intervals
    out[5] = min(max(1.0 - jct_s / left_s, 0.0), 1.0)
    out[6] = tables.hosts[choice] / len(state.free)
    out[7] = 1.0 - 1.0 / options.stretch[choice]
    out[8] = min(options.harmed[choice], _MOST_HARMED) / _MOST_HARMED
    out[9] = options.reach[choice] / max(len(tables.switches) - 1, 1)
    out[10] = min(work / (jct_s * degree), 2.0) / 2.0
    out[12] = tables.duty[model, choice, options.reach[choice]]


@compiled
def write_devices(
    tables: StreamTables,
    state: StreamState,
    options: Options,
    devices: Floats,
    candidate_devices: Floats,
) -> None:
    """Write features of the devices, and the devices that each candidate would hold.

    Args:
        tables: Tables of jobs and network.
        state: State with a head.
        options: Candidates of this decision.
        devices: Filled in. Shape [n, NUM_DEVICE_FEATURES].
        candidate_devices: Filled in. Shape [1 + c or 2 + c, n].
    """
    candidate_devices[:] = 0.0
    now, interval, after = state.clock[0], state.clock[2], 1 + len(OFFSETS)
    for device in range(len(state.holder)):
        slot, host = state.holder[device], tables.host_of_device[device]
        row = devices[device]
        left = np.inf if slot == -2 else 0.0
        if slot >= 0:
            left = max(state.ends_s[slot] - now, 0.0) / interval
        row[0] = slot == -1
        for offset in range(len(OFFSETS)):
            row[1 + offset] = left <= OFFSETS[offset] + _SAME_TIME_S / interval
        row[after] = min(left, LONGEST) / LONGEST
        row[after + 1] = tables.speed[device]
        row[after + 2] = state.free[host] / max(tables.size_of_host[host], 1)
        row[after + 3] = slot == -2
    for choice in range(len(options.possible)):
        if not options.possible[choice]:
            continue
        for host in options.given[choice]:
            if host < 0:
                break
            wanted = tables.per_host[choice]
            for device in range(len(state.holder)):
                if wanted == 0:
                    break
                if tables.host_of_device[device] == host and state.holder[device] == -1:
                    candidate_devices[1 + choice, device] = 1.0
                    wanted -= 1
