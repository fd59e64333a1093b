"""A program whose times live in few places, so that they stay in the first cache.

An op's end is read by the op after it on its rank and by those that take what it sends;
after that its place is used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.simulate.actions import ActionTable, IntArray
from planner.simulate.compiled import compiled, copy_into
from planner.simulate.durations import FloatArray
from planner.simulate.program import compile_table

__all__ = ["LANES", "Registers", "allocate", "time_batch"]

#: Candidates timed side by side: one cache line of doubles.
LANES = 8

_Indices = NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Registers:
    """Where each op of a program reads and writes times; register 0 is the start.

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
