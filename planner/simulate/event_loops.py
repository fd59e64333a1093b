"""Loops over the ops of a schedule whose transfers share links, compiled.

Three of them, the quickest that will do:

``time_in_order``     each link has one sender: a rank's transfers join a link in the
                      order of its actions, which is known before any time is, so that
                      one pass over the ops does, in a twentieth of the time
``time_with_links``   links have several senders: event by event. Candidates of one
                      schedule have equally many events, so that several are simulated
                      side by side, one event of each in turn: while one waits for a
                      result the next goes on. What is stored depends on comparisons,
                      which instructions come next does not: a processor that guesses
                      those wrong loses the work of all candidates
``time_with_slots``   ranks share the cores of their hosts, too
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError
from planner.simulate.actions import ActionKind, ActionTable, IntArray
from planner.simulate.compiled import compiled, copy_into, inlined, inner
from planner.simulate.durations import FloatArray
from planner.simulate.program import Program, compile_table

__all__ = [
    "COLUMNS",
    "LANES",
    "MAX_RANKS",
    "NONE",
    "Flow",
    "Indices",
    "flow_of",
    "has_one_sender",
    "time_in_order",
    "time_with_links",
    "time_with_slots",
]

#: Unsigned, which spares the kernels a check for negative ones.
Indices = NDArray[np.uint32]

#: Fields of an op in :attr:`Flow.rows`: its duration row; of what it sends the op that
#: takes it, that op's rank and the transfer row; the same of the gradient that the end
#: of a pair sends besides, NONE if nothing; the next op on its rank.
COLUMNS = 8

#: An op that sends once.
NONE = 2**32 - 1

#: Ranks that the key of an event has bits for.
MAX_RANKS = 2**12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """A program with the ops of each rank in one piece.

    So that the loops need no questions asked, what an op without a taker sends goes to
    op ``ops + 1`` on rank ``pp``, which nobody reads, and after the last op of a rank
    comes op ``ops``, whose input never arrives.

    Attributes:
        program: The program.
        rows: See :data:`COLUMNS`, op after op. Shape [(ops + 1) * COLUMNS].
        arrival: When the input of each op is there if nothing is sent: at the start, or
            never. Shape [ops + 2].
        first: First op of each rank. Shape [pp].
        place: Op of each op of the program. Shape [ops].
    """

    program: Program
    rows: Indices
    arrival: FloatArray
    first: Indices
    place: IntArray

    def __len__(self) -> int:
        return len(self.program)


@lru_cache(maxsize=256)
def flow_of(table: ActionTable) -> Flow:
    """Lay out the ops of a table's program.

    Raises:
        StrategyError: If ranks wait for each other in a circle, or there are more than
            an event has bits for.
    """
    if table.pp > MAX_RANKS:
        raise StrategyError(
            f"pp={table.pp} is more than the {MAX_RANKS} ranks that can share links; "
            f"use fewer, or the static engine"
        )
    program = compile_table(table)
    ops = len(program)
    order = np.argsort(program.rank, kind="stable")
    place = np.empty(ops, dtype=np.int64)
    place[order] = np.arange(ops)
    rows = np.zeros((ops + 1, COLUMNS), dtype=np.uint32)
    rows[place, 0] = program.duration_row
    rows[:, 1], rows[:, 2], rows[:, 4] = ops + 1, table.pp, NONE
    waits = program.producer > 0
    for gradient in (False, True):
        takers = np.flatnonzero(
            waits & ((program.kind != ActionKind.FORWARD) == gradient)
        )
        senders = place[program.producer[takers] - 1]
        # The gradient goes second where a forward has been sent already.
        column = np.where(rows[senders, 1] <= ops, 4, 1)
        rows[senders, column] = place[takers]
        rows[senders, column + 1] = program.rank[takers]
        rows[senders, column + 2] = program.delay_row[takers]
    ends = np.cumsum(np.bincount(program.rank, minlength=table.pp))
    rows[:ops, 7] = np.arange(1, ops + 1)
    rows[ends - 1, 7] = ops
    arrival = np.full(ops + 2, np.inf)
    arrival[place] = np.where(waits, np.inf, 0.0)
    return Flow(
        program=program,
        rows=rows.ravel(),
        arrival=arrival,
        first=np.concatenate([[0], ends[:-1]]).astype(np.uint32),
        place=place,
    )


# -- One sender a link -----------------------------------------------------------


def has_one_sender(rank_of_stage: IntArray, link_of: IntArray) -> bool:
    """True if no link is used by two ranks.

    Args:
        rank_of_stage: Shape [stages].
        link_of: As ``Sharing.link_of``. Shape [2 * stages - 1].
    """
    senders = np.concatenate([rank_of_stage[:-1], rank_of_stage[1:]])
    links = link_of[1:]
    shared = links >= 0
    pairs = np.unique(np.stack([links[shared], senders[shared]]), axis=1)
    return bool(len(np.unique(pairs[0])) == pairs.shape[1])


@compiled
def time_in_order(
    rows: Indices,
    arrival: FloatArray,
    place: IntArray,
    rank: IntArray,
    compute: FloatArray,
    transfer: FloatArray,
    link_in: Indices,
    link_out: Indices,
    latency: FloatArray,
    end: FloatArray,
    last: FloatArray,
) -> None:
    """Time a batch of candidates whose ranks all compute at full rate, one by one.

    Args:
        rows: As ``Flow.rows``. Shape [(ops + 1) * COLUMNS].
        arrival: As ``Flow.arrival``. Shape [ops + 2].
        place: As ``Flow.place``. Shape [ops].
        rank: As ``Program.rank``. Shape [ops].
        compute: As ``Durations.compute_s``. Shape [batch, 4 * stages].
        transfer: As ``Durations.transfer_s``. Shape [batch, 2 * stages - 1].
        link_in: Link that each transfer row waits for. Shape [2 * stages - 1].
        link_out: Link that it holds. Shape [2 * stages - 1].
        latency: As ``Sharing.latency_s``. Shape [2 * stages - 1].
        end: Filled in with the end of each op of the last candidate, if it has a place
            for them. Shape [ops] or [0].
        last: Filled in with the end of the last op of each duration row.
            Shape [batch, 4 * stages].
    """
    free, ready = np.empty(link_out.max() + 1), np.empty(rank.max() + 1)
    there = np.empty(len(arrival))
    for candidate in range(len(compute)):
        free[:], ready[:], there[:] = 0.0, 0.0, arrival
        last[candidate] = 0.0
        for index in range(len(place)):
            op = place[index]
            at = op * COLUMNS
            before, row = ready[rank[index]], rows[at]
            start = before if before > there[op] else there[op]
            now = start + compute[candidate, row]
            ready[rank[index]], last[candidate, row] = now, now
            if len(end):
                end[op] = now
            for sent in (at + 1, at + 4):
                if rows[sent] == NONE:
                    break
                taker, move_row = rows[sent], rows[sent + 2]
                idle, move = free[link_in[move_row]], transfer[candidate, move_row]
                begin = now if now > idle else idle
                held = move - latency[move_row]
                free[link_out[move_row]] = begin + (held if held > 0.0 else 0.0)
                there[taker] = begin + move


# -- Several senders a link ------------------------------------------------------

#: Candidates simulated side by side: one cache line of doubles.
LANES = 8

#: Low bits of an event's key that hold its rank: ends that differ by less than 1 part
#: in 2**40 count as ties, which go to the lower rank.
_RANK = MAX_RANKS - 1


class _State(NamedTuple):
    """State of the candidates; the last axis of each array are the lanes.

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


@inner
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


# -- Shared cores ----------------------------------------------------------------


@inner
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
