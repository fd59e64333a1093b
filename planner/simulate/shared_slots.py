"""The event loop behind shared cores, compiled."""

from __future__ import annotations

import numpy as np

from planner.simulate.actions import IntArray
from planner.simulate.compiled import compiled, copy_into
from planner.simulate.durations import FloatArray
from planner.simulate.flow import COLUMNS, NONE, Indices

__all__ = ["time_with_slots"]


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
    for q in range(len(host_of)):
        if begin[q] < soonest:
            soonest, rank, starting = begin[q], q, True
        end = now + left[q] * pace[host_of[q]]
        if end < soonest:
            soonest, rank, starting = end, q, False
    return soonest, rank, starting


@compiled
def time_with_slots(
    rows: Indices,
    arrives: FloatArray,
    first: Indices,
    compute: FloatArray,
    transfer: FloatArray,
    link_in: Indices,
    link_out: Indices,
    latency: FloatArray,
    host_of: IntArray,
    slots: FloatArray,
    starts: FloatArray,
    ends: FloatArray,
) -> None:
    """Time one candidate whose ranks share the cores of their hosts.

    A rank waits until a known time, or computes with some work left. Time moves to the
    earliest start or end; in between every rank of a host works at the same rate.

    Args:
        rows: As ``Flow.rows``. Shape [(ops + 1) * COLUMNS].
        arrives: As ``Flow.arrival``. Shape [ops + 2].
        first: First op of each rank. Shape [pp].
        compute: Of this candidate. Shape [4 * stages].
        transfer: Of this candidate. Shape [2 * stages - 1].
        link_in: Link that each transfer row waits for. Shape [2 * stages - 1].
        link_out: Link that it holds. Shape [2 * stages - 1].
        latency: As ``Sharing.latency_s``. Shape [2 * stages - 1].
        host_of: Host of each rank. Shape [pp].
        slots: Of each host. Shape [hosts].
        starts: Filled in. Shape [ops].
        ends: Filled in. Shape [ops].
    """
    ranks = len(first)
    arrival = arrives.copy()
    free = np.zeros(link_out.max() + 1)
    current = np.full(ranks + 1, len(ends), dtype=np.uint32)
    copy_into(current, first)
    ready = np.zeros(ranks + 1)
    begin = np.full(ranks + 1, np.inf)
    left = np.full(ranks, np.inf)
    pace = np.ones(len(slots))
    active = np.zeros(len(slots))
    now = 0.0
    for r in range(ranks):
        begin[r] = arrival[first[r]]
    remaining = len(ends)
    while remaining > 0:
        soonest, r, starting = _soonest(begin, left, pace, host_of, now)
        for q in range(ranks):
            left[q] = max(0.0, left[q] - (soonest - now) / pace[host_of[q]])
        now, op = soonest, current[r]
        active[host_of[r]] += 1.0 if starting else -1.0
        pace[host_of[r]] = max(1.0, active[host_of[r]] / slots[host_of[r]])
        at = op * COLUMNS
        if starting:
            begin[r], left[r], starts[op] = np.inf, compute[rows[at]], now
            continue
        left[r], ends[op] = np.inf, now
        remaining -= 1
        for column in (at + 1, at + 4):
            taker = rows[column]
            if taker != NONE:
                q, row = rows[column + 1], rows[column + 2]
                leaves = max(now, free[link_in[row]])
                arrival[taker] = leaves + transfer[row]
                free[link_out[row]] = leaves + max(transfer[row] - latency[row], 0.0)
                if current[q] == taker:
                    begin[q] = max(ready[q], arrival[taker])
        following = rows[at + 7]
        current[r], ready[r] = following, now
        begin[r] = max(now, arrival[following])
