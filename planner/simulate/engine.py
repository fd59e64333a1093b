"""Times of a schedule whose order is fixed and whose transfers have links of their own.

Every action starts when the one before it on its rank has ended and what it needs has
arrived. That is one pass over a list of ops, 30 to 200 microseconds a candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from planner.simulate.actions import ActionTable, IntArray
from planner.simulate.compiled import compiled
from planner.simulate.durations import Durations, FloatArray, stage_durations
from planner.simulate.program import Program, compile_table
from planner.simulate.registers import LANES, allocate, time_batch
from planner.simulate.rendezvous import time_rendezvous

__all__ = ["Evaluation", "busy_seconds", "evaluate", "makespan", "op_ends"]


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
