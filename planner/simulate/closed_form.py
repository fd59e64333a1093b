"""Makespan of equal stages as the greatest of a few sums, for many strategies at once.

Which sums is told by :mod:`planner.simulate.chains`; any candidate then costs a few
multiplications. What uneven stages change is told by :mod:`planner.simulate.uneven`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.schema.schedules import schedule_name, schedule_spec
from planner.simulate.chains import bubble_coefficients
from planner.simulate.compiled import compiled
from planner.simulate.durations import FloatArray
from planner.simulate.schedules import actions
from planner.simulate.uneven import (
    breadth_first_makespan,
    one_by_one_makespan,
    steady_microbatch_seconds,
)

__all__ = ["closed_form_makespan", "closed_form_of_stages"]


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
