"""From unit costs and stage boundaries to the few numbers a step time is made of.

A row of the strategy table asks for one (combination, pp, virtual stages, placement);
many rows ask for the same. Each such *pair* is summed up once: its slowest rank, the
whole model, and the memory of the first, second and last rank, which are the ones that
can be fullest (most microbatches in flight, embedding, head).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.partition import balanced_bounds
from planner.cost.unit_costs import UnitCosts
from planner.simulate.compiled import compiled

__all__ = ["KEPT", "PEAKS", "TIMES", "Pairs", "Summaries", "summarize"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Additive times of a rank, order of the last axis of ``load`` and ``whole``.
TIMES = ("forward", "backward", "weight", "selective", "full", "tp", "cp", "ep")
#: Additive memory of a rank, order of the last axis of ``kept``.
KEPT = ("dense", "expert", "tensors", "none", "selective", "full")
#: Greatest over the units of a rank, order of the last axis of ``peaks``.
PEAKS = ("largest_unit", "none", "selective", "full")

#: What one forward and backward of a unit costs, as weights of TIMES.
_WORK = np.array([1.0, 1.0, 0.0, 0.0, 0.0, 2.0, 1.0, 2.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Distinct cuts to sum up; arrays of shape [pairs].

    Attributes:
        combo: Index into the combinations of the unit costs.
        folded: 1 where rank r holds stages r and 2 pp - 1 - r, 0 where r, r + pp …
        types: Device type of each pp rank, padded. Shape [pairs, most pp].
        bandwidth: Of the boundary after each pp rank, wrapping. [pairs, most pp].
        latency: The same in seconds.
    """

    combo: Index
    pp: Index
    virtual: Index
    folded: Index
    types: Index
    bandwidth: Array
    latency: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Summaries:
    """What :func:`summarize` finds for each pair.

    Attributes:
        load: Times of the slowest rank, one microbatch. Shape [pairs, TIMES].
        whole: Times of the whole model. Shape [pairs, TIMES].
        send_s: One microbatch's way through all boundaries, one direction. [pairs].
        kept: Of ranks 0, 1 and last. Shape [pairs, 3, KEPT].
        peaks: Of the same ranks. Shape [pairs, 3, PEAKS].
        receive_bytes: What these ranks receive per microbatch. Shape [pairs, 3].
    """

    load: Array
    whole: Array
    send_s: Array
    kept: Array
    peaks: Array
    receive_bytes: Array


@compiled
def _rank_of(stage: int, pp: int, folded: int) -> int:
    if folded:
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


@compiled
def _times(
    sums: Array,
    bounds: Index,
    types: Index,
    pp: int,
    folded: int,
    work: Array,
    loads: Array,
    load: Array,
    whole: Array,
) -> None:
    """Times of every rank; keep the slowest and the total."""
    stages = len(bounds) - 1
    loads[:pp] = 0.0
    for stage in range(stages):
        rank = _rank_of(stage, pp, folded)
        kind = types[rank]
        for part in range(loads.shape[1]):
            value = (
                sums[kind, part, bounds[stage + 1]] - sums[kind, part, bounds[stage]]
            )
            loads[rank, part] += value
            whole[part] += value
    worst = -1.0
    for rank in range(pp):
        total = 0.0
        for part in range(loads.shape[1]):
            total += work[part] * loads[rank, part]
        if total > worst:
            worst = total
            load[:] = loads[rank]


@compiled
def _memory(
    kept_sums: Array,
    peak_values: Array,
    cut: Array,
    bounds: Index,
    pp: int,
    folded: int,
    kept: Array,
    peaks: Array,
    receive: Array,
) -> None:
    """Memory of ranks 0, 1 and last."""
    stages = len(bounds) - 1
    for place in range(3):
        wanted = 0 if place == 0 else (min(1, pp - 1) if place == 1 else pp - 1)
        for stage in range(stages):
            if _rank_of(stage, pp, folded) != wanted:
                continue
            start, stop = bounds[stage], bounds[stage + 1]
            for part in range(kept.shape[1]):
                kept[place, part] += kept_sums[part, stop] - kept_sums[part, start]
            for part in range(peaks.shape[1]):
                for unit in range(start, stop):
                    peaks[place, part] = max(
                        peaks[place, part], peak_values[part, unit]
                    )
            if stage > 0:
                receive[place] += cut[start]
            if stage < stages - 1:
                receive[place] += cut[stop]


