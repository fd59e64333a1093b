"""Makespan of equal stages as the greatest of a few sums, for many strategies at once.

The makespan of a fixed order is the length of its longest chain, and a chain's length
is a sum: so many forwards, so many input gradients, weight gradients and transfers.
For 1F1B without transfers there is one such sum, (M + pp - 1) (f + b), the textbook's;
zero-bubble orders have up to a dozen. The sums of a (schedule, pp, virtual stages,
microbatches) are read off the engine once, at chosen ratios of f : b : w : send, and
kept; any candidate then costs a few multiplications.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import StrategyError, UnknownNameError
from planner.schema.strategy import SCHEDULES
from planner.simulate.compiled import compiled
from planner.simulate.critical_path import critical_path_counts
from planner.simulate.actions import ActionTable
from planner.simulate.durations import FloatArray
from planner.simulate.engine import makespan
from planner.simulate.schedules import actions, why_not

__all__ = ["bubble_coefficients", "closed_form_makespan", "closed_form_of_stages"]

#: From this many rounds of pp microbatches on, the sums grow evenly with each round;
#: the second number over pp is added, because few ranks need more rounds to settle.
_STEADY_ROUNDS = (4, 24)
#: Rounds after which every chain repeats itself.
_PERIOD = 2
#: Chains are added until none of the probed ratios is further off than this.
_TOLERANCE = 1e-4
_PROBES = 768
_CHAINS_A_ROUND = 6


def _probes() -> FloatArray:
    """Ratios f : b : w : send_f : send_b at which chains are read. Shape [n, 5].

    A lattice of irrational steps covers compute within 1 : 9, with and without a
    weight gradient, and transfers from a thousandth of it to three times as long; no
    two different chains are equally long by chance.
    Source of the steps: powers of the root of x^6 = x + 1 (Roberts 2018, R sequence).
    """
    steps = 0.8812714616335696 ** np.arange(1, 6)
    spread = (np.arange(1, _PROBES + 1)[:, None] * steps) % 1.0
    ratios = 9.0 ** (spread - 0.5)
    ratios[:, 3:] = 10 ** (3.5 * spread[:, 3:] - 3)
    ratios[::3, 2] *= 1e-3
    ratios[::4, 3:] *= 1e-3
    ratios[1::4, 3:] *= 0.1
    ratios[2::4, 3:] = ratios[2::4, :2] * 9.0 ** (spread[2::4, 3:] - 0.5)
    return ratios


@lru_cache(maxsize=4096)
def bubble_coefficients(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> FloatArray:
    """The sums of which a makespan is the greatest.

    Args:
        schedule: torch's name.
        pp: Ranks.
        virtual_stages: Of each rank.
        num_microbatches: In a step.
    Returns:
        Per chain the number of forwards, input gradients, weight gradients, activation
        and gradient transfers, of one virtual stage and microbatch each.
        Shape [chains, 5].
    Raises:
        UnknownNameError: If the schedule has no such name.
        StrategyError: If torch refuses the combination.
    """
    reason = why_not(schedule, pp, virtual_stages, num_microbatches)
    if reason is not None:
        raise StrategyError(reason)
    if schedule == "GPipe":
        fill = num_microbatches + pp - 1.0
        return np.array([[fill, fill, fill, pp - 1.0, pp - 1.0]])
    steady = (_STEADY_ROUNDS[0] + _STEADY_ROUNDS[1] // pp) * pp
    if num_microbatches <= steady + 2 * _PERIOD * pp:
        chains, _ = _chains(schedule, pp, virtual_stages, num_microbatches)
        return _undominated(chains)
    base = steady + (num_microbatches - steady) % (_PERIOD * pp)
    chains, slope = _growth(schedule, pp, virtual_stages, base)
    return _undominated(chains + slope * ((num_microbatches - base) // (_PERIOD * pp)))


def _chains(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[FloatArray, FloatArray]:
    """Chains that explain every probe, and the ratios at which each was read."""
    table = actions(schedule, pp, virtual_stages, num_microbatches)
    probes = _probes()
    columns = [np.repeat(part, table.num_stages, axis=1) for part in probes.T[..., None]]
    compute, sends = columns[:3], [part[:, 1:] for part in columns[3:]]
    exact = makespan(table, *compute, *sends)
    chains, read = np.zeros((0, 5)), np.zeros((0, 5))
    known = np.zeros(_PROBES)
    while (known < exact * (1 - _TOLERANCE)).any():
        worst = np.argsort(known / exact, kind="stable")[:_CHAINS_A_ROUND]
        worst = worst[known[worst] < exact[worst] * (1 - _TOLERANCE)]
        new = _read(table, probes[worst])
        chains, read = np.concatenate([chains, new]), np.concatenate([read, probes[worst]])
        known = (probes @ chains.T).max(axis=1)
    return chains, read


def _read(table: ActionTable, ratios: FloatArray) -> FloatArray:
    found = [critical_path_counts(table, *row) for row in ratios.tolist()]
    return np.array(found, dtype=np.float64)


@lru_cache(maxsize=512)
def _growth(
    schedule: str, pp: int, virtual_stages: int, base: int
) -> tuple[FloatArray, FloatArray]:
    """Chains at ``base`` microbatches and what each gains in a period more.

    A chain whose gain is not yet steady is left out: another one is about to pass it.
    """
    first, ratios = _chains(schedule, pp, virtual_stages, base)
    second, third = (
        _read(actions(schedule, pp, virtual_stages, base + _PERIOD * pp * more), ratios)
        for more in (1, 2)
    )
    steady = (third - second == second - first).all(axis=1)
    return first[steady], (second - first)[steady]


def _undominated(chains: FloatArray) -> FloatArray:
    rows = np.unique(chains, axis=0)
    kept = [
        row
        for index, row in enumerate(rows)
        if not any(
            (other >= row).all() for j, other in enumerate(rows) if j != index
        )
    ]
    result = np.stack(kept)
    result.setflags(write=False)
    return result


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
    uneven 1F1B stages it is sum + (M - 1) max. Every argument broadcasts, shape [...].

    Args:
        schedule: torch's name, names, or indices into
            :data:`planner.schema.SCHEDULES`.
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
        _codes(schedule), *(np.asarray(x) for x in (pp, virtual_stages, num_microbatches))
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
    chains = [bubble_coefficients(SCHEDULES[row[0]], *row[1:]) for row in groups]
    offsets = np.cumsum([0, *(len(part) for part in chains)])
    flat = [np.ascontiguousarray(np.broadcast_to(x, shape).ravel()) for x in times]
    total = np.empty(len(group))
    _greatest(np.concatenate(chains), offsets, group, *flat, total)
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
    """As :func:`closed_form_makespan`, from durations per stage of one schedule.

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
    table_rank = actions(schedule, pp, virtual_stages, num_microbatches).rank_of_stage
    forward = np.asarray(forward_s, dtype=np.float64)
    backward = np.asarray(backward_s, dtype=np.float64)
    weight = np.broadcast_to(np.asarray(weight_s, dtype=np.float64), backward.shape)
    work = forward + backward + weight
    of_rank = np.stack(
        [work[..., table_rank == rank].sum(axis=-1) for rank in range(pp)], axis=-1
    )
    crosses = table_rank[1:] != table_rank[:-1]
    return closed_form_makespan(
        schedule,
        pp,
        virtual_stages,
        num_microbatches,
        forward.mean(axis=-1),
        backward.mean(axis=-1),
        weight.mean(axis=-1),
        _mean_send(send_forward_s, crosses),
        _mean_send(send_backward_s, crosses),
        slowest_rank_s=of_rank.max(axis=-1),
    )


