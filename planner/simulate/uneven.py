"""Makespans of uneven stages under schedules whose stages loop over the ranks."""

from __future__ import annotations

import numpy as np

from planner.simulate.durations import FloatArray
from planner.simulate.looped import microbatches_per_round

__all__ = [
    "breadth_first_makespan",
    "one_by_one_makespan",
    "steady_microbatch_seconds",
]


def one_by_one_makespan(
    pp: int,
    num_microbatches: int,
    forward_s: FloatArray,
    backward_s: FloatArray,
    send_s: FloatArray,
) -> FloatArray:
    """1F1B by the chains that stay on one rank and make trips to the last one.

    Such a chain comes down to rank s, is there for all microbatches, and goes back up.
    A trip with a microbatch takes what lies beyond, D, and passes over the n = pp - 1 -
    s actions that the rank has ahead of the next: forwards on the first trip, backwards
    on the last, both on each between. The greatest over s of

    all before s + M (f + b) + (D - n f) + (D - n b) + trips between * (D - n (f + b))

    of which what is below 0 is left out. With fewer than n + 2 microbatches there is
    time for one trip only. No chain is longer than the step, so that this is never too
    long. Source of the order: Narayanan et al. 2019, PipeDream (flushed each step).

    Args:
        pp: Ranks.
        num_microbatches: In a step.
        forward_s: One microbatch. Shape [..., pp].
        backward_s: Its whole backward. Shape [..., pp].
        send_s: Over each boundary, there and back. Shape [..., pp - 1].
    Returns:
        Shape [...].
    """
    work, many = forward_s + backward_s, num_microbatches
    longest = np.zeros(np.broadcast_shapes(work.shape[:-1], send_s.shape[:-1]))
    for rank in range(pp):
        ahead = pp - 1 - rank
        before = work[..., :rank].sum(axis=-1) + send_s[..., :rank].sum(axis=-1)
        beyond = work[..., rank + 1 :].sum(axis=-1) + send_s[..., rank:].sum(axis=-1)
        trips = 1 + (many - 1) // (ahead + 1)
        skipped = min(ahead, many - 1)
        first, last, both = (
            np.maximum(beyond - skipped * own[..., rank], 0.0)
            for own in (forward_s, backward_s, work)
        )
        if ahead == 0:
            away = np.zeros_like(longest)
        elif trips == 1:
            away = np.maximum(first, last)
        else:
            away = first + last + (trips - 2) * both
        longest = np.maximum(longest, before + many * work[..., rank] + away)
    return longest


def breadth_first_makespan(
    pp: int,
    num_microbatches: int,
    forward_s: FloatArray,
    backward_s: FloatArray,
    send_forward_s: FloatArray,
    send_backward_s: FloatArray,
) -> FloatArray:
    """LoopedBFS, exactly, from the first and the last microbatch of each stage.

    A stage runs all microbatches in a row, each as long as the others. When they
    arrive is the greatest of a few straight lines in their number, so that the wait
    of the last one is decided by the first or by itself, never by one in between.
    Source of the order: Lamy-Poirier 2023, Breadth-First Pipeline Parallelism.

    Args:
        pp: Ranks.
        num_microbatches: In a step.
        forward_s: One microbatch. Shape [..., stages].
        backward_s: Its whole backward. Shape [..., stages].
        send_forward_s: Over each boundary. Shape [..., stages - 1].
        send_backward_s: Gradients over the same ones. Shape [..., stages - 1].
    Returns:
        Shape [...].
    """
    there = _sweep(pp, num_microbatches, forward_s, send_forward_s)
    # Gradients go through the stages and over the boundaries from the last one on.
    back = _sweep(
        pp, num_microbatches, backward_s[..., ::-1], send_backward_s[..., ::-1]
    )
    return there + back


