"""The event loops behind :mod:`planner.simulate.shared`, compiled."""

from __future__ import annotations

import numpy as np

from planner.simulate.actions import IntArray
from planner.simulate.compiled import compiled
from planner.simulate.durations import FloatArray

__all__ = ["COLUMNS", "time_with_links", "time_with_slots"]

#: Columns of a flow table, one row an op, ranks one after the other: its duration row;
#: then, for the forward and for the gradient that it sends, the op that takes it (-1 if
#: none), that op's rank and the transfer row; last, whether it waits for a transfer.
COLUMNS = 8

#: Low bits of an event's key that hold its rank: ends that differ by less than 1 part
#: in 2**40 count as ties, which go to the lower rank.
_RANK_BITS = 12


@compiled
def _earliest(keys: IntArray) -> int:
    """Rank of the earliest event. The plain minimum becomes vector instructions."""
    best = keys[0]
    for key in keys:
        best = min(best, key)
    rank: int = best & ((1 << _RANK_BITS) - 1)
    return rank


@compiled
def _set_event(
    rank: int, time: float, event: FloatArray, bits: IntArray, keys: IntArray
) -> None:
    """Note a rank's next event; ``bits`` views ``event`` as integers.

    Times are not negative, so that their bits order as they do.
    """
    event[rank] = time
    keys[rank] = (bits[rank] >> _RANK_BITS << _RANK_BITS) | rank


@compiled
def _send(
    row: int, now: float, transfer: FloatArray, link_of: IntArray, free: FloatArray
) -> float:
    """Put a transfer on its link; when it arrives."""
    link = link_of[row]
    start = now if link < 0 else max(now, free[link])
    arrival: float = start + transfer[row]
    if link >= 0:
        free[link] = arrival
    return arrival


@compiled
def time_with_links(
    flow: IntArray,
    offsets: IntArray,
    compute: FloatArray,
    transfer: FloatArray,
    link_of: IntArray,
    num_links: int,
    last_backward: IntArray,
    end: FloatArray,
    total: FloatArray,
    done: FloatArray,
) -> None:
    """Time a batch of candidates whose ranks all compute at full rate.

    Every rank has at most one event to come, the end of its current op. The earliest
    is taken, its transfers join their links, and the ops they release get their ends.

    Args:
        flow: See :data:`COLUMNS`. Shape [ops, 8], int32.
        offsets: First op of each rank. Shape [pp + 1].
        compute: As ``Durations.compute_s``. Shape [batch, 4 * stages].
        transfer: As ``Durations.transfer_s``. Shape [batch, 2 * stages - 1].
        link_of: Link of each transfer row, -1 for its own. Shape [2 * stages - 1].
        num_links: Links.
        last_backward: Op that completes the gradient of each stage. Shape [stages].
        end: Filled in with the ends of the last candidate. Shape [ops].
        total: Filled in with makespans. Shape [batch].
        done: Filled in with the ends of each stage's backward. Shape [batch, stages].
    """
    ranks = len(offsets) - 1
    arrival = np.empty(len(flow))
    free = np.empty(num_links)
    current = np.empty(ranks, dtype=np.int64)
    ready = np.empty(ranks)
    event = np.empty(ranks)
    bits = event.view(np.int64)
    keys = np.empty(ranks, dtype=np.int64)
    for candidate in range(len(total)):
        own, move = compute[candidate], transfer[candidate]
        free[:] = 0.0
        for op in range(len(flow)):
            arrival[op] = np.inf if flow[op, 7] else 0.0
        for r in range(ranks):
            op = offsets[r]
            current[r] = op
            ready[r] = 0.0
            waits = op == offsets[r + 1] or flow[op, 7]
            first = np.inf if waits else own[flow[op, 0]]
            _set_event(r, first, event, bits, keys)
        for _ in range(len(flow)):
            r = _earliest(keys)
            now, op = event[r], current[r]
            end[op] = now
            for column in (1, 4):
                taker = flow[op, column]
                if taker >= 0:
                    arrives = _send(flow[op, column + 2], now, move, link_of, free)
                    arrival[taker] = arrives
                    q = flow[op, column + 1]
                    if current[q] == taker:
                        start = max(ready[q], arrives)
                        _set_event(q, start + own[flow[taker, 0]], event, bits, keys)
            op += 1
            current[r] = op
            ready[r] = now
            following = np.inf
            if op < offsets[r + 1]:
                following = max(now, arrival[op]) + own[flow[op, 0]]
            _set_event(r, following, event, bits, keys)
        total[candidate] = ready.max()
        for stage in range(len(last_backward)):
            done[candidate, stage] = end[last_backward[stage]]


