"""Times of a schedule whose sends wait for their receivers, as with small buffers.

A transfer starts when its sender has made the data and its receiver has ended the
action before the one that needs it; both go on when it has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.errors import StrategyError
from planner.simulate.actions import ActionTable, IntArray
from planner.simulate.compiled import compiled
from planner.simulate.durations import Durations, FloatArray
from planner.simulate.program import compile_table

__all__ = ["time_rendezvous"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Handshakes:
    """A program whose senders wait; time indices as in Program.

    Attributes:
        order: Ops in an order in which each can be timed. Shape [ops].
        sent: Op that takes what the op before it on its rank sends, 0 if that sends
            nothing: this op waits until it has arrived. Shape [ops].
    """

    order: IntArray
    sent: IntArray


@lru_cache(maxsize=64)
def _handshakes(table: ActionTable) -> _Handshakes:
    program = compile_table(table)
    taker = np.zeros(len(program) + 1, dtype=np.int32)
    takes = np.flatnonzero(program.producer > 0)
    taker[program.producer[takes]] = takes + 1
    sent = taker[program.previous]
    sent[program.previous == 0] = 0
    order = _handshake_order(
        program.previous, program.producer, sent, program.rank, table.pp
    )
    if len(order) < len(program):
        raise StrategyError(
            f"schedule {table.schedule} with pp={table.pp} deadlocks when sends wait "
            f"for their receivers; use rendezvous=False"
        )
    return _Handshakes(order=order, sent=sent)


@compiled
def _handshake_order(
    previous: IntArray, producer: IntArray, sent: IntArray, rank: IntArray, pp: int
) -> IntArray:
    """Order that also puts an op after the one its predecessor's taker follows."""
    count = len(previous)
    done = np.zeros(count + 1, dtype=np.bool_)
    done[0] = True
    order = np.empty(count, dtype=np.int64)
    found, moved = 0, True
    queue = np.full((pp, count), -1, dtype=np.int32)
    length = np.zeros(pp, dtype=np.int64)
    for op in range(count):
        queue[rank[op], length[rank[op]]] = op
        length[rank[op]] += 1
    pointer = np.zeros(pp, dtype=np.int64)
    while moved:
        moved = False
        for r in range(pp):
            while pointer[r] < length[r]:
                op = queue[r, pointer[r]]
                ready = done[previous[op]] and done[producer[op]]
                if sent[op] > 0:
                    ready = ready and done[previous[sent[op] - 1]]
                if not ready:
                    break
                done[op + 1] = True
                order[found] = op
                found += 1
                pointer[r] += 1
                moved = True
    return order[:found]


def time_rendezvous(
    table: ActionTable, times: Durations, total: FloatArray, done: FloatArray
) -> None:
    """Time a batch of candidates whose senders wait.

    Args:
        table: The schedule.
        times: Durations of the batch.
        total: Filled in with makespans. Shape [batch].
        done: Filled in with the ends of each stage's backward. Shape [batch, stages].

    Raises:
        StrategyError: If senders wait for each other in a circle.
    """
    program, handshakes = compile_table(table), _handshakes(table)
    ends = np.zeros(len(program) + 1)
    for candidate in range(len(total)):
        _time_rendezvous(
            handshakes.order,
            program.previous,
            program.producer,
            handshakes.sent,
            program.duration_row,
            program.delay_row,
            times.compute_s[candidate],
            times.transfer_s[candidate],
            ends,
        )
        total[candidate] = ends[program.last_of_rank].max()
        done[candidate] = ends[program.last_backward]


@compiled
def _time_rendezvous(
    order: IntArray,
    previous: IntArray,
    producer: IntArray,
    sent: IntArray,
    duration_row: IntArray,
    delay_row: IntArray,
    compute: FloatArray,
    transfer: FloatArray,
    ends: FloatArray,
) -> None:
    for op in order:
        start = ends[previous[op]]
        if producer[op] > 0:
            start = max(start, ends[producer[op]]) + transfer[delay_row[op]]
        if sent[op] > 0:
            taker = sent[op] - 1
            meet = max(ends[previous[op]], ends[previous[taker]])
            start = max(start, meet + transfer[delay_row[taker]])
        ends[op + 1] = start + compute[duration_row[op]]
