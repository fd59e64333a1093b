"""Times of a schedule whose order is fixed and whose transfers have links of their own.

Every action starts when the one before it on its rank has ended and what it needs has
arrived. That is one pass over a list of ops, 30 to 200 microseconds a candidate.

Times live in few places, so that they stay in the first cache: an op's end is read by
the op after it on its rank and by those that take what it sends; after that its place
is used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import StrategyError
from planner.simulate.actions import ActionTable, IntArray
from planner.simulate.compiled import compiled, copy_into
from planner.simulate.durations import Durations, FloatArray, stage_durations
from planner.simulate.program import Program, compile_table

__all__ = [
    "Evaluation",
    "Registers",
    "allocate",
    "busy_seconds",
    "evaluate",
    "makespan",
    "op_ends",
    "time_batch",
    "time_rendezvous",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Times of a batch of candidates.

    Attributes:
        makespan_s: End of the last action. Shape [...].
        busy_s: Time that each rank computes. Shape [..., pp].
        backward_done_s: When the last gradient of each virtual stage is complete, so
            that its reduction over replicas can start. Shape [..., stages].
    """

    makespan_s: FloatArray
    busy_s: FloatArray
    backward_done_s: FloatArray

    @property
    def bubble_fraction(self) -> FloatArray:
        """Share of the step in which each rank does not compute. Shape [..., pp]."""
        total = np.where(self.makespan_s > 0, self.makespan_s, 1.0)[..., None]
        return 1.0 - self.busy_s / total


def makespan(
    table: ActionTable,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    weight_s: ArrayLike | None = None,
    send_forward_s: ArrayLike | None = None,
    send_backward_s: ArrayLike | None = None,
    *,
    rendezvous: bool = False,
) -> FloatArray:
    """Seconds from the first action to the end of the last.

    Args:
        table: The schedule.
        forward_s: One microbatch, each virtual stage. Shape [..., stages].
        backward_s: Its input gradient; or its whole backward, if ``weight_s`` is left
            out. Shape [..., stages].
        weight_s: Its weight gradient; 0 if left out. A full backward takes
            ``backward_s + weight_s``. Shape [..., stages].
        send_forward_s: Delay of activations from each stage to the next; counts only
            where the two lie on different ranks. Shape [..., stages - 1].
        send_backward_s: Delay of gradients over the same boundaries.
            Shape [..., stages - 1].
        rendezvous: A transfer starts only when its receiver has ended its action
            before, and its sender waits for it. By default sends are asynchronous.
    Returns:
        Shape [...].
    Raises:
        StrategyError: If a shape does not fit, a duration is negative, or the ranks
            wait for each other in a circle.
    """
    times = stage_durations(
        table, forward_s, backward_s, weight_s, send_forward_s, send_backward_s
    )
    total, _ = _run(table, times, rendezvous=rendezvous)
    return total.reshape(times.shape)


def evaluate(
    table: ActionTable,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    weight_s: ArrayLike | None = None,
    send_forward_s: ArrayLike | None = None,
    send_backward_s: ArrayLike | None = None,
    *,
    rendezvous: bool = False,
) -> Evaluation:
    """Makespan, busy time of each rank and end of each stage's backward.

    Args and errors as :func:`makespan`.
    """
    times = stage_durations(
        table, forward_s, backward_s, weight_s, send_forward_s, send_backward_s
    )
    total, done = _run(table, times, rendezvous=rendezvous)
    return Evaluation(
        makespan_s=total.reshape(times.shape),
        busy_s=busy_seconds(table, compile_table(table), times),
        backward_done_s=done.reshape(*times.shape, table.num_stages),
    )


def _run(
    table: ActionTable, times: Durations, *, rendezvous: bool
) -> tuple[FloatArray, FloatArray]:
    """Makespans and ends of each stage's backward. Shapes [batch], [batch, stages]."""
    total = np.empty(len(times.compute_s))
    done = np.empty((len(times.compute_s), table.num_stages))
    if rendezvous:
        time_rendezvous(table, times, total, done)
        return total, done
    places = allocate(table)
    time_batch(
        places.previous,
        places.producer,
        places.result,
        places.duration_row,
        places.delay_row,
        places.last_of_rank,
        places.last_backward,
        times.compute_s,
        times.transfer_s,
        total,
        done,
        np.zeros((places.count, LANES)),
        np.zeros((times.compute_s.shape[1], LANES)),
        np.zeros((times.transfer_s.shape[1], LANES)),
    )
    return total, done


def op_ends(table: ActionTable, times: Durations) -> FloatArray:
    """End of every op of the first candidate; index 0 is the start.

    Returns:
        In the order of :func:`planner.simulate.program.compile_table`.
        Shape [ops + 1].
    """
    program = compile_table(table)
    ends = np.zeros(len(program) + 1)
    _time_one(
        program.previous,
        program.producer,
        program.duration_row,
        program.delay_row,
        times.compute_s[0],
        times.transfer_s[0],
        ends,
    )
    return ends


def busy_seconds(table: ActionTable, program: Program, times: Durations) -> FloatArray:
    """Work of each rank in a step. Shape [..., pp]."""
    stages = table.num_stages
    work = (times.compute_s * program.counts).reshape(-1, 4, stages).sum(axis=1)
    busy = np.zeros((len(work), table.pp))
    for stage, rank in enumerate(table.rank_of_stage.tolist()):
        busy[:, rank] += work[:, stage]
    return busy.reshape(*times.shape, table.pp)


