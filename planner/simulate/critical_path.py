"""Counts of the actions that make up the longest chain of a schedule."""

from __future__ import annotations

import numpy as np

from planner.simulate.actions import ActionKind, ActionTable, IntArray
from planner.simulate.compiled import compiled
from planner.simulate.durations import FloatArray, stage_durations
from planner.simulate.engine import op_ends
from planner.simulate.program import compile_table

__all__ = ["critical_path_counts"]

_F = int(ActionKind.FORWARD)
_I = int(ActionKind.BACKWARD_INPUT)
_W = int(ActionKind.BACKWARD_WEIGHT)


def critical_path_counts(
    table: ActionTable,
    forward_s: float,
    backward_s: float,
    weight_s: float,
    send_forward_s: float,
    send_backward_s: float,
) -> IntArray:
    """Count the actions that the makespan of equal stages is a sum of.

    The counts of every chain, times any durations, bound the makespan from below; at
    the durations given here they are it.

    Returns:
        Forwards, input gradients, weight gradients, activation and gradient transfers
        on the longest chain. Shape [5].
    """
    times = stage_durations(
        table, forward_s, backward_s, weight_s, send_forward_s, send_backward_s
    )
    program = compile_table(table)
    ends = op_ends(table, times)
    last = program.last_of_rank[np.argmax(ends[program.last_of_rank])]
    return _walk_back(
        int(last),
        program.kind,
        program.previous,
        program.producer,
        program.delay_row,
        times.transfer_s[0],
        ends,
        table.num_stages,
        np.zeros(5, dtype=np.int64),
    )


@compiled
def _walk_back(
    op: int,
    kind: IntArray,
    previous: IntArray,
    producer: IntArray,
    delay_row: IntArray,
    transfer: FloatArray,
    ends: FloatArray,
    stages: int,
    counts: IntArray,
) -> IntArray:
    while op > 0:
        row = op - 1
        what = kind[row]
        if what == _F:
            counts[0] += 1
        elif what == _I:
            counts[1] += 1
        elif what == _W:
            counts[2] += 1
        else:
            counts[1] += 1
            counts[2] += 1
        arrival = ends[producer[row]] + transfer[delay_row[row]]
        if producer[row] > 0 and arrival > ends[previous[row]]:
            counts[3 if delay_row[row] < stages else 4] += 1
            op = producer[row]
        else:
            op = previous[row]
    return counts
