"""An ActionTable as arithmetic: ops in an order in which each can be timed at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.errors import StrategyError
from planner.simulate.actions import ActionKind, ActionTable, IntArray
from planner.simulate.compiled import compiled

__all__ = ["Program", "compile_table"]

_F = int(ActionKind.FORWARD)
_B = int(ActionKind.BACKWARD)
_I = int(ActionKind.BACKWARD_INPUT)
_W = int(ActionKind.BACKWARD_WEIGHT)
_OVERLAP = int(ActionKind.OVERLAP_F_B)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """Ops in a topological order; an OVERLAP_F_B is two ops that send when both end.

    Index 0 of every time array is "at the start"; op i has index i + 1.

    Attributes:
        kind: FORWARD, BACKWARD, BACKWARD_INPUT or BACKWARD_WEIGHT. Shape [ops].
        stage: Virtual stage. Shape [ops].
        microbatch: Shape [ops].
        rank: Shape [ops].
        previous: Time index of the op before it on its rank. Shape [ops].
        producer: Time index of the op on another rank that sends what it needs;
            0 if nothing is sent to it. Shape [ops].
        duration_row: kind * stages + stage. Shape [ops].
        delay_row: 0 without a transfer, 1 + boundary for activations, stages +
            boundary for gradients; boundary i lies between stages i and i + 1.
            Shape [ops].
        last_of_rank: Time index of the last op of each rank. Shape [pp].
        last_backward: Time index of the op that completes the gradient of each
            stage. Shape [stages].
        counts: Ops per duration row. Shape [4 * stages].
    """

    kind: IntArray
    stage: IntArray
    microbatch: IntArray
    rank: IntArray
    previous: IntArray
    producer: IntArray
    duration_row: IntArray
    delay_row: IntArray
    last_of_rank: IntArray
    last_backward: IntArray
    counts: IntArray

    def __len__(self) -> int:
        return len(self.kind)


@lru_cache(maxsize=256)
def compile_table(table: ActionTable) -> Program:
    """Order the ops of a table so that each comes after all it needs.

    Raises:
        StrategyError: If ranks wait for each other in a circle.
    """
    kind, stage, microbatch, release, offsets = _single_ops(table)
    stages = table.num_stages
    sent = (2, stages, table.num_microbatches)
    producer = np.full(len(kind), -1, dtype=np.int32)
    order = np.empty(len(kind), dtype=np.int64)
    # Compiled code takes long to compile where it makes arrays.
    count = _lockstep(
        kind,
        stage,
        microbatch,
        release,
        offsets,
        table.rank_of_stage,
        np.full(sent, len(kind) + 1, dtype=np.int32),
        np.full(sent, -1, dtype=np.int32),
        offsets[:-1].copy(),
        order,
        producer,
    )
    order = order[:count]
    if len(order) < len(kind):
        stuck = len(kind) - len(order)
        raise StrategyError(
            f"schedule {table.schedule} with pp={table.pp} deadlocks: {stuck} of "
            f"{len(kind)} actions wait for each other; put each action after what it "
            f"needs"
        )
    place = np.zeros(len(kind) + 1, dtype=np.int32)
    place[order + 1] = np.arange(1, len(order) + 1, dtype=np.int32)
    before = np.arange(len(kind), dtype=np.int32)
    before[offsets[:-1][np.diff(offsets) > 0]] = 0
    previous = np.where(before > 0, place[before], np.int32(0))
    kind, stage, microbatch = kind[order], stage[order], microbatch[order]
    sender = place[producer[order] + 1]
    delay = np.where(kind == _F, stage, stages + stage)
    completes = (kind == _B) | (kind == _W)
    last_backward = np.zeros(stages, dtype=np.int32)
    np.maximum.at(
        last_backward, stage[completes], np.flatnonzero(completes).astype(np.int32) + 1
    )
    row = kind * stages + stage
    return Program(
        kind=kind,
        stage=stage,
        microbatch=microbatch,
        rank=table.rank_of_stage[stage],
        previous=previous[order].astype(np.int32),
        producer=sender.astype(np.int32),
        duration_row=row.astype(np.int32),
        delay_row=np.where(sender > 0, delay, 0).astype(np.int32),
        last_of_rank=place[offsets[1:]],
        last_backward=last_backward,
        counts=np.bincount(row, minlength=4 * stages),
    )


def _single_ops(
    table: ActionTable,
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Split pairs: kind, stage, microbatch, op at whose end it sends, rank offsets."""
    paired = table.kind == _OVERLAP
    size = 1 + paired.astype(np.int64)
    first = np.concatenate([[0], np.cumsum(size)])
    head = first[:-1]
    second = head[paired] + 1
    count = int(first[-1])
    kind = np.full(count, _B, dtype=np.int32)
    stage = np.empty(count, dtype=np.int32)
    microbatch = np.empty(count, dtype=np.int32)
    kind[head] = np.where(paired, _F, table.kind)
    stage[head], stage[second] = table.stage, table.paired_stage[paired]
    microbatch[head] = table.microbatch
    microbatch[second] = table.paired_microbatch[paired]
    release = np.arange(count, dtype=np.int32)
    release[head[paired]] += 1
    return kind, stage, microbatch, release, first[table.offsets]


@compiled
def _lockstep(
    kind: IntArray,
    stage: IntArray,
    microbatch: IntArray,
    release: IntArray,
    offsets: IntArray,
    rank_of_stage: IntArray,
    made: IntArray,
    maker: IntArray,
    pointer: IntArray,
    order: IntArray,
    producer: IntArray,
) -> int:
    """Order of ops if all took one unit of time, and the sender each waits for.

    Lockstep order keeps neighbours in the list independent, so that a processor can
    time several at once.

    Args:
        kind: Of each op; likewise ``stage``, ``microbatch`` and ``release``.
        stage: Shape [ops].
        microbatch: Shape [ops].
        release: Shape [ops].
        offsets: First op of each rank, then the number of ops.
        rank_of_stage: Shape [stages].
        made: Later than any time. Filled with when a forward (0) or the input gradient
            (1) of a microbatch is sent. Shape [2, stages, microbatches].
        maker: -1. Filled with the op that sends it.
        pointer: First op of each rank; advanced.
        order: Filled with the order. Shape [ops].
        producer: -1. Filled with the op that each waits for. Shape [ops].
    Returns:
        Number of ops in the order; fewer than there are in a deadlock.
    """
    stages = len(rank_of_stage)
    count, time, moved = 0, 0, True
    while moved:
        moved = False
        for rank in range(len(pointer)):
            op = pointer[rank]
            if op >= offsets[rank + 1]:
                continue
            k, s, m = kind[op], stage[op], microbatch[op]
            what = 0 if k == _F else 1
            where = s - 1 if k == _F else (s if k == _W else s + 1)
            if what == 1 and made[0, s, m] >= time:
                continue
            if 0 <= where < stages:
                if made[what, where, m] >= time:
                    continue
                if rank_of_stage[where] != rank:
                    producer[op] = maker[what, where, m]
            order[count] = op
            count += 1
            pointer[rank] = op + 1
            moved = True
            first = op - 1 if op > offsets[rank] and release[op - 1] == op else op
            for sent in range(first, op + 1):
                if release[sent] == op and kind[sent] != _W:
                    what = 0 if kind[sent] == _F else 1
                    made[what, stage[sent], microbatch[sent]] = time
                    maker[what, stage[sent], microbatch[sent]] = op
        time += 1
    return count