@compiled
def _soonest(
    begin: FloatArray,
    left: FloatArray,
    pace: FloatArray,
    host_of: IntArray,
    now: float,
) -> tuple[float, int, bool]:
    """Time of the next start or end, its rank, and whether it is a start."""
    soonest, rank, starting = np.inf, -1, False
    for q in range(len(begin)):
        if begin[q] < soonest:
            soonest, rank, starting = begin[q], q, True
        end = now + left[q] * pace[host_of[q]]
        if end < soonest:
            soonest, rank, starting = end, q, False
    return soonest, rank, starting


@compiled
def time_with_slots(
    flow: IntArray,
    offsets: IntArray,
    compute: FloatArray,
    transfer: FloatArray,
    link_of: IntArray,
    num_links: int,
    host_of: IntArray,
    slots: FloatArray,
    starts: FloatArray,
    ends: FloatArray,
) -> None:
    """Time one candidate whose ranks share the cores of their hosts.

    A rank waits until a known time, or computes with some work left. Time moves to the
    earliest start or end; in between every rank of a host works at the same rate.

    Args:
        flow: See :data:`COLUMNS`. Shape [ops, 8], int32.
        offsets: First op of each rank. Shape [pp + 1].
        compute: Of this candidate. Shape [4 * stages].
        transfer: Of this candidate. Shape [2 * stages - 1].
        link_of: Link of each transfer row, -1 for its own. Shape [2 * stages - 1].
        num_links: Links.
        host_of: Host of each rank. Shape [pp].
        slots: Of each host. Shape [hosts].
        starts: Filled in. Shape [ops].
        ends: Filled in. Shape [ops].
    """
    ranks = len(offsets) - 1
    arrival = np.where(flow[:, 7] > 0, np.inf, 0.0)
    free = np.zeros(num_links)
    current = offsets[:-1].copy()
    ready = np.zeros(ranks)
    begin = np.full(ranks, np.inf)
    left = np.full(ranks, np.inf)
    pace = np.ones(len(slots))
    active = np.zeros(len(slots))
    now = 0.0
    for r in range(ranks):
        if current[r] < offsets[r + 1]:
            begin[r] = arrival[current[r]]
    remaining = len(flow)
    while remaining > 0:
        soonest, r, starting = _soonest(begin, left, pace, host_of, now)
        for q in range(ranks):
            left[q] = max(0.0, left[q] - (soonest - now) / pace[host_of[q]])
        now, op = soonest, current[r]
        active[host_of[r]] += 1.0 if starting else -1.0
        pace[host_of[r]] = max(1.0, active[host_of[r]] / slots[host_of[r]])
        if starting:
            begin[r], left[r], starts[op] = np.inf, compute[flow[op, 0]], now
            continue
        left[r], ends[op] = np.inf, now
        remaining -= 1
        for column in (1, 4):
            taker = flow[op, column]
            if taker >= 0:
                arrival[taker] = _send(
                    flow[op, column + 2], now, transfer, link_of, free
                )
                q = flow[op, column + 1]
                if current[q] == taker:
                    begin[q] = max(ready[q], arrival[taker])
        current[r], ready[r] = op + 1, now
        if op + 1 < offsets[r + 1]:
            begin[r] = max(now, arrival[op + 1])
