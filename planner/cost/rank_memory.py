"""What the ranks that can be fullest hold: sums over the units of their stages.

Ranks 0, 1 and last, which have the most microbatches in flight, the embedding and the
head; and the tied weights that the cut has torn apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.unit_costs import UnitCosts
from planner.simulate.compiled import compiled

__all__ = [
    "CROSSING",
    "KEPT",
    "PEAKS",
    "RankMemory",
    "cuts_between",
    "prefix_sums",
    "rank_memory",
    "rank_of",
    "stage_of",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Additive memory of a rank, order of the last axis of ``kept``.
KEPT = (
    "dense",
    "expert",
    "trained_dense",
    "trained_experts",
    "tensors",
    "weight_grad",
    "none",
    "selective",
    "full",
)
_DENSE, _TRAINED = KEPT.index("dense"), KEPT.index("trained_dense")
#: Greatest over the units of a rank, order of the last axis of ``peaks``.
PEAKS = ("largest_unit", "largest_trained", "none", "selective", "full")
#: Bytes at the cuts of a rank's stages, order of the last axis of ``crossing``:
#: buffers of activations and gradients that come in; the part of them that saved
#: activations are, too; gradients and activations sent to other ranks; what the model
#: returns.
CROSSING = ("received", "shared", "returned", "sent", "output")
_RECEIVED, _SHARED, _RETURNED, _SENT, _OUTPUT = range(len(CROSSING))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What :func:`rank_memory` finds for each cut.

    Attributes:
        kept: Of ranks 0, 1 and last; without what stage 0 would keep between the
            halves of its backward, which is never split. Shape [pairs, 3, KEPT].
        peaks: Of the same ranks. Shape [pairs, 3, PEAKS].
        crossing: Of the same ranks, one microbatch. Shape [pairs, 3, CROSSING].
        tied: Trained scalars of copies whose gradients ranks sum up, and how many
            sums that takes. Shape [pairs, 2].
    """

    kept: Array
    peaks: Array
    crossing: Array
    tied: Array


@compiled
def stage_of(rank: int, turn: int, pp: int, folded: int) -> int:
    """Stage that a rank holds on its ``turn``-th virtual stage."""
    if folded and turn == 1:
        return 2 * pp - 1 - rank
    return rank + turn * pp


@compiled
def rank_of(stage: int, pp: int, folded: int) -> int:
    """Rank that holds a stage."""
    if folded and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


class _Memory(NamedTuple):
    """Memory of the units of one combination.

    Attributes:
        kept: Sums of the units before each. Shape [U + 1, KEPT].
        peaks: Shape [U, PEAKS].
        cut: Bytes across the cut before each unit. Shape [U + 1].
        shared: Those of them that are saved as they come. Shape [U + 1].
        output: Bytes that the model returns.
        links: First and second unit of each tied link. Shape [2, links].
        copies: Scalars of the link's weight, and those trained. Shape [2, links].
        weight_grad: Which of KEPT stage 0 has nothing of.
    """

    kept: Array
    peaks: Array
    cut: Array
    shared: Array
    output: float
    links: Index
    copies: Array
    weight_grad: int


class _Memories(NamedTuple):
    """As :class:`_Memory`, of all combinations: a leading axis more, but for links."""

    kept: Array
    peaks: Array
    cut: Array
    shared: Array
    output: Array
    links: Index
    copies: Array
    weight_grad: int


@compiled
def _add_units(of: _Memory, start: int, stop: int, kept: Array, peaks: Array) -> None:
    """Add the units of one stage to what a rank holds."""
    for part in range(len(kept)):
        if start > 0 or part != of.weight_grad:
            kept[part] += of.kept[stop, part] - of.kept[start, part]
    for unit in range(start, stop):
        for part in range(len(peaks)):
            peaks[part] = max(peaks[part], of.peaks[unit, part])
    for link in range(of.links.shape[1]):
        # An earlier stage holds the weight, too: this one has a copy of its own.
        if of.links[0, link] < start <= of.links[1, link] < stop:
            kept[_DENSE] += of.copies[0, link]
            kept[_TRAINED] += of.copies[1, link]


