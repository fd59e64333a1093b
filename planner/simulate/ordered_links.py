"""Times of a schedule in which each link has one sender, compiled.

A rank's transfers join a link in the order of its actions. If no other rank sends over
that link, the order of transfers is known before any time is: one pass over the ops
does, instead of an event loop, in a twentieth of its time.
"""

from __future__ import annotations

import numpy as np

from planner.simulate.actions import IntArray
from planner.simulate.compiled import compiled
from planner.simulate.durations import FloatArray
from planner.simulate.flow import COLUMNS, NONE, Indices

__all__ = ["has_one_sender", "time_in_order"]


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