@compiled
def _time_one(
    previous: IntArray,
    producer: IntArray,
    duration_row: IntArray,
    delay_row: IntArray,
    compute: FloatArray,
    transfer: FloatArray,
    ends: FloatArray,
) -> None:
    for op in range(len(previous)):
        ready = ends[previous[op]]
        arrival = ends[producer[op]] + transfer[delay_row[op]]
        ends[op + 1] = max(ready, arrival) + compute[duration_row[op]]


# -- A program whose times live in few places ------------------------------------

#: Candidates timed side by side: one cache line of doubles.
LANES = 8

_Indices = NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Registers:
    """Places where each op of a program reads and writes times; 0 is the start.

    Indices are unsigned, which spares the kernel a check for negative ones.

    Attributes:
        previous: Register of the op before on the rank. Shape [ops].
        producer: Register of the op that sends what this one needs. Shape [ops].
        result: Register for the op's own end. Shape [ops].
        duration_row: As in Program. Shape [ops].
        delay_row: As in Program. Shape [ops].
        last_of_rank: Register of each rank's last op. Shape [pp].
        last_backward: Register of the op that completes each stage. Shape [stages].
        count: Registers.
    """

    previous: _Indices
    producer: _Indices
    result: _Indices
    duration_row: _Indices
    delay_row: _Indices
    last_of_rank: _Indices
    last_backward: _Indices
    count: int


@lru_cache(maxsize=256)
def allocate(table: ActionTable) -> Registers:
    """Give the ops of a table's program their registers."""
    program = compile_table(table)
    kept = np.concatenate([program.last_of_rank, program.last_backward])
    room = np.zeros((3, len(program.previous) + 1), dtype=np.int32)
    count = _assign(program.previous, program.producer, kept, *room)
    result = room[0]
    previous, producer, ranks, stages = (
        result[index].astype(np.uint32)
        for index in (
            program.previous,
            program.producer,
            program.last_of_rank,
            program.last_backward,
        )
    )
    return Registers(
        previous=previous,
        producer=producer,
        result=result[1:].astype(np.uint32),
        duration_row=program.duration_row.astype(np.uint32),
        delay_row=program.delay_row.astype(np.uint32),
        last_of_rank=ranks,
        last_backward=stages,
        count=count,
    )


@compiled
def _assign(
    previous: IntArray,
    producer: IntArray,
    kept: IntArray,
    result: IntArray,
    readers: IntArray,
    spare: IntArray,
) -> int:
    """Fill in the register of each time index, and return how many there are.

    ``result`` and ``readers`` are 0, ``spare`` is room; one longer than the ops.
    """
    for op in range(len(previous)):
        readers[previous[op]] += 1
        readers[producer[op]] += 1
    readers[0] += 1
    for index in kept:
        readers[index] += 1
    spares, count = 0, 1
    for op in range(len(previous)):
        for index in (previous[op], producer[op]):
            readers[index] -= 1
            if readers[index] == 0:
                spare[spares] = result[index]
                spares += 1
        if spares > 0:
            spares -= 1
            result[op + 1] = spare[spares]
        else:
            result[op + 1] = count
            count += 1
    return count


@compiled
def time_batch(
    previous: _Indices,
    producer: _Indices,
    result: _Indices,
    duration_row: _Indices,
    delay_row: _Indices,
    last_of_rank: _Indices,
    last_backward: _Indices,
    compute: FloatArray,
    transfer: FloatArray,
    total: FloatArray,
    done: FloatArray,
    ends: FloatArray,
    own: FloatArray,
    move: FloatArray,
) -> None:
    """Time a batch of candidates, :data:`LANES` at once.

    Args:
        previous: This and the next six as in :class:`Registers`.
        producer: Shape [ops].
        result: Shape [ops].
        duration_row: Shape [ops].
        delay_row: Shape [ops].
        last_of_rank: Shape [pp].
        last_backward: Shape [stages].
        compute: As ``Durations.compute_s``. Shape [batch, 4 * stages].
        transfer: As ``Durations.transfer_s``. Shape [batch, 2 * stages - 1].
        total: Filled in with makespans. Shape [batch].
        done: Filled in with the ends of each stage's backward. Shape [batch, stages].
        ends: 0. Room for the registers. Shape [count, LANES].
        own: Room for durations. Shape [4 * stages, LANES].
        move: Room for transfers. Shape [2 * stages - 1, LANES].
    """
    batch = len(total)
    for first in range(0, batch, LANES):
        lanes = min(LANES, batch - first)
        for lane in range(lanes):
            copy_into(own[:, lane], compute[first + lane])
            copy_into(move[:, lane], transfer[first + lane])
        for op in range(len(previous)):
            before, sender, own_row = previous[op], producer[op], duration_row[op]
            move_row, end = delay_row[op], result[op]
            for lane in range(LANES):
                ready = ends[before, lane]
                arrival = ends[sender, lane] + move[move_row, lane]
                start = ready if ready > arrival else arrival
                ends[end, lane] = start + own[own_row, lane]
        for lane in range(lanes):
            latest = 0.0
            for index in last_of_rank:
                latest = max(latest, ends[index, lane])
            total[first + lane] = latest
            for stage in range(len(last_backward)):
                done[first + lane, stage] = ends[last_backward[stage], lane]


# -- Sends that wait for their receivers, as with small buffers ------------------


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
