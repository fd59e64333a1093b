"""The event loop behind shared links, compiled.

Candidates of one schedule have equally many events, so that several are simulated side
by side, one event of each in turn: while one waits for a result the next goes on. What
is stored depends on comparisons, which instructions come next does not: a processor
that guesses those wrong loses the work of all candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.simulate.actions import IntArray
from planner.simulate.compiled import compiled, copy_into, inlined
from planner.simulate.durations import FloatArray
from planner.simulate.flow import COLUMNS, MAX_RANKS, NONE, Indices

__all__ = ["LANES", "time_with_links"]

#: Candidates simulated side by side: one cache line of doubles.
LANES = 8

#: Low bits of an event's key that hold its rank: ends that differ by less than 1 part
#: in 2**40 count as ties, which go to the lower rank.
_RANK = MAX_RANKS - 1


class _State(NamedTuple):
    """Where the candidates stand; the last axis of each array are the lanes.

    Attributes:
        own: Durations of computing. Shape [4 * stages, LANES].
        move: Durations of transfers. Shape [2 * stages - 1, LANES].
        free: When each link has done what was put on it. Shape [links + 2, LANES].
        arrival: When the input of each op is there. Shape [ops + 2, LANES].
        current: Op that each rank runs or waits to run. Shape [pp + 1, LANES].
        ready: End of the op before it. Shape [pp + 1, LANES].
        work: Duration of the current op. Shape [pp + 1, LANES].
        event: Its end, infinite while its input is not known to arrive.
            Shape [pp + 1, LANES].
        bits: The same memory as integers, which order as the times do, because no time
            is negative. Shape [pp + 1, LANES].
        keys: Those with the rank in place of their low bits. Shape [pp + 1, LANES].
        last: End of the last op of each duration row. Shape [4 * stages, LANES].
    """

    own: FloatArray
    move: FloatArray
    free: FloatArray
    arrival: FloatArray
    current: Indices
    ready: FloatArray
    work: FloatArray
    event: FloatArray
    bits: IntArray
    keys: IntArray
    last: FloatArray


@inlined
def _allocate(ranks: int, ops: int, links: int, compute: int, transfer: int) -> _State:
    event = np.empty((ranks + 1, LANES))
    return _State(
        own=np.zeros((compute, LANES)),
        move=np.zeros((transfer, LANES)),
        free=np.empty((links, LANES)),
        arrival=np.empty((ops + 2, LANES)),
        current=np.empty((ranks + 1, LANES), dtype=np.uint32),
        ready=np.empty((ranks + 1, LANES)),
        work=np.empty((ranks + 1, LANES)),
        event=event,
        bits=event.view(np.int64),
        keys=np.empty((ranks + 1, LANES), dtype=np.int64),
        last=np.zeros((compute, LANES)),
    )


@inlined
def _note(
    state: _State, rank: int, lane: int, before: float, arrival: float, work: float
) -> None:
    """Note when a rank ends its current op, as far as is known."""
    start = before if before > arrival else arrival
    state.event[rank, lane] = start + work
    state.keys[rank, lane] = (state.bits[rank, lane] & ~_RANK) | rank


@compiled
def _begin(
    state: _State,
    rows: Indices,
    arrival: FloatArray,
    first: Indices,
    compute: FloatArray,
    transfer: FloatArray,
) -> None:
    """Put candidates at the start of the step, one a lane."""
    for lane in range(len(compute)):
        copy_into(state.own[:, lane], compute[lane])
        copy_into(state.move[:, lane], transfer[lane])
    state.free[:] = 0.0
    for op in range(len(arrival)):
        state.arrival[op] = arrival[op]
    for rank in range(len(state.current)):
        op = first[rank] if rank < len(first) else len(arrival) - 2
        for lane in range(LANES):
            state.current[rank, lane], state.ready[rank, lane] = op, 0.0
            work = state.own[rows[op * COLUMNS], lane]
            state.work[rank, lane] = work
            _note(state, rank, lane, 0.0, arrival[op], work)


@inlined
def _earliest(keys: IntArray, ranks: int, best: IntArray) -> None:
    """Least key of all ranks, per lane."""
    for lane in range(LANES):
        best[lane] = keys[0, lane]
    for rank in range(1, ranks):
        for lane in range(LANES):
            key, least = keys[rank, lane], best[lane]
            best[lane] = key if key < least else least


@inlined
def _send(
    state: _State,
    lane: int,
    now: float,
    rows: Indices,
    sent: int,
    link_in: Indices,
    link_out: Indices,
    latency: FloatArray,
) -> None:
    """Put a transfer on its link; a rank that waits for it can tell its end now.

    For one that does not, :func:`_note` finds what it found before.
    """
    taker, rank, row = rows[sent], rows[sent + 1], rows[sent + 2]
    idle = state.free[link_in[row], lane]
    begin, move = (now if now > idle else idle), state.move[row, lane]
    arrival = begin + move
    held = move - latency[row]
    state.free[link_out[row], lane] = begin + (held if held > 0.0 else 0.0)
    state.arrival[taker, lane] = arrival
    there = state.arrival[state.current[rank, lane], lane]
    before, work = state.ready[rank, lane], state.work[rank, lane]
    _note(state, rank, lane, before, there, work)


@inlined
def _turn(
    state: _State, lane: int, rank: int, now: float, op: int, rows: Indices
) -> None:
    """Turn a rank to its next op."""
    work = state.own[rows[op * COLUMNS], lane]
    state.current[rank, lane], state.ready[rank, lane] = op, now
    state.work[rank, lane] = work
    _note(state, rank, lane, now, state.arrival[op, lane], work)


@compiled
def time_with_links(
    rows: Indices,
    arrival: FloatArray,
    first: Indices,
    compute: FloatArray,
    transfer: FloatArray,
    link_in: Indices,
    link_out: Indices,
    latency: FloatArray,
    end: FloatArray,
    last: FloatArray,
) -> None:
    """Time a batch of candidates whose ranks all compute at full rate.

    Every rank has at most one event to come, the end of its current op. The earliest
    is taken, its transfers join their links, and the ops they release get their ends.

    Args:
        rows: As ``Flow.rows``. Shape [(ops + 1) * COLUMNS].
        arrival: As ``Flow.arrival``. Shape [ops + 2].
        first: First op of each rank. Shape [pp].
        compute: As ``Durations.compute_s``. Shape [batch, 4 * stages].
        transfer: As ``Durations.transfer_s``. Shape [batch, 2 * stages - 1].
        link_in: Link that each transfer row waits for. Shape [2 * stages - 1].
        link_out: Link that it holds; another one where it shares with none, so that
            the one it waits for stays free. Shape [2 * stages - 1].
        latency: As ``Sharing.latency_s``. Shape [2 * stages - 1].
        end: Filled in with the end of each op of the last candidate, if it has a place
            for them. Shape [ops] or [0].
        last: Filled in with the end of the last op of each duration row.
            Shape [batch, 4 * stages].
    """
    ranks, ops, batch = len(first), len(arrival) - 2, len(compute)
    state = _allocate(
        ranks, ops, link_out.max() + 1, compute.shape[1], transfer.shape[1]
    )
    best = np.empty(LANES, dtype=np.int64)
    for start in range(0, batch, LANES):
        stop = min(start + LANES, batch)
        _begin(state, rows, arrival, first, compute[start:stop], transfer[start:stop])
        for _ in range(ops):
            _earliest(state.keys, ranks, best)
            for lane in range(stop - start):
                rank = best[lane] & _RANK
                now, op = state.event[rank, lane], state.current[rank, lane]
                at = op * COLUMNS
                state.last[rows[at], lane] = now
                if len(end):
                    end[op] = now
                _send(state, lane, now, rows, at + 1, link_in, link_out, latency)
                if rows[at + 4] != NONE:
                    _send(state, lane, now, rows, at + 4, link_in, link_out, latency)
                _turn(state, lane, rank, now, rows[at + 7], rows)
        for lane in range(stop - start):
            last[start + lane] = state.last[:, lane]
