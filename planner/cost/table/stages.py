"""Sums over the stages of each distinct cut, which many rows of a table share.

A row of the strategy table asks for one (combination, pp, virtual stages, placement);
many rows ask for the same. Each such *pair* is summed up once: its slowest rank, the
whole model, its transfers, and the memory of the ranks that can be fullest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.table.cuts import balanced_bounds
from planner.cost.table.ranks import (
    RankMemory,
    cuts_between,
    prefix_sums,
    rank_memory,
)
from planner.cost.table.rows import number_rows
from planner.cost.units import UnitCosts
from planner.simulate.compiled import compiled, inner

__all__ = ["SENDS", "TIMES", "Pairs", "Summaries", "stage_of", "summarize"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@inner
def stage_of(rank: int, turn: int, pp: int, folded: int) -> int:
    """Stage that a rank holds on its ``turn``-th virtual stage."""
    if folded and turn == 1:
        return 2 * pp - 1 - rank
    return rank + turn * pp


class _Times(NamedTuple):
    """Columns of a rank's additive times, the last axis of ``load`` and ``whole``."""

    forward: int = 0
    backward: int = 1
    weight: int = 2
    selective: int = 3
    full: int = 4
    tp: int = 5
    tp_again: int = 6
    cp: int = 7
    ep: int = 8
    hooks: int = 9


class _Sends(NamedTuple):
    """Columns of one microbatch's transfers in one direction, in seconds.

    Attributes:
        way: Over all boundaries.
        edge: Over those between two neighbours, the busiest two, without latency.
        link: All that one rank sends another, gradients too, without latency.
        tail: Over one boundary, or over the last so many, whichever take longest for
            the number of microbatches that 1F1B has under way behind their first rank
            and their last one.
        depth: That number.
    """

    way: int = 0
    edge: int = 1
    link: int = 2
    tail: int = 3
    depth: int = 4


TIMES, SENDS = _Times(), _Sends()

