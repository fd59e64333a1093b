"""Microbatches and bytes that a rank holds, exactly, from its order alone.

A microbatch on a virtual stage is, one after the other,

forward      between its forward and its backward or input gradient
split        between its input and its weight gradient, where the backward is split
after_split  done, in halves, until the step ends
after_whole  done, in one piece, until the step ends

and holds other bytes in each of them. torch frees nothing at the input gradient: the
weight gradient walks the same graph again, and starts from the gradients of all ops
that have weights, which are kept besides. What a stage received keeps its gradient to
the end of the step.
Source: torch.distributed.pipelining, _backward.py (stage_backward_input keeps
param_groups) and stage.py (clear_runtime_states), torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import StrategyError
from planner.simulate.actions import ActionKind, ActionTable, IntArray
from planner.simulate.durations import FloatArray

__all__ = [
    "PeakCounts",
    "peak_activation_bytes",
    "peak_counts",
    "peak_held_bytes",
    "peak_in_flight",
]

#: What an action of a kind adds to the counts of forward, split, after_split and
#: after_whole of its stage, by ActionKind.
_MOVES = np.array(
    [[1, 0, 0, 0], [-1, 0, 0, 1], [-1, 1, 0, 0], [0, -1, 1, 0]], dtype=np.int64
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakCounts:
    """Most microbatches that each rank holds at once, over all of its stages.

    A microbatch on two stages of a rank counts twice. The moments of the three differ.

    Attributes:
        forward: Between forward and backward or input gradient. Shape [pp].
        split: Between input and weight gradient. Shape [pp].
        both: Either. Shape [pp].
    """

    forward: NDArray[np.int64]
    split: NDArray[np.int64]
    both: NDArray[np.int64]


@lru_cache(maxsize=512)
def peak_counts(table: ActionTable) -> PeakCounts:
    """Most microbatches that each rank holds at once, by how far they have got."""
    forward, split, both = np.zeros((3, table.pp), dtype=np.int64)
    for rank, (_, held) in enumerate(_held(table)):
        by_phase = held.sum(axis=2)
        forward[rank], split[rank] = by_phase[:, :2].max(axis=0)
        both[rank] = by_phase[:, :2].sum(axis=1).max()
    for counts in (forward, split, both):
        counts.setflags(write=False)
    return PeakCounts(forward=forward, split=split, both=both)


@lru_cache(maxsize=512)
def peak_in_flight(table: ActionTable) -> NDArray[np.int64]:
    """Greatest number of microbatches that each virtual stage holds at once.

    A microbatch is held from its forward to its backward, or to its weight gradient
    where the backward is split.

    Returns:
        Shape [stages].
    """
    peak = np.zeros(table.num_stages, dtype=np.int64)
    for stages, held in _held(table):
        peak[stages] = held[:, :2].sum(axis=1).max(axis=0)
    peak.setflags(write=False)
    return peak


def peak_held_bytes(
    table: ActionTable,
    forward_bytes: ArrayLike,
    split_bytes: ArrayLike | None = None,
    *,
    after_split_bytes: ArrayLike = 0.0,
    after_whole_bytes: ArrayLike = 0.0,
) -> FloatArray:
    """Greatest sum of bytes that each rank holds at once for its microbatches.

    Between actions; what an action needs while it runs comes on top.

    Args:
        table: The schedule.
        forward_bytes: Held by one microbatch on each virtual stage from its forward to
            its backward or input gradient. Shape [..., stages].
        split_bytes: From its input to its weight gradient; ``forward_bytes`` if left
            out. Shape [..., stages].
        after_split_bytes: From its weight gradient to the end of the step.
            Shape [..., stages].
        after_whole_bytes: From its backward, if that is not split, to the end of the
            step. Shape [..., stages].
    Returns:
        Bytes. Shape [..., pp].
    Raises:
        StrategyError: If a shape does not fit or a size is negative or not finite.
    """
    sizes = [
        _checked(name, forward_bytes if values is None else values, table.num_stages)
        for name, values in (
            ("forward_bytes", forward_bytes),
            ("split_bytes", split_bytes),
            ("after_split_bytes", after_split_bytes),
            ("after_whole_bytes", after_whole_bytes),
        )
    ]
    weights = np.stack(np.broadcast_arrays(*sizes), axis=-2)
    peak = np.zeros((*weights.shape[:-2], table.pp))
    for rank, (stages, held) in enumerate(_held(table)):
        own = weights[..., stages].reshape(*weights.shape[:-2], -1)
        counts = held.reshape(len(held), -1).astype(np.float64)
        peak[..., rank] = (own @ counts.T).max(axis=-1)
    return peak


def peak_activation_bytes(
    table: ActionTable, bytes_per_stage: ArrayLike, *, freed_by_input: float = 0.0
) -> FloatArray:
    """Greatest sum of saved activations that each rank holds at once.

    Args:
        table: The schedule.
        bytes_per_stage: Saved for backward by one microbatch on each virtual stage.
            Shape [..., stages].
        freed_by_input: Share of them that the input gradient frees where the backward
            is split; the weight gradient frees the rest. 0 keeps all until then, as
            torch does.
    Returns:
        Bytes. Shape [..., pp].
    Raises:
        StrategyError: If the shape does not fit or the share is not in [0, 1].
    """
    sizes = _checked("bytes_per_stage", bytes_per_stage, table.num_stages)
    if not 0 <= freed_by_input <= 1:
        raise StrategyError(
            f"freed_by_input={freed_by_input} is not a share; use 0 to 1"
        )
    return peak_held_bytes(table, sizes, sizes * (1 - freed_by_input))


def _checked(name: str, values: ArrayLike, stages: int) -> FloatArray:
    sizes = np.asarray(values, dtype=np.float64)
    if sizes.ndim == 0:
        sizes = np.broadcast_to(sizes, (stages,))
    if sizes.shape[-1] != stages:
        raise StrategyError(
            f"{name} has shape {list(sizes.shape)}, the schedule has "
            f"{stages} virtual stages; give one size for each"
        )
    if sizes.size and not (sizes.min() >= 0 and sizes.max() < np.inf):
        raise StrategyError(
            f"{name} has a size that is negative or not finite; give bytes, 0 or more"
        )
    return sizes


@lru_cache(maxsize=512)
def _held(table: ActionTable) -> tuple[tuple[IntArray, IntArray], ...]:
    """Per rank its stages, and the counts after each of its actions.

    Counts of microbatches in the four phases. Shape [moments, 4, stages of the rank].
    Of moments with equal counts in flight the last is kept: what is done only grows.
    """
    found = []
    for rank in range(table.pp):
        stages = np.flatnonzero(table.rank_of_stage == rank)
        kind, stage = _single_actions(table, rank)
        moves = np.zeros((len(kind), len(stages), len(_MOVES[0])), dtype=np.int64)
        moves[np.arange(len(kind)), np.searchsorted(stages, stage)] = _MOVES[kind]
        counts = np.cumsum(moves, axis=0).transpose(0, 2, 1)
        held = counts[_last_moments(counts[:, :2].reshape(len(counts), -1))]
        held.setflags(write=False)
        found.append((stages, held))
    return tuple(found)


def _last_moments(in_flight: IntArray) -> IntArray:
    """The last moment of each distinct row of counts. Shapes [moments, n] and [m]."""
    sizes = in_flight.max(axis=0, initial=0).astype(object) + 1
    if np.prod(sizes) < np.iinfo(np.int64).max:
        # As digits of one number: sorting numbers is several times faster.
        places = np.cumprod([1, *sizes[:-1]], dtype=object).astype(np.int64)
        _, first = np.unique((in_flight @ places)[::-1], return_index=True)
    else:
        _, first = np.unique(in_flight[::-1], axis=0, return_index=True)
    return np.asarray(len(in_flight) - 1 - first)


def _single_actions(table: ActionTable, rank: int) -> tuple[IntArray, IntArray]:
    """Kinds and stages of a rank's actions; a pair is a forward, then a backward."""
    rows = slice(int(table.offsets[rank]), int(table.offsets[rank + 1]))
    kind = table.kind[rows].astype(np.int64)
    paired = kind == ActionKind.OVERLAP_F_B
    first = np.where(paired, int(ActionKind.FORWARD), kind)
    after = np.flatnonzero(paired) + 1
    return (
        np.insert(first, after, int(ActionKind.BACKWARD)),
        np.insert(table.stage[rows], after, table.paired_stage[rows][paired]),
    )