def _mean_send(send_s: ArrayLike, crosses: NDArray[np.bool_]) -> FloatArray:
    send = np.asarray(send_s, dtype=np.float64)
    if send.ndim == 0:
        return send
    return np.asarray(send[..., crosses].mean(axis=-1) if crosses.any() else 0.0)


def _codes(schedule: str | Sequence[str] | NDArray[np.integer]) -> NDArray[np.int64]:
    names = np.asarray(schedule)
    if names.dtype.kind in "iu":
        return names.astype(np.int64)
    unique, inverse = np.unique(names, return_inverse=True)
    for name in unique.tolist():
        if name not in SCHEDULES:
            raise UnknownNameError("pipeline schedule", name, SCHEDULES)
    known = [SCHEDULES.index(name) for name in unique.tolist()]
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
    forward: FloatArray,
    backward: FloatArray,
    weight: FloatArray,
    send_forward: FloatArray,
    send_backward: FloatArray,
    total: FloatArray,
) -> None:
    for i in range(len(group)):
        best = 0.0
        for c in range(offsets[group[i]], offsets[group[i] + 1]):
            length = (
                chains[c, 0] * forward[i]
                + chains[c, 1] * backward[i]
                + chains[c, 2] * weight[i]
                + chains[c, 3] * send_forward[i]
                + chains[c, 4] * send_backward[i]
            )
            best = max(best, length)
        total[i] = best
