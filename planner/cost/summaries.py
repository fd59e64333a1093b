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

from planner.cost.numbering import number_rows
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
    """Distinct cuts to sum up; arrays of shape [pairs] unless given.

    Attributes:
        combo: Index into the combinations of the unit costs.
        folded: 1 where rank r holds stages r and 2 pp - 1 - r, 0 where r, r + pp …
        degree: Row of the three tables below, one for each distinct pp.
        types: Device type of each pp rank, padded. Shape [degrees, most pp].
        bandwidth: Of the boundary after each pp rank, wrapping. [degrees, most pp].
        latency: The same in seconds.
    """

    combo: Index
    pp: Index
    virtual: Index
    folded: Index
    degree: Index
    types: Index
    bandwidth: Array
    latency: Array

    @property
    def stages(self) -> Index:
        """Virtual stages of each pair. Shape [pairs]."""
        return self.pp * self.virtual


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
def _stage_of(rank: int, turn: int, pp: int, folded: int) -> int:
    """Stage that a rank holds on its ``turn``-th virtual stage."""
    if folded and turn == 1:
        return 2 * pp - 1 - rank
    return rank + turn * pp


@compiled
def _times(
    sums: Array,
    combo: int,
    bounds: Index,
    types: Index,
    pp: int,
    folded: int,
    work: Array,
    load: Array,
    whole: Array,
) -> None:
    """Times of every rank; keep the slowest and the total."""
    turns = (len(bounds) - 1) // pp
    own = np.empty(len(load))
    worst = -1.0
    for rank in range(pp):
        of_type = sums[types[rank], combo]
        for part in range(len(own)):
            own[part] = 0.0
        for turn in range(turns):
            stage = _stage_of(rank, turn, pp, folded)
            start, stop = bounds[stage], bounds[stage + 1]
            for part in range(len(own)):
                own[part] += of_type[stop, part] - of_type[start, part]
        total = 0.0
        for part in range(len(own)):
            total += work[part] * own[part]
            whole[part] += own[part]
        if total > worst:
            worst = total
            for part in range(len(own)):
                load[part] = own[part]


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
        rank = 0 if place == 0 else (min(1, pp - 1) if place == 1 else pp - 1)
        for turn in range(stages // pp):
            stage = _stage_of(rank, turn, pp, folded)
            start, stop = bounds[stage], bounds[stage + 1]
            for part in range(kept.shape[1]):
                kept[place, part] += kept_sums[stop, part] - kept_sums[start, part]
            for unit in range(start, stop):
                for part in range(peaks.shape[1]):
                    peaks[place, part] = max(
                        peaks[place, part], peak_values[unit, part]
                    )
            if stage > 0:
                receive[place] += cut[start]
            if stage < stages - 1:
                receive[place] += cut[stop]


@compiled
def _send(
    cut: Array, bounds: Index, pp: int, folded: int, bandwidth: Array, latency: Array
) -> float:
    """Seconds of one microbatch through all boundaries between ranks, one way."""
    total = 0.0
    for stage in range(len(bounds) - 2):
        edge = stage % pp
        if folded:
            if stage == pp - 1:
                # A V turns on the last rank, where nothing is sent.
                continue
            edge = min(stage, 2 * pp - 2 - stage)
        elif pp == 1:
            continue
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
    degree: Index,
    types: Index,
    bandwidth: Array,
    latency: Array,
    bounds: Index,
    problem: Index,
    work: Array,
    load: Array,
    whole: Array,
    send: Array,
    kept: Array,
    peaks: Array,
    receive: Array,
) -> None:
    for row in range(len(combo)):
        c, d, p, v = combo[row], degree[row], pp[row], folded[row]
        edges = bounds[problem[row], : p * virtual[row] + 1]
        _times(sums, c, edges, types[d], p, v, work, load[row], whole[row])
        _memory(
            kept_sums[c],
            peak_values[c],
            cut[c],
            edges,
            p,
            v,
            kept[row],
            peaks[row],
            receive[row],
        )
        send[row] = _send(cut[c], edges, p, v, bandwidth[d], latency[d])


def _prefix(values: Array) -> Array:
    """Sums of the units before each. Shape [..., U, parts] to [..., U + 1, parts]."""
    sums = np.zeros((*values.shape[:-2], values.shape[-2] + 1, values.shape[-1]))
    np.cumsum(values, axis=-2, out=sums[..., 1:, :])
    return sums


def _stacked(costs: UnitCosts) -> tuple[Array, Array, Array, Array]:
    """Columns of TIMES, KEPT and PEAKS, and bytes across each cut.

    Returns:
        Shapes [T, C, U, TIMES], [C, U, KEPT], [C, U, PEAKS] and [C, U + 1].
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
        axis=-1,
    )
    combos, units = costs.dense_parameters.shape
    kept_values = np.stack(
        [
            costs.dense_parameters,
            costs.expert_parameters,
            np.broadcast_to(costs.tensors, (combos, units)),
            *costs.saved_bytes,
        ],
        axis=-1,
    )
    both = costs.dense_parameters + costs.expert_parameters
    peak_values = np.stack([both, *costs.transient_bytes], axis=-1)
    cut = np.zeros((combos, units + 1))
    cut[:, 1:-1] = costs.cut_bytes
    return times, kept_values, peak_values, cut


def _cuts(work: Array, pairs: Pairs) -> tuple[Index, Index]:
    """Stage boundaries; pairs that ask for the same cut share it.

    On ranks of one device type a cut depends on the number of stages alone, however
    they are dealt out to ranks.

    Args:
        work: Seconds of each unit. Shape [T, combinations, units].
        pairs: What is to be cut.
    Returns:
        Boundaries, shape [problems, most stages + 1], and each pair's problem.
    """
    same = (pairs.types == pairs.types[:, :1]).all(axis=1)
    alike = np.where(same, pairs.types[:, 0], len(work) + 2 * np.arange(len(same)))
    dealt = np.where(same[pairs.degree], 0, pairs.folded)
    first, problem = number_rows(pairs.combo, pairs.stages, alike[pairs.degree] + dealt)
    pp, folded = pairs.pp[first, None], pairs.folded[first, None]
    stage = np.arange(int(pairs.stages.max()))
    rank = np.where(folded > 0, np.minimum(stage, 2 * pp - 1 - stage), stage % pp)
    types = pairs.types[pairs.degree[first, None], np.maximum(rank, 0)]
    return balanced_bounds(
        work, pairs.combo[first], types, pairs.stages[first]
    ), problem


def summarize(costs: UnitCosts, pairs: Pairs) -> Summaries:
    """Cut every pair's model evenly by time and sum up its ranks.

    Args:
        costs: Of all units under all combinations.
        pairs: What to sum up.
    """
    times, kept_values, peak_values, cut = _stacked(costs)
    bounds, problem = _cuts(times @ _WORK, pairs)
    count = len(pairs.combo)
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
        pairs.degree,
        pairs.types,
        pairs.bandwidth,
        pairs.latency,
        bounds,
        problem,
        _WORK,
        result.load,
        result.whole,
        result.send_s,
        result.kept,
        result.peaks,
        result.receive_bytes,
    )
    return result
