"""Memory of the ranks of every cut that can be fullest, summed up from their units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.units import UnitCosts

__all__ = [
    "CROSSING",
    "KEPT",
    "PEAKS",
    "RankMemory",
    "cuts_between",
    "prefix_sums",
    "rank_memory",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


# Recompute kinds come last.

#: Additive memory of a rank, order of the last axis of ``kept``.
KEPT = (
    "dense",
    "expert",
    "trained_dense",
    "trained_experts",
    "weight_grad",
    "tensors",
    "none",
    "selective",
    "full",
)

_DENSE, _, _TRAINED_DENSE, _, _WEIGHT_GRAD = range(5)

#: Greatest working set of the units of a rank by recompute kind, order of the last axis
#: of ``peaks``.
PEAKS = ("none", "selective", "full")

#: Bytes at the cuts of a rank's stages, order of the last axis of ``crossing``:
#: buffers of activations and gradients that come in; the part of them that saved
#: activations are, too; gradients and activations sent to other ranks; what the model
#: returns.
CROSSING = ("received", "shared", "returned", "sent", "output")

_RECEIVED, _SHARED, _RETURNED, _SENT, _OUTPUT = range(len(CROSSING))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of the ranks of each cut that can be fullest.

    Ranks 0, 1 and the last have the most microbatches in flight, the embedding, and the
    head; the first of those with less memory has most in flight of them.

    Attributes:
        kept: Sums of these ranks; without what stage 0 would keep between the halves
            of its backward, which is never split. Shape [pairs, watched, KEPT].
        peaks: Greatest units of the same ranks. Shape [pairs, watched, PEAKS].
        crossing: Bytes at the cuts of the same ranks, one microbatch. Shape [pairs,
            watched, CROSSING].
        whole: Working set of a device that has all units, by :data:`IN_FLIGHT` and
            recompute kind, and of its last unit. Shape [pairs, 2, 4, 3].
        alone: Cast weights, gradients and working set of a device with whole weights,
            by who casts them and recompute kind. Shape [pairs, 2, 3, 3].
        first: Trained scalars of the first unit. Shape [pairs].
        tied: Trained scalars of copies whose gradients ranks sum up, and how many
            sums that takes. Shape [pairs, 2].
    """

    kept: Array
    peaks: Array
    crossing: Array
    whole: Array
    alone: Array
    first: Array
    tied: Array


def prefix_sums(values: Array) -> Array:
    """Sums of the units before each. Shape [..., U, parts] to [..., U + 1, parts]."""
    sums = np.zeros((*values.shape[:-2], values.shape[-2] + 1, values.shape[-1]))
    np.cumsum(values, axis=-2, out=sums[..., 1:, :])
    return sums


def cuts_between(cut_bytes: Array) -> Array:
    """Bytes at the cut before each unit, 0 at both ends. [C, U - 1] to [C, U + 1]."""
    cut = np.zeros((len(cut_bytes), cut_bytes.shape[1] + 2))
    cut[:, 1:-1] = cut_bytes
    return cut


def _rank_of(stage: Index, pp: Index, folded: Index) -> Index:
    """Rank that holds each stage."""
    back = (folded > 0) & (stage >= pp)
    return np.where(back, 2 * pp - 1 - stage, stage % pp)


def _greatest_of_runs(values: Array, combo: Index, start: Index, stop: Index) -> Array:
    """Greatest of the units from start to stop, of two runs of 2^k units each.

    Args:
        values: Shape [C, U, parts].
        combo: Combination of each run. Shape [n]; likewise start, stop.
    Returns:
        Shape [n, parts].
    """
    power = np.frexp(stop - start)[1] - 1
    found, table = np.empty((len(combo), values.shape[-1])), values
    for level in range(int(power.max(initial=0)) + 1):
        mine = np.flatnonzero(power == level)
        one, first, second = combo[mine], start[mine], stop[mine] - 2**level
        found[mine] = np.maximum(table[one, first], table[one, second])
        table = np.maximum(table[:, : -(2**level)], table[:, 2**level :])
    return found


def _tied(
    costs: UnitCosts,
    combo: Index,
    pp: Index,
    folded: Index,
    bounds: Index,
    problem: Index,
) -> Array:
    """Gradients of tied copies that lie on different ranks. Shape [pairs, 2]."""
    found = np.zeros((len(combo), 2))
    ties = zip(costs.ties.first, costs.ties.second, strict=True)
    for link, ends in enumerate(ties):
        one, other = (
            _rank_of((bounds <= unit).sum(axis=1)[problem] - 1, pp, folded)
            for unit in ends
        )
        copies = np.where(one != other, costs.tied_trained[combo, link], 0.0)
        found += np.stack([copies, copies > 0], axis=-1)
    return found