@compiled
def _send(
    cut: Array, bounds: Index, pp: int, folded: int, bandwidth: Array, latency: Array
) -> float:
    total = 0.0
    for stage in range(len(bounds) - 2):
        rank = _rank_of(stage, pp, folded)
        after = _rank_of(stage + 1, pp, folded)
        if rank == after:
            continue
        edge = min(rank, after) if folded else rank
        total += latency[edge] + cut[bounds[stage + 1]] / bandwidth[edge]
    return total


@compiled
def _summarize(
    sums: Array,
    kept_sums: Array,
    peak_values: Array,
    cut: Array,
    combo: Index,
    pp: Index,
    virtual: Index,
    folded: Index,
    types: Index,
    bandwidth: Array,
    latency: Array,
    bounds: Index,
    work: Array,
    load: Array,
    whole: Array,
    send: Array,
    kept: Array,
    peaks: Array,
    receive: Array,
) -> None:
    loads = np.zeros((types.shape[1], sums.shape[2]))
    for row in range(len(combo)):
        c = combo[row]
        edges = bounds[row, : pp[row] * virtual[row] + 1]
        _times(
            sums[:, c],
            edges,
            types[row],
            pp[row],
            folded[row],
            work,
            loads,
            load[row],
            whole[row],
        )
        _memory(
            kept_sums[c],
            peak_values[c],
            cut[c],
            edges,
            pp[row],
            folded[row],
            kept[row],
            peaks[row],
            receive[row],
        )
        send[row] = _send(
            cut[c], edges, pp[row], folded[row], bandwidth[row], latency[row]
        )


def _prefix(values: Array) -> Array:
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def _stacked(costs: UnitCosts) -> tuple[Array, Array, Array, Array]:
    """Columns of TIMES, KEPT and PEAKS, and bytes across each cut.

    Returns:
        Shapes [T, C, TIMES, U], [C, KEPT, U], [C, PEAKS, U] and [C, U + 1].
    """
    shared = [
        np.broadcast_to(part, costs.forward_s.shape)
        for part in (costs.tp_s, costs.cp_s, costs.ep_s)
    ]
    times = np.stack(
        [
            costs.forward_s,
            costs.backward_s,
            costs.weight_s,
            costs.selective_s,
            costs.full_s,
            *shared,
        ],
        axis=2,
    )
    combos, units = costs.dense_parameters.shape
    kept_values = np.stack(
        [
            costs.dense_parameters,
            costs.expert_parameters,
            np.broadcast_to(costs.tensors, (combos, units)),
            *costs.saved_bytes,
        ],
        axis=1,
    )
    both = costs.dense_parameters + costs.expert_parameters
    peak_values = np.stack([both, *costs.transient_bytes], axis=1)
    cut = np.zeros((combos, units + 1))
    cut[:, 1:-1] = costs.cut_bytes
    return times, kept_values, np.ascontiguousarray(peak_values), cut


def summarize(costs: UnitCosts, pairs: Pairs) -> Summaries:
    """Cut every pair's model evenly by time and sum up its ranks.

    Args:
        costs: Of all units under all combinations.
        pairs: What to sum up.
    """
    times, kept_values, peak_values, cut = _stacked(costs)
    work = np.tensordot(times, _WORK, axes=(2, 0))
    count = len(pairs.combo)
    stages = pairs.pp * pairs.virtual
    most = int(stages.max())
    order = np.arange(most)
    rank = np.where(
        pairs.folded[:, None] > 0,
        np.minimum(order, 2 * pairs.pp[:, None] - 1 - order),
        order % pairs.pp[:, None],
    )
    stage_types = np.take_along_axis(pairs.types, np.maximum(rank, 0), axis=1)
    bounds = balanced_bounds(work, pairs.combo, stage_types, stages)
    result = Summaries(
        load=np.zeros((count, len(TIMES))),
        whole=np.zeros((count, len(TIMES))),
        send_s=np.zeros(count),
        kept=np.zeros((count, 3, len(KEPT))),
        peaks=np.zeros((count, 3, len(PEAKS))),
        receive_bytes=np.zeros((count, 3)),
    )
    _summarize(
        _prefix(times),
        _prefix(kept_values),
        peak_values,
        cut,
        pairs.combo,
        pairs.pp,
        pairs.virtual,
        pairs.folded,
        pairs.types,
        pairs.bandwidth,
        pairs.latency,
        bounds,
        _WORK,
        result.load,
        result.whole,
        result.send_s,
        result.kept,
        result.peaks,
        result.receive_bytes,
    )
    return result
