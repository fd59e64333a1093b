"""Times of a schedule whose transfers share links and whose ranks may share cores.

Event by event: an action that ends puts what it sends on a link, where transfers go one
after the other in the order in which they became ready (ties: lower rank first).
Where more ranks compute on a host than it has slots, all of them slow down alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from planner.errors import StrategyError
from planner.simulate.actions import ActionKind, ActionTable, IntArray
from planner.simulate.durations import Durations, FloatArray, stage_durations
from planner.simulate.engine import Evaluation, busy_seconds
from planner.simulate.program import Program, compile_table
from planner.simulate.shared_kernels import (
    COLUMNS,
    time_with_links,
    time_with_slots,
)

__all__ = ["Sharing", "check_sharing", "shared_op_times", "simulate_shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Who shares what, laid out for the kernels.

    Attributes:
        link_of: Per row of ``Durations.transfer_s``, -1 for a link of its own.
            Shape [2 * stages - 1].
        num_links: Links.
        host_of: Host of each rank. Shape [pp].
        slots: Ranks of each host that can compute at full rate; empty if nothing is
            shared. Shape [hosts] or [0].
    """

    link_of: IntArray
    num_links: int
    host_of: IntArray
    slots: FloatArray


def simulate_shared(
    table: ActionTable,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    weight_s: ArrayLike | None = None,
    send_forward_s: ArrayLike | None = None,
    send_backward_s: ArrayLike | None = None,
    *,
    link_of_forward: ArrayLike | None = None,
    link_of_backward: ArrayLike | None = None,
    host_of_rank: ArrayLike | None = None,
    slots_of_host: ArrayLike | None = None,
) -> Evaluation:
    """Makespan, busy time and end of each stage's backward, with links shared.

    Computing overlaps transfers. Durations and batch as in
    :func:`planner.simulate.makespan`; a transfer holds its link for its whole duration.

    Args:
        table: The schedule.
        forward_s: One microbatch, each virtual stage. Shape [..., stages].
        backward_s: Its input gradient, or whole backward. Shape [..., stages].
        weight_s: Its weight gradient. Shape [..., stages].
        send_forward_s: Activations over each boundary. Shape [..., stages - 1].
        send_backward_s: Gradients over each boundary. Shape [..., stages - 1].
        link_of_forward: Link that the activations of each boundary use; equal numbers
            share one, -1 shares with none. -1 for all if left out. Shape [stages - 1].
        link_of_backward: The same for gradients. Shape [stages - 1].
        host_of_rank: Host of each rank; all on host 0 if left out. Shape [pp].
        slots_of_host: Ranks that compute at full rate at the same time on each host;
            with more, each runs at slots / ranks of its rate. Not limited if left out.
            Shape [hosts].
    Returns:
        As :func:`planner.simulate.evaluate`; ``busy_s`` counts work, not the time that
        it takes on a shared core.
    Raises:
        StrategyError: If a shape does not fit, a duration is negative, a link or a
            host is not numbered from 0, or the ranks wait for each other in a circle.
    """
    times = stage_durations(
        table, forward_s, backward_s, weight_s, send_forward_s, send_backward_s
    )
    sharing = check_sharing(
        table, link_of_forward, link_of_backward, host_of_rank, slots_of_host
    )
    flow = _flow(table)
    total = np.empty(len(times.compute_s))
    done = np.empty((len(total), table.num_stages))
    if len(sharing.slots):
        for candidate in range(len(total)):
            _, ends = shared_op_times(table, times, sharing, candidate)
            total[candidate] = ends.max()
            done[candidate] = ends[flow.program.last_backward - 1]
    else:
        _run_links(flow, times, sharing, total, done)
    return Evaluation(
        makespan_s=total.reshape(times.shape),
        busy_s=busy_seconds(table, flow.program, times),
        backward_done_s=done.reshape(*times.shape, table.num_stages),
    )


def shared_op_times(
    table: ActionTable, times: Durations, sharing: Sharing, candidate: int = 0
) -> tuple[FloatArray, FloatArray]:
    """Start and end of every op of one candidate, in the order of the table's program.

    Returns:
        Starts and ends, each of shape [ops].
    """
    flow = _flow(table)
    ends = np.empty(len(flow.rows))
    if not len(sharing.slots):
        one = Durations(
            shape=(),
            compute_s=times.compute_s[candidate : candidate + 1],
            transfer_s=times.transfer_s[candidate : candidate + 1],
        )
        done = np.empty((1, table.num_stages))
        _run_links(flow, one, sharing, np.empty(1), done, ends)
        ends = ends[flow.place]
        starts = ends - one.compute_s[0, flow.program.duration_row]
        return np.maximum(starts, 0.0), ends
    starts = np.empty_like(ends)
    time_with_slots(
        flow.rows,
        flow.offsets,
        times.compute_s[candidate],
        times.transfer_s[candidate],
        sharing.link_of,
        sharing.num_links,
        sharing.host_of,
        sharing.slots,
        starts,
        ends,
    )
    return starts[flow.place], ends[flow.place]