@dataclass(frozen=True, slots=True)
class _Stages:
    """Stages of some ranks: those of all pairs, for one rank after another.

    Attributes:
        combo: Combination. Shape [n]; likewise all that follow.
        pp: Pipeline degree.
        folded: 1 where rank r holds stages r and 2 pp - 1 - r.
        rank: Rank that holds the stage.
        stage: Its number.
        last: Number of the last stage of its pipeline.
        start: First unit of the stage.
        stop: Unit behind its last.
        heads: Where the stages of one pair on one rank begin. Shape [watched x pairs].
        watched: Number of ranks of each pair.
    """

    combo: Index
    pp: Index
    folded: Index
    rank: Index
    stage: Index
    last: Index
    start: Index
    stop: Index
    heads: Index
    watched: int

    def of_ranks(self, values: Array, over: np.ufunc) -> Array:
        """Reduce stages' values to ranks'. [n, parts] to [pairs, watched, parts]."""
        found = over.reduceat(values, self.heads, axis=0)
        found = found.reshape(self.watched, len(self.heads) // self.watched, -1)
        return np.ascontiguousarray(found.swapaxes(0, 1))


def _stages_of(
    combo: Index,
    pp: Index,
    virtual: Index,
    folded: Index,
    bounds: Index,
    problem: Index,
    ranks: Index,
) -> _Stages:
    """List stages; the arguments are those of :func:`rank_memory`."""
    # Stages of one rank, turn after turn, of all pairs side by side, then more ranks.
    heads = np.cumsum(virtual) - virtual
    pair = np.repeat(np.arange(len(combo)), virtual)
    turn = np.arange(len(pair)) - heads[pair]
    watched = ranks.shape[1]
    rank = ranks.T[:, pair].ravel()
    firsts = np.concatenate([heads + place * len(pair) for place in range(watched)])
    turn, pair = np.tile(turn, watched), np.tile(pair, watched)
    p, back = pp[pair], folded[pair]
    stage = np.where((back > 0) & (turn == 1), 2 * p - 1 - rank, rank + turn * p)
    edges = problem[pair]
    return _Stages(
        combo=combo[pair],
        pp=p,
        folded=back,
        rank=rank,
        stage=stage,
        last=p * virtual[pair] - 1,
        start=bounds[edges, stage],
        stop=bounds[edges, stage + 1],
        heads=firsts,
        watched=watched,
    )


def _kept(costs: UnitCosts, of: _Stages) -> Array:
    """Additive memory of stages. Shape [n, KEPT]."""
    columns = [
        costs.dense_parameters,
        costs.expert_parameters,
        costs.trained_dense,
        costs.trained_experts,
        costs.weight_grad_bytes,
        np.broadcast_to(costs.tensors, costs.dense_parameters.shape),
        *costs.saved_bytes,
    ]
    sums = prefix_sums(np.stack(columns, axis=-1))
    c, start, stop = of.combo, of.start, of.stop
    own = sums[c, stop] - sums[c, start]
    own[start == 0, _WEIGHT_GRAD] = 0.0
    ties = zip(costs.ties.first, costs.ties.second, strict=True)
    for link, (first, second) in enumerate(ties):
        # An earlier stage holds the weight, too: this one has a copy of its own.
        copied = np.flatnonzero((first < start) & (start <= second) & (second < stop))
        own[copied, _DENSE] += costs.tied_parameters[c[copied], link]
        own[copied, _TRAINED_DENSE] += costs.tied_trained[c[copied], link]
    return own


def _crossing(costs: UnitCosts, of: _Stages) -> Array:
    """Bytes at the cuts of stages. Shape [n, CROSSING]."""
    c, p, folded, rank, stage = of.combo, of.pp, of.folded, of.rank, of.stage
    cut, shared = cuts_between(costs.cut_bytes), cuts_between(costs.shared_bytes)
    received, sent = cut[c, of.start], cut[c, of.stop]
    last = (stage == of.last) & (p > 1)
    crossing = np.empty((len(c), len(CROSSING)))
    crossing[:, _RECEIVED] = received + sent
    crossing[:, _SHARED] = shared[c, of.start]
    before, behind = _rank_of(stage - 1, p, folded), _rank_of(stage + 1, p, folded)
    crossing[:, _RETURNED] = np.where(before != rank, received, 0.0)
    crossing[:, _SENT] = np.where(behind != rank, sent, 0.0)
    crossing[:, _OUTPUT] = np.where(last, costs.output_bytes[c], 0.0)
    return crossing


def rank_memory(
    costs: UnitCosts,
    combo: Index,
    pp: Index,
    virtual: Index,
    folded: Index,
    bounds: Index,
    problem: Index,
    ranks: Index,
) -> RankMemory:
    """Sum up the fullest ranks of every cut.

    Args:
        costs: Units under all combinations.
        combo: Combination of each pair. Shape [pairs]; likewise the next three.
        pp: Pipeline degree.
        virtual: Virtual stages of each rank.
        folded: 1 where rank r holds stages r and 2 pp - 1 - r.
        bounds: Stage boundaries, padded with the number of units. Shape [problems,
            most stages + 1].
        problem: Row of ``bounds`` of each pair.
        ranks: The ranks to sum up. Shape [pairs, watched].
    """
    of = _stages_of(combo, pp, virtual, folded, bounds, problem, ranks)
    units = np.stack([*costs.transient_bytes], axis=-1)
    peaks = _greatest_of_runs(units, of.combo, of.start, of.stop)
    return RankMemory(
        kept=of.of_ranks(_kept(costs, of), np.add),
        peaks=of.of_ranks(peaks, np.maximum),
        crossing=of.of_ranks(_crossing(costs, of), np.add),
        whole=np.ascontiguousarray(np.moveaxis(costs.whole_bytes, -1, 0)[combo]),
        alone=np.ascontiguousarray(np.moveaxis(costs.alone_bytes, -1, 0)[combo]),
        first=costs.reduced_last[combo],
        tied=_tied(costs, combo, pp, folded, bounds, problem),
    )
