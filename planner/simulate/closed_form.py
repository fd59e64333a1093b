"""Makespans by formula: equal stages of many strategies at once, and uneven stages.

The makespan of equal stages is the greatest of a few sums, which
:mod:`planner.simulate.chains` finds; any candidate then costs a few multiplications.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.schema.schedules import schedule_name, schedule_spec
from planner.simulate.actions import actions
from planner.simulate.chains import bubble_coefficients
from planner.simulate.compiled import compiled
from planner.simulate.durations import FloatArray
from planner.simulate.looped import microbatches_per_round

__all__ = [
    "breadth_first_makespan",
    "closed_form_makespan",
    "closed_form_of_stages",
    "one_by_one_makespan",
    "steady_microbatch_seconds",
]


def closed_form_makespan(
    schedule: str | Sequence[str] | NDArray[np.integer],
    pp: ArrayLike,
    virtual_stages: ArrayLike,
    num_microbatches: ArrayLike,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    weight_s: ArrayLike = 0.0,
    send_forward_s: ArrayLike = 0.0,
    send_backward_s: ArrayLike = 0.0,
    *,
    slowest_rank_s: ArrayLike | None = None,
) -> FloatArray:
    """Seconds of a step's pipeline, for many strategies at once.

    max over chains of (n_f f + n_b b + n_w w + n_sf send_f + n_sb send_b)
    + (M - 1) (slowest rank - mean rank)

    Exact up to the sampling of chains for equal stages (the last term is 0); for
    uneven 1F1B stages it is sum + (M - 1) max, at most a fill too long. Every argument
    broadcasts, shape [...].

    Args:
        schedule: Name or names, or codes of :mod:`planner.schema.schedules`.
        pp: Ranks.
        virtual_stages: Of each rank.
        num_microbatches: In a step.
        forward_s: One microbatch, mean over the virtual stages.
        backward_s: Its input gradient, or whole backward if ``weight_s`` is left out.
        weight_s: Its weight gradient.
        send_forward_s: Activations over one boundary between ranks.
        send_backward_s: Gradients over one boundary between ranks.
        slowest_rank_s: Work of the busiest rank for one microbatch, all its virtual
            stages, forward and backward. Equal stages if left out.
    Returns:
        Shape [...].
    Raises:
        UnknownNameError: If a schedule has no such name.
        StrategyError: If torch refuses one of the combinations.
    """
    keys = np.broadcast_arrays(
        _codes(schedule),
        *(np.asarray(x) for x in (pp, virtual_stages, num_microbatches)),
    )
    times = [
        np.asarray(x, dtype=np.float64)
        for x in (forward_s, backward_s, weight_s, send_forward_s, send_backward_s)
    ]
    shape = np.broadcast_shapes(keys[0].shape, *(x.shape for x in times))
    if slowest_rank_s is not None:
        shape = np.broadcast_shapes(shape, np.shape(slowest_rank_s))
    groups, group = _group(np.stack([key.ravel() for key in keys], axis=1))
    group = np.broadcast_to(group.reshape(keys[0].shape), shape).ravel()
    chains = [bubble_coefficients(schedule_name(row[0]), *row[1:]) for row in groups]
    offsets = np.cumsum([0, *(len(part) for part in chains)])
    flat = np.stack([np.broadcast_to(x, shape).ravel() for x in times])
    total = np.empty(len(group))
    _greatest(np.concatenate(chains), offsets, group, flat, total)
    result = total.reshape(shape)
    if slowest_rank_s is None:
        return result
    _, _, virtual, microbatches = keys
    mean = (times[0] + times[1] + times[2]) * virtual
    excess = np.maximum(np.asarray(slowest_rank_s, dtype=np.float64) - mean, 0.0)
    return np.asarray(result + (microbatches - 1) * excess)


def closed_form_of_stages(
    schedule: str,
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    weight_s: ArrayLike = 0.0,
    send_forward_s: ArrayLike = 0.0,
    send_backward_s: ArrayLike = 0.0,
) -> FloatArray:
    """Seconds of a step's pipeline, from durations per stage of one schedule.

    LoopedBFS is exact, whatever the stages and transfers; 1F1B is the longest of the
    chains that matter, or that of its mean stage. Elsewhere the mean stage goes through
    the chains of equal stages, and each microbatch but one takes as much longer as the
    slowest rank, or the slowest chain over the ranks, is slower than that.

    Args:
        schedule: torch's name.
        pp: Ranks.
        virtual_stages: Of each rank.
        num_microbatches: In a step.
        forward_s: Shape [..., stages].
        backward_s: Shape [..., stages].
        weight_s: Shape [..., stages], or one number.
        send_forward_s: Shape [..., stages - 1], or one number.
        send_backward_s: Shape [..., stages - 1], or one number.
    Returns:
        Shape [...].
    """
    spec = schedule_spec(schedule)
    table_rank = actions(schedule, pp, virtual_stages, num_microbatches).rank_of_stage
    forward = np.asarray(forward_s, dtype=np.float64)
    backward = np.asarray(backward_s, dtype=np.float64)
    weight = np.broadcast_to(np.asarray(weight_s, dtype=np.float64), backward.shape)
    forward, backward, weight = np.broadcast_arrays(forward, backward, weight)
    work = forward + backward + weight
    crosses = table_rank[1:] != table_rank[:-1]
    sends = [
        np.where(crosses, np.asarray(send, dtype=np.float64), 0.0)
        for send in (send_forward_s, send_backward_s)
    ]
    if spec.closed_form == "breadth_first":
        whole = (forward, backward + weight)
        return breadth_first_makespan(pp, num_microbatches, *whole, *sends)
    of_rank = [work[..., table_rank == rank].sum(axis=-1) for rank in range(pp)]
    slowest = np.max(of_rank, axis=0)
    if spec.closed_form == "one_by_one":
        slowest = work.mean(axis=-1)
    elif spec.closed_form == "rounds" and num_microbatches >= 2 * pp:
        # Less than two rounds of microbatches never run steadily.
        slowest = steady_microbatch_seconds(
            pp,
            virtual_stages,
            num_microbatches,
            forward,
            backward + weight,
            weight,
            split_backward=spec.splits_backward,
        )
    found = closed_form_makespan(
        schedule,
        pp,
        virtual_stages,
        num_microbatches,
        forward.mean(axis=-1),
        backward.mean(axis=-1),
        weight.mean(axis=-1),
        *(send.sum(axis=-1) / max(int(crosses.sum()), 1) for send in sends),
        slowest_rank_s=slowest,
    )
    if spec.closed_form == "one_by_one":
        uneven = one_by_one_makespan(
            pp, num_microbatches, forward, backward + weight, sends[0] + sends[1]
        )
        return np.maximum(found, uneven)
    return found


def _codes(schedule: str | Sequence[str] | NDArray[np.integer]) -> NDArray[np.int64]:
    names = np.asarray(schedule)
    if names.dtype.kind in "iu":
        return names.astype(np.int64)
    unique, inverse = np.unique(names, return_inverse=True)
    known = [schedule_spec(name).code for name in unique.tolist()]
    return np.array(known, dtype=np.int64)[inverse].reshape(names.shape)


def _group(keys: NDArray[np.int64]) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Distinct rows, and which of them each row is."""
    packed = np.zeros(len(keys), dtype=np.int64)
    for column in keys.T:
        packed = packed * (int(column.max(initial=0)) + 1) + column
    _, first, inverse = np.unique(packed, return_index=True, return_inverse=True)
    return keys[first].tolist(), inverse.ravel()


@compiled
def _greatest(
    chains: FloatArray,
    offsets: NDArray[np.int64],
    group: NDArray[np.int64],
    times: FloatArray,
    total: FloatArray,
) -> None:
    for i in range(len(group)):
        best = 0.0
        for c in range(offsets[group[i]], offsets[group[i] + 1]):
            length = (
                chains[c, 0] * times[0, i]
                + chains[c, 1] * times[1, i]
                + chains[c, 2] * times[2, i]
                + chains[c, 3] * times[3, i]
                + chains[c, 4] * times[4, i]
            )
            best = max(best, length)
        total[i] = best


# -- Uneven stages ---------------------------------------------------------------


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
    """Seconds until the last microbatch leaves the last stage. Shape [...]."""
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
