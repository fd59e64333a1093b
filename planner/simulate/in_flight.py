"""How many microbatches' activations a rank holds, exactly, from its order alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import StrategyError
from planner.simulate.actions import ActionKind, ActionTable, IntArray
from planner.simulate.durations import FloatArray

__all__ = ["peak_activation_bytes", "peak_in_flight"]


def peak_in_flight(table: ActionTable) -> NDArray[np.int64]:
    """Greatest number of microbatches that each virtual stage holds at once.

    A microbatch is held from its forward to its backward, or to its weight gradient
    where the backward is split.

    Returns:
        Shape [stages].
    """
    peak = np.zeros(table.num_stages, dtype=np.int64)
    for stages, held in _held(table):
        whole, half = np.split(held, 2, axis=1)
        peak[stages] = (whole + half).max(axis=0)
    return peak


def peak_activation_bytes(
    table: ActionTable, bytes_per_stage: ArrayLike, *, freed_by_input: float = 0.0
) -> FloatArray:
    """Greatest sum of activations that each rank holds at once.

    Args:
        table: The schedule.
        bytes_per_stage: Saved for backward by one microbatch on each virtual stage.
            Shape [..., stages].
        freed_by_input: Share of them that the input gradient frees where the backward
            is split; the weight gradient frees the rest. 0 keeps all until then, as
            torch does with activations that both need.
    Returns:
        Bytes. Shape [..., pp].
    Raises:
        StrategyError: If the shape does not fit or the share is not in [0, 1].
    """
    sizes = np.asarray(bytes_per_stage, dtype=np.float64)
    if sizes.ndim == 0:
        sizes = np.broadcast_to(sizes, (table.num_stages,))
    if sizes.shape[-1] != table.num_stages:
        raise StrategyError(
            f"bytes_per_stage has shape {list(sizes.shape)}, the schedule has "
            f"{table.num_stages} virtual stages; give one size for each"
        )
    if not 0 <= freed_by_input <= 1:
        raise StrategyError(
            f"freed_by_input={freed_by_input} is not a share; use 0 to 1"
        )
    peak = np.zeros((*sizes.shape[:-1], table.pp))
    for rank, (stages, held) in enumerate(_held(table)):
        own = sizes[..., stages]
        weights = np.concatenate([own, own * (1 - freed_by_input)], axis=-1)
        peak[..., rank] = (weights @ held.T.astype(np.float64)).max(axis=-1)
    return peak


#: Which actions of a rank are, for one stage, a forward, the end of a microbatch's
#: activations or the first half of it, an input gradient, a weight gradient.
_Steps = tuple[
    NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]
]


@lru_cache(maxsize=512)
def _held(table: ActionTable) -> tuple[tuple[IntArray, IntArray], ...]:
    """Per rank its stages, and the moments at which it may hold most.

    Each row counts, per stage, microbatches before their backward, then those between
    their input and their weight gradient. Rows that others dominate are left out.
    """
    found = []
    for rank in range(table.pp):
        rows = slice(int(table.offsets[rank]), int(table.offsets[rank + 1]))
        stages = np.flatnonzero(table.rank_of_stage == rank)
        kind, stage = table.kind[rows], table.stage[rows]
        paired = table.paired_stage[rows]
        steps: list[_Steps] = []
        for own in stages:
            here = stage == own
            forward = here & np.isin(kind, (ActionKind.FORWARD, ActionKind.OVERLAP_F_B))
            whole = here & (kind == ActionKind.BACKWARD) | (paired == own)
            split = here & (kind == ActionKind.BACKWARD_INPUT)
            weight = here & (kind == ActionKind.BACKWARD_WEIGHT)
            steps.append((forward, whole | split, split, weight))
        held = _peaks(steps)
        held.setflags(write=False)
        found.append((stages, held))
    return tuple(found)


def _peaks(steps: list[_Steps]) -> NDArray[np.int64]:
    """Counts right after each forward, before the backward that may be paired."""
    columns = [
        np.cumsum(forward) - _before(np.cumsum(ended)) for forward, ended, _, _ in steps
    ]
    columns += [
        _before(np.cumsum(split) - np.cumsum(weight)) for _, _, split, weight in steps
    ]
    adds = np.logical_or.reduce([forward for forward, *_ in steps])
    rows = np.unique(np.stack(columns, axis=1)[adds], axis=0)
    return _undominated(rows)


def _before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], counts[:-1]])


def _undominated(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    kept: list[NDArray[np.int64]] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any((other >= row).all() for other in kept):
            kept.append(row)
    return np.stack(kept)
