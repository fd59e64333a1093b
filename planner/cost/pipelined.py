"""From the times of stages to the end of a pipeline, transfers queueing on links.

What a rank sends to another goes over one link, message after message: a transfer waits
until the bytes of the one before are through. Over links that are slower than the
stages between them, as between sites, that is what bounds the step; a simulator that
lets any number of transfers pass at once calls GPipe's forwards free to overlap all
of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_times import StageTimes, by_rank, ranks_of_stages
from planner.errors import StrategyError
from planner.schema import (
    FORWARDS_FIRST_SCHEDULES,
    SPLIT_BACKWARD_SCHEDULES,
    Strategy,
)
from planner.simulate import (
    ActionTable,
    Sharing,
    check_sharing,
    closed_form_of_stages,
    evaluate,
    simulate_shared,
)

__all__ = ["Pipeline", "queues", "time_pipeline"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """End of the pipeline, without and with transfers, and per rank. [pp]."""

    plain_s: float
    sent_s: float
    done_s: Array
    busy_s: Array


def time_pipeline(
    strategy: Strategy, times: StageTimes, table: ActionTable | None, fidelity: str
) -> Pipeline:
    """Time all microbatches of a step.

    Args:
        strategy: With stages.
        times: One microbatch on each of them.
        table: The order of actions; simulation alone wants it.
        fidelity: ``simulated`` or ``analytic``.

    Raises:
        StrategyError: If a pipeline is to be simulated and there is no table.
    """
    rank, pp = ranks_of_stages(strategy), strategy.mesh.pp
    work = times.forward + times.backward
    busy = strategy.num_microbatches * by_rank(work, rank, pp)
    if pp == 1:
        total = float(busy[0])
        return Pipeline(plain_s=total, sent_s=total, done_s=busy, busy_s=busy)
    if fidelity == "analytic":
        plain, sent = _by_formula(strategy, times)
        return Pipeline(
            plain_s=plain, sent_s=sent, done_s=np.full(pp, sent), busy_s=busy
        )
    if table is None:
        raise StrategyError(f"schedule {strategy.schedule!r} has no order to simulate")
    return _simulated(strategy, times, table, busy)


def _simulated(
    strategy: Strategy, times: StageTimes, table: ActionTable, busy: Array
) -> Pipeline:
    backward, weight = times.halves(strategy)
    stages = times.forward, backward, weight
    sharing = queues(strategy, times, table)
    # Both at once: without transfers, and with them.
    sends = np.stack([np.zeros_like(times.send), times.send])
    timed = evaluate(table, *stages, sends, sends)
    plain, sent = timed.makespan_s.tolist()
    ends = timed.backward_done_s[1]
    if sharing is not None:
        there, back = np.split(sharing.link_of[1:], 2)
        queued = simulate_shared(
            table,
            *stages,
            times.send,
            times.send,
            link_of_forward=there,
            link_of_backward=back,
            latency_s=times.latency,
        )
        sent, ends = float(queued.makespan_s), queued.backward_done_s
    done = np.zeros(strategy.mesh.pp)
    np.maximum.at(done, ranks_of_stages(strategy), ends)
    return Pipeline(plain_s=plain, sent_s=sent, done_s=done, busy_s=busy)


def _by_formula(strategy: Strategy, times: StageTimes) -> tuple[float, float]:
    """Seconds without and with transfers."""
    key = (
        strategy.schedule,
        strategy.mesh.pp,
        strategy.virtual_stages,
        strategy.num_microbatches,
    )
    # Of equal stages: the mean is of those that do split their backward.
    parts = (times.forward, times.backward - times.weight, times.weight)
    plain = float(closed_form_of_stages(*key, *parts))
    sent = float(closed_form_of_stages(*key, *parts, times.send, times.send))
    return plain, max(sent, _slow_links(strategy, times))


def _slow_links(strategy: Strategy, times: StageTimes) -> float:
    """As :func:`planner.cost.row_waits.slow_links`, of given stages."""
    rank, pp, virtual = (
        ranks_of_stages(strategy),
        strategy.mesh.pp,
        strategy.virtual_stages,
    )
    there, back = _directions(strategy)
    held = np.maximum(times.send - times.latency, 0.0)
    halves = [
        (by_rank(work, rank, pp), np.bincount(way, held).max())
        for work, way in ((times.forward, there), (times.backward, back))
    ]
    many = strategy.num_microbatches
    whole = float((times.forward + times.backward).sum())
    if strategy.schedule in FORWARDS_FIRST_SCHEDULES:
        if all(busy <= own.max() for own, busy in halves):
            return 0.0
        each = sum(max(float(own.max()), float(busy)) for own, busy in halves)
        fill = whole + 2 * float(times.send.sum()) - each
        return many * each + fill / virtual
    link = np.bincount(np.concatenate([there, back]), np.tile(held, 2)).max()
    split = strategy.schedule in SPLIT_BACKWARD_SCHEDULES
    once = whole / len(rank) if split or virtual > 1 else whole
    return many * float(link) + once


def _directions(strategy: Strategy) -> tuple[Index, Index]:
    """Number of the way over each boundary, forward and back. Shapes [stages - 1].

    A way leads from one rank to another; what stays on a rank takes one, too.
    """
    rank, pp = ranks_of_stages(strategy), strategy.mesh.pp
    here, there = rank[:-1], rank[1:]
    return here * pp + there, there * pp + here


def queues(strategy: Strategy, times: StageTimes, table: ActionTable) -> Sharing | None:
    """Who waits for whom on links; None where no transfer can meet another.

    A rank sends when an action ends, so that what it sends is at least as far apart
    as its shortest action that sends is long: shorter transfers never meet. (Ends of
    overlapped pairs send twice at once; where that is short, it is left out.)

    Args:
        strategy: A pipeline.
        times: One microbatch on each of its stages.
        table: Its order of actions.
    """
    backward, _ = times.halves(strategy)
    there, back = _directions(strategy)
    count = int(max(there.max(), back.max())) + 1
    apart = np.full(count, np.inf)
    np.minimum.at(apart, there, times.forward[:-1])
    np.minimum.at(apart, back, backward[1:])
    held = np.maximum(times.send - times.latency, 0.0)
    if (held <= np.minimum(apart[there], apart[back])).all():
        return None
    _, number = np.unique(np.concatenate([there, back]), return_inverse=True)
    links = np.where(np.tile(times.send, 2) > 0, number, -1)
    return check_sharing(table, *np.split(links, 2), latency_s=times.latency)