def _run_links(
    flow: _Flow,
    times: Durations,
    sharing: Sharing,
    total: FloatArray,
    done: FloatArray,
    ends: FloatArray | None = None,
) -> None:
    time_with_links(
        flow.rows,
        flow.offsets,
        times.compute_s,
        times.transfer_s,
        sharing.link_of,
        sharing.num_links,
        flow.place[flow.program.last_backward - 1],
        np.empty(len(flow.rows)) if ends is None else ends,
        total,
        done,
    )


def check_sharing(
    table: ActionTable,
    link_of_forward: ArrayLike | None = None,
    link_of_backward: ArrayLike | None = None,
    host_of_rank: ArrayLike | None = None,
    slots_of_host: ArrayLike | None = None,
) -> Sharing:
    """Check who shares what; see :func:`simulate_shared`.

    Raises:
        StrategyError: If a shape does not fit or a number is out of range.
    """
    boundaries = table.num_stages - 1
    forward = _numbers("link_of_forward", link_of_forward, boundaries, -1)
    backward = _numbers("link_of_backward", link_of_backward, boundaries, -1)
    links = np.concatenate([np.array([-1], dtype=np.int32), forward, backward])
    hosts = _numbers("host_of_rank", host_of_rank, table.pp, 0)
    slots = np.zeros(0) if slots_of_host is None else np.asarray(slots_of_host, float)
    if len(slots):
        if hosts.min() < 0 or hosts.max() >= len(slots):
            raise StrategyError(
                f"host_of_rank names host {hosts.max()}, slots_of_host has "
                f"{len(slots)} hosts; number hosts from 0 and give slots for each"
            )
        if not slots.min() > 0:
            raise StrategyError(
                f"slots_of_host has {slots.min():g}; each host needs more than 0"
            )
    return Sharing(
        link_of=links, num_links=int(links.max()) + 1, host_of=hosts, slots=slots
    )


def _numbers(name: str, values: ArrayLike | None, size: int, default: int) -> IntArray:
    if values is None:
        return np.full(size, default, dtype=np.int32)
    array = np.asarray(values)
    if array.shape != (size,) or (size and array.dtype.kind not in "iu"):
        raise StrategyError(
            f"{name} has shape {list(array.shape)} and dtype {array.dtype}; the "
            f"schedule needs {size} integers"
        )
    if size and array.min() < -1:
        raise StrategyError(f"{name} has {array.min()}; use -1 or a number from 0")
    return array.astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flow:
    """A program with the ops of each rank in one piece, and who takes what they send.

    Attributes:
        program: The program.
        rows: See :data:`planner.simulate.shared_kernels.COLUMNS`. Shape [ops, 8].
        offsets: First row of each rank. Shape [pp + 1].
        place: Row of each op of the program. Shape [ops].
    """

    program: Program
    rows: IntArray
    offsets: IntArray
    place: IntArray


@lru_cache(maxsize=256)
def _flow(table: ActionTable) -> _Flow:
    program = compile_table(table)
    order = np.argsort(program.rank, kind="stable")
    place = np.empty(len(program), dtype=np.int64)
    place[order] = np.arange(len(program))
    rows = np.full((len(program), COLUMNS), -1, dtype=np.int32)
    rows[place, 0] = program.duration_row
    rows[place, 7] = program.producer > 0
    takers = np.flatnonzero(program.producer > 0)
    senders = place[program.producer[takers] - 1]
    # An op that ends a pair sends a forward and a gradient; each has its columns.
    column = np.where(program.kind[takers] == ActionKind.FORWARD, 1, 4)
    rows[senders, column] = place[takers]
    rows[senders, column + 1] = program.rank[takers]
    rows[senders, column + 2] = program.delay_row[takers]
    offsets = np.zeros(table.pp + 1, dtype=np.int64)
    np.cumsum(np.bincount(program.rank, minlength=table.pp), out=offsets[1:])
    return _Flow(program=program, rows=rows, offsets=offsets, place=place)
