"""Times of a schedule whose transfers share links and whose ranks may share cores.

Event by event: an action that ends puts what it sends on a link, where transfers go one
after the other in the order in which they became ready (ties: lower rank first). A
transfer holds its link for as long as its bytes take; its latency passes beside others.
Where more ranks compute on a host than it has slots, all of them slow down alike.

Transfers over a link that only one rank sends over go in the order of its actions: if
all links are like that and nobody shares a host's slots, one pass over the ops does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from planner.errors import StrategyError
from planner.simulate.actions import ActionTable, IntArray
from planner.simulate.durations import Durations, FloatArray, stage_durations
from planner.simulate.engine import Evaluation, busy_seconds
from planner.simulate.event_loops import (
    Indices,
    flow_of,
    has_one_sender,
    time_in_order,
    time_with_links,
    time_with_slots,
)

__all__ = ["Sharing", "check_sharing", "shared_op_times", "simulate_shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Shared links and cores, laid out for the kernels.

    Attributes:
        link_of: Per row of ``Durations.transfer_s``, -1 for a link of its own.
            Shape [2 * stages - 1].
        latency_s: Part of each transfer that does not hold its link.
            Shape [2 * stages - 1].
        num_links: Links.
        host_of: Host of each rank. Shape [pp].
        slots: Ranks of each host that can compute at full rate; empty if nothing is
            shared. Shape [hosts] or [0].
    """

    link_of: IntArray
    latency_s: FloatArray
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
    latency_s: ArrayLike = 0.0,
    host_of_rank: ArrayLike | None = None,
    slots_of_host: ArrayLike | None = None,
) -> Evaluation:
    """Makespan, busy time and end of each stage's backward, with links shared.

    Computing overlaps transfers. Durations and batch as in
    :func:`planner.simulate.makespan`; a transfer holds its link but for its latency.

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
        latency_s: Part of the transfers over each boundary, both ways, that does not
            hold their link. Shape [stages - 1], or one number.
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
        table,
        link_of_forward,
        link_of_backward,
        host_of_rank,
        slots_of_host,
        latency_s=latency_s,
    )
    flow = flow_of(table)
    if len(sharing.slots):
        last = np.zeros(times.compute_s.shape)
        for candidate in range(len(last)):
            _, ends = shared_op_times(table, times, sharing, candidate)
            np.maximum.at(last[candidate], flow.program.duration_row, ends)
    else:
        last = _last_ends(table, times, sharing, np.empty(0))
    # A stage's gradient is complete at the last end of what completes it.
    done = last[:, flow.program.duration_row[flow.program.last_backward - 1]]
    return Evaluation(
        makespan_s=last.max(axis=1).reshape(times.shape),
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
    flow = flow_of(table)
    ends = np.empty(len(flow))
    if not len(sharing.slots):
        one = Durations(
            shape=(),
            compute_s=times.compute_s[candidate : candidate + 1],
            transfer_s=times.transfer_s[candidate : candidate + 1],
        )
        _last_ends(table, one, sharing, ends)
        ends = ends[flow.place]
        starts = ends - one.compute_s[0, flow.program.duration_row]
        return np.maximum(starts, 0.0), ends
    starts = np.empty_like(ends)
    time_with_slots(
        flow.rows,
        flow.arrival,
        flow.first,
        times.compute_s[candidate],
        times.transfer_s[candidate],
        *_links(sharing),
        sharing.latency_s,
        sharing.host_of,
        sharing.slots,
        starts,
        ends,
    )
    return starts[flow.place], ends[flow.place]


def _last_ends(
    table: ActionTable, times: Durations, sharing: Sharing, ends: FloatArray
) -> FloatArray:
    """End of the last op of each duration row. Shape [batch, 4 * stages].

    Fills in ``ends`` of all ops if it has a place for them. Shape [ops] or [0].
    """
    flow, last = flow_of(table), np.empty(times.compute_s.shape)
    rest = (
        times.compute_s,
        times.transfer_s,
        *_links(sharing),
        sharing.latency_s,
        ends,
        last,
    )
    if has_one_sender(table.rank_of_stage, sharing.link_of):
        ranks = flow.program.rank
        time_in_order(flow.rows, flow.arrival, flow.place, ranks, *rest)
    else:
        time_with_links(flow.rows, flow.arrival, flow.first, *rest)
    return last


def _links(sharing: Sharing) -> tuple[Indices, Indices]:
    """Link that each transfer row waits for, and link that it holds.

    Rows that share with none wait for a link that nobody holds.
    """
    apart = sharing.link_of < 0
    waits = np.where(apart, sharing.num_links, sharing.link_of)
    holds = np.where(apart, sharing.num_links + 1, sharing.link_of)
    return waits.astype(np.uint32), holds.astype(np.uint32)


def check_sharing(
    table: ActionTable,
    link_of_forward: ArrayLike | None = None,
    link_of_backward: ArrayLike | None = None,
    host_of_rank: ArrayLike | None = None,
    slots_of_host: ArrayLike | None = None,
    *,
    latency_s: ArrayLike = 0.0,
) -> Sharing:
    """Check shared links and cores; see :func:`simulate_shared`.

    Raises:
        StrategyError: If a shape does not fit or a number is out of range.
    """
    boundaries = table.num_stages - 1
    forward = _numbers("link_of_forward", link_of_forward, boundaries, -1)
    backward = _numbers("link_of_backward", link_of_backward, boundaries, -1)
    links = np.concatenate([np.array([-1], dtype=np.int32), forward, backward])
    delay = np.asarray(latency_s, dtype=np.float64)
    if delay.shape not in ((), (boundaries,)) or not (delay >= 0).all():
        raise StrategyError(
            f"latency_s={delay.tolist()} has shape {list(delay.shape)}; give seconds "
            f"of 0 or more, one number or one for each of {boundaries} boundaries"
        )
    once = np.broadcast_to(delay, (boundaries,))
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
        link_of=links,
        latency_s=np.concatenate([np.zeros(1), once, once]),
        num_links=int(links.max()) + 1,
        host_of=hosts,
        slots=slots,
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