def _sweep(
    pp: int, num_microbatches: int, work_s: FloatArray, send_s: FloatArray
) -> FloatArray:
    """When the last microbatch leaves the last stage. Shape [...]."""
    shape = np.broadcast_shapes(work_s.shape[:-1], send_s.shape[:-1])
    arrival = np.zeros((2, *shape))
    ends: list[FloatArray] = []
    for stage in range(work_s.shape[-1]):
        own = work_s[..., stage]
        if stage:
            arrival = ends[-1] + send_s[..., stage - 1]
        free = ends[stage - pp][1] if stage >= pp else np.zeros(shape)
        first = np.maximum(arrival[0], free) + own
        last = np.maximum(first + (num_microbatches - 1) * own, arrival[1] + own)
        ends.append(np.stack([first, last]))
    return np.asarray(ends[-1][1])


def steady_microbatch_seconds(
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    forward_s: FloatArray,
    backward_s: FloatArray,
    weight_s: FloatArray,
    *,
    split_backward: bool,
) -> FloatArray:
    """Seconds of one more microbatch under an interleaved schedule, once it runs.

    A rank runs a round of microbatches on each virtual stage in turn. Which rank is
    slowest may change from turn to turn; what the step waits for is the chain that goes
    through the slowest of each, less what changing ranks costs: the chain reaches the
    next rank with a forward and the one before with a backward, which let it skip
    slots, or goes round the ring the other way (:func:`_detours`). It is the greatest
    sum over rings of ranks, one for each turn.

    Args:
        pp: Ranks.
        virtual_stages: Of each rank.
        num_microbatches: In a step.
        forward_s: One microbatch. Shape [..., stages].
        backward_s: Its whole backward. Shape [..., stages].
        weight_s: Part of it that makes weight gradients. Shape [..., stages].
        split_backward: Whether that part runs apart: InterleavedZeroBubble.
    Returns:
        At least the work of the slowest rank. Shape [...].
    """
    turns = (*forward_s.shape[:-1], virtual_stages, pp)
    forward, backward = forward_s.reshape(turns), backward_s.reshape(turns)
    count = microbatches_per_round(pp, num_microbatches)
    ahead = 1 if split_backward else 2
    slots = np.arange(virtual_stages * count)
    work = np.empty(turns)
    for rank in range(pp):
        late = (virtual_stages - 1) * count + ahead * (pp - 1 - rank)
        back = virtual_stages - 1 - (slots - late) // count % virtual_stages
        both = forward[..., slots // count, rank] + backward[..., back, rank]
        work[..., rank] = both.reshape(*turns[:-1], count).sum(axis=-1)
    input_s = backward_s - weight_s if split_backward else backward_s
    means = (x.mean(axis=-1) for x in (forward_s, input_s, forward_s + backward_s))
    detours = _detours(pp, count, ahead, *means)
    # Axes: where the chain began, where it is.
    start = np.eye(pp, dtype=bool)
    chain = np.where(start, work[..., 0, None, :], -np.inf)
    for turn in range(1, virtual_stages):
        moved = (chain[..., :, None] - detours[..., None, :, :]).max(axis=-2)
        chain = moved + work[..., turn, None, :]
    closed = (chain - np.swapaxes(detours, -1, -2)).max(axis=(-1, -2))
    return np.asarray(closed / count)


def _detours(
    pp: int,
    count: int,
    ahead: int,
    forward_s: FloatArray,
    input_s: FloatArray,
    slot_s: FloatArray,
) -> FloatArray:
    """Seconds that a chain loses by going from one rank to another.

    Going up it takes a forward of each rank and no slot passes; going down it takes an
    input gradient of each rank, and ``ahead`` slots pass on each, which it skips. Round
    the ring it comes out a whole turn of ``count`` slots later.

    Args:
        pp: Ranks.
        count: Microbatches in a round.
        ahead: Forwards that a rank is ahead of the next.
        forward_s: Mean over the stages; as the others. Shape [...].
        input_s: Input gradient, or a backward in one piece.
        slot_s: A forward and a whole backward.
    Returns:
        Negative if the chain gains. Shape [..., from, to].
    """
    ranks = np.arange(pp)
    up = ranks - ranks[:, None]
    forward, back, slot = (x[..., None, None] for x in (forward_s, input_s, slot_s))
    rising = np.minimum(-up * forward, (count - ahead * up) * slot - (pp - up) * back)
    falling = np.minimum(
        -up * (ahead * slot - back), count * slot - (pp + up) * forward
    )
    return np.asarray(np.where(up == 0, 0.0, np.where(up > 0, rising, falling)))