#: What one forward and backward of a unit costs, as weights of TIMES.
_WORK = np.array([1.0, 1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 1.0, 2.0, 0.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Distinct cuts to sum up; arrays of shape [pairs] unless given.

    Attributes:
        combo: Index into the combinations of the unit costs.
        folded: 1 where rank r holds stages r and 2 pp - 1 - r, 0 where r, r + pp …
        place: Row of the tables below: place of each, see
            :class:`planner.cost.table.orders.Places`.
        types: Device type of each pp rank, padded. Shape [places, most pp].
        bandwidth: Of the boundary after each pp rank, wrapping. [places, most pp].
        latency: The same in seconds.
        ranks: Ranks whose memory is summed up. Shape [places, watched].
    """

    combo: Index
    pp: Index
    virtual: Index
    folded: Index
    place: Index
    types: Index
    bandwidth: Array
    latency: Array
    ranks: Index

    @property
    def stages(self) -> Index:
        """Virtual stages of each pair. Shape [pairs]."""
        return self.pp * self.virtual


@dataclass(frozen=True, slots=True, kw_only=True)
class Summaries:
    """Times, transfers and memory of each pair.

    Attributes:
        load: Times of the slowest rank, one microbatch. Shape [pairs, TIMES].
        whole: Times of the whole model. Shape [pairs, TIMES].
        sends: Of transfers, see :data:`SENDS`. Shape [pairs, SENDS].
        memory: Of the ranks that can be fullest.
    """

    load: Array
    whole: Array
    sends: Array
    memory: RankMemory


@inner
def _times(
    sums: Array,
    combo: int,
    bounds: Index,
    types: Index,
    pp: int,
    folded: int,
    work: Array,
    load: Array,
    own: Array,
    whole: Array,
) -> None:
    """Times of every rank; keep the slowest and the total; ``own`` is room for one."""
    turns = (len(bounds) - 1) // pp
    worst = -1.0
    for rank in range(pp):
        of_type = sums[types[rank], combo]
        for part in range(len(own)):
            own[part] = 0.0
        for turn in range(turns):
            stage = stage_of(rank, turn, pp, folded)
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


@inner
def _sends(
    cut: Array,
    bounds: Index,
    pp: int,
    folded: int,
    bandwidth: Array,
    latency: Array,
    held: Array,
    found: Array,
) -> None:
    """Fill in SENDS; ``held`` is room for what each edge is busy. Shape [>= pp]."""
    way = tail = 0.0
    depth = 1
    for rank in range(pp):
        held[rank] = 0.0
    # From the last boundary on, so that those behind a rank are known there.
    for stage in range(len(bounds) - 3, -1, -1):
        edge = stage % pp
        if folded:
            if stage == pp - 1:
                # A V turns on the last rank, where nothing is sent.
                continue
            edge = min(stage, 2 * pp - 2 - stage)
        elif pp == 1:
            continue
        busy = cut[bounds[stage + 1]] / bandwidth[edge]
        held[edge] += busy
        way += latency[edge] + busy
        if stage < pp and way * depth > tail * (pp - stage):
            tail, depth = way, pp - stage
        if (latency[edge] + busy) * depth > tail * 2:
            tail, depth = latency[edge] + busy, 2
    edge_s = held[0]
    for rank in range(1, pp):
        edge_s = max(edge_s, held[rank])
    found[SENDS.way], found[SENDS.edge] = way, edge_s
    found[SENDS.tail], found[SENDS.depth] = tail, depth
    # Two ranks in a loop: what goes round goes back over the link of gradients.
    found[SENDS.link] = held[0] + held[1] if pp == 2 and not folded else edge_s


@compiled
def _summarize(
    sums: Array,
    cut: Array,
    combo: Index,
    pp: Index,
    virtual: Index,
    folded: Index,
    place: Index,
    types: Index,
    bandwidth: Array,
    latency: Array,
    bounds: Index,
    problem: Index,
    work: Array,
    load: Array,
    whole: Array,
    sends: Array,
    held: Array,
    own: Array,
) -> None:
    for row in range(len(combo)):
        c, d, p, v = combo[row], place[row], pp[row], folded[row]
        edges = bounds[problem[row], : p * virtual[row] + 1]
        _times(sums, c, edges, types[d], p, v, work, load[row], own, whole[row])
        _sends(cut[c], edges, p, v, bandwidth[d], latency[d], held, sends[row])


def _stacked_times(costs: UnitCosts) -> Array:
    """Columns of TIMES. Shape [T, C, U, TIMES]."""
    shared = [
        np.broadcast_to(part, costs.forward_s.shape)
        for part in (costs.tp_s, costs.tp_again_s, costs.cp_s, costs.ep_s)
    ]
    return np.stack(
        [
            costs.forward_s,
            costs.backward_s,
            costs.weight_s,
            costs.selective_s,
            costs.full_s,
            *shared,
            costs.hooks_s,
        ],
        axis=-1,
    )


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
    dealt = np.where(same[pairs.place], 0, pairs.folded)
    first, problem = number_rows(pairs.combo, pairs.stages, alike[pairs.place] + dealt)
    pp, folded = pairs.pp[first, None], pairs.folded[first, None]
    stage = np.arange(int(pairs.stages.max()))
    rank = np.where(folded > 0, np.minimum(stage, 2 * pp - 1 - stage), stage % pp)
    types = pairs.types[pairs.place[first, None], np.maximum(rank, 0)]
    return balanced_bounds(
        work, pairs.combo[first], types, pairs.stages[first]
    ), problem


def summarize(costs: UnitCosts, pairs: Pairs) -> Summaries:
    """Cut every pair's model evenly by time and sum up its ranks.

    Args:
        costs: Of all units under all combinations.
        pairs: What to sum up.
    """
    times = _stacked_times(costs)
    bounds, problem = _cuts(times @ _WORK, pairs)
    count = len(pairs.combo)
    load, whole = np.zeros((2, count, len(TIMES)))
    sends = np.zeros((count, len(SENDS)))
    _summarize(
        prefix_sums(times),
        cuts_between(costs.sent_bytes),
        pairs.combo,
        pairs.pp,
        pairs.virtual,
        pairs.folded,
        pairs.place,
        pairs.types,
        pairs.bandwidth,
        pairs.latency,
        bounds,
        problem,
        _WORK,
        load,
        whole,
        sends,
        np.zeros(pairs.bandwidth.shape[1]),
        np.zeros(len(TIMES)),
    )
    memory = rank_memory(
        costs,
        pairs.combo,
        pairs.pp,
        pairs.virtual,
        pairs.folded,
        bounds,
        problem,
        pairs.ranks[pairs.place],
    )
    return Summaries(load=load, whole=whole, sends=sends, memory=memory)