@compiled
def _memory(
    of: _Memory,
    bounds: Index,
    pp: int,
    folded: int,
    kept: Array,
    peaks: Array,
    crossing: Array,
) -> None:
    """Memory of ranks 0, 1 and last."""
    stages = len(bounds) - 1
    for place in range(3):
        rank = 0 if place == 0 else (min(1, pp - 1) if place == 1 else pp - 1)
        for turn in range(stages // pp):
            stage = stage_of(rank, turn, pp, folded)
            start, stop = bounds[stage], bounds[stage + 1]
            _add_units(of, start, stop, kept[place], peaks[place])
            if stage > 0:
                crossing[place, _RECEIVED] += of.cut[start]
                crossing[place, _SHARED] += of.shared[start]
                if rank_of(stage - 1, pp, folded) != rank:
                    crossing[place, _RETURNED] += of.cut[start]
            if stage < stages - 1:
                crossing[place, _RECEIVED] += of.cut[stop]
                if rank_of(stage + 1, pp, folded) != rank:
                    crossing[place, _SENT] += of.cut[stop]
            elif pp > 1:
                crossing[place, _OUTPUT] += of.output


@compiled
def _tied(of: _Memory, bounds: Index, pp: int, folded: int, tied: Array) -> None:
    """Gradients of copies that lie on different ranks."""
    for link in range(of.links.shape[1]):
        ranks = np.zeros(2, dtype=np.int64)
        for end in range(2):
            stage = 0
            while bounds[stage + 1] <= of.links[end, link]:
                stage += 1
            ranks[end] = rank_of(stage, pp, folded)
        if ranks[0] != ranks[1] and of.copies[1, link] > 0:
            tied[0] += of.copies[1, link]
            tied[1] += 1


@compiled
def _remember(
    memory: _Memories,
    combo: Index,
    pp: Index,
    virtual: Index,
    folded: Index,
    bounds: Index,
    problem: Index,
    kept: Array,
    peaks: Array,
    crossing: Array,
    tied: Array,
) -> None:
    for row in range(len(combo)):
        c, p, v = combo[row], pp[row], folded[row]
        edges = bounds[problem[row], : p * virtual[row] + 1]
        of = _Memory(
            memory.kept[c],
            memory.peaks[c],
            memory.cut[c],
            memory.shared[c],
            memory.output[c],
            memory.links,
            memory.copies[c],
            memory.weight_grad,
        )
        _memory(of, edges, p, v, kept[row], peaks[row], crossing[row])
        _tied(of, edges, p, v, tied[row])


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


def _stacked_memory(costs: UnitCosts) -> _Memories:
    """Columns of KEPT and PEAKS, and what crosses each cut."""
    combos, units = costs.dense_parameters.shape
    kept_values = np.stack(
        [
            costs.dense_parameters,
            costs.expert_parameters,
            costs.trained_dense,
            costs.trained_experts,
            np.broadcast_to(costs.tensors, (combos, units)),
            costs.weight_grad_bytes,
            *costs.saved_bytes,
        ],
        axis=-1,
    )
    both = costs.dense_parameters + costs.expert_parameters
    trained = costs.trained_dense + costs.trained_experts
    return _Memories(
        kept=prefix_sums(kept_values),
        peaks=np.stack([both, trained, *costs.transient_bytes], axis=-1),
        cut=cuts_between(costs.cut_bytes),
        shared=cuts_between(costs.shared_bytes),
        output=costs.output_bytes,
        links=np.stack([costs.ties.first, costs.ties.second]),
        copies=np.stack([costs.tied_parameters, costs.tied_trained], axis=1),
        weight_grad=KEPT.index("weight_grad"),
    )


def rank_memory(
    costs: UnitCosts,
    combo: Index,
    pp: Index,
    virtual: Index,
    folded: Index,
    bounds: Index,
    problem: Index,
) -> RankMemory:
    """Sum up the fullest ranks of every cut.

    Args:
        costs: Of all units under all combinations.
        combo: Of each pair, like the next three as in
            :class:`planner.cost.summaries.Pairs`. Shape [pairs].
        pp: Shape [pairs].
        virtual: Shape [pairs].
        folded: Shape [pairs].
        bounds: Unit at which each stage starts. Shape [problems, most stages + 1].
        problem: Which of them each pair has. Shape [pairs].
    """
    count = len(combo)
    found = RankMemory(
        kept=np.zeros((count, 3, len(KEPT))),
        peaks=np.zeros((count, 3, len(PEAKS))),
        crossing=np.zeros((count, 3, len(CROSSING))),
        tied=np.zeros((count, 2)),
    )
    _remember(
        _stacked_memory(costs),
        combo,
        pp,
        virtual,
        folded,
        bounds,
        problem,
        found.kept,
        found.peaks,
        found.crossing,
        found.tied,
    )
    return found
