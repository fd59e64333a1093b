"""Peak memory of every row of a strategy table, by closed forms: what prunes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.columns import Columns
from planner.cost.rank_memory import CROSSING, KEPT, PEAKS, RankMemory
from planner.cost.recipes import Recipe
from planner.cost.row_memory import (
    CROSSING_COLUMNS,
    KEPT_COLUMNS,
    PEAK_COLUMNS,
    fill_fullest,
)
from planner.cost.scalar_bytes import bytes_of
from planner.schema import Optimizer, Precision

__all__ = ["FullestRanks", "fullest_ranks"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullestRanks:
    """Memory of the rows of a strategy table; arrays of shape [n].

    Attributes:
        memory_bytes: Of the fullest of ranks 0, 1 and last.
        excess_bytes: Most bytes that one of them is over its limit.
        owned: Trained scalars that ZeRO leaves on a device of rank 0.
    """

    memory_bytes: Array
    excess_bytes: Array
    owned: Array


def fullest_ranks(
    rows: Columns,
    ranks: RankMemory,
    limits: Array,
    *,
    precision: Precision,
    optimizer: Optimizer,
    recipe: Recipe,
    on_gpu: bool,
) -> FullestRanks:
    """Peak memory of every row, on the ranks that can be fullest.

    Args:
        rows: The table.
        ranks: Of the cuts that ``rows.pair`` names.
        limits: Bytes that ranks 0, 1 and last may use at each of ``rows.place``.
            Shape [places, 3].
        precision: This and the rest as in :func:`planner.cost.memory.memory_parts`.
    """
    worst, excess, owned = np.empty((3, len(rows.pp)))
    kept = ranks.kept[:, :, [KEPT.index(name) for name in KEPT_COLUMNS]]
    peaks = ranks.peaks[:, :, [PEAKS.index(name) for name in PEAK_COLUMNS]]
    crossing = ranks.crossing[:, :, [CROSSING.index(name) for name in CROSSING_COLUMNS]]
    fill_fullest(
        rows,
        np.ascontiguousarray(kept),
        np.ascontiguousarray(peaks),
        np.ascontiguousarray(crossing),
        limits,
        bytes_of(precision, optimizer, recipe, on_gpu),
        worst,
        excess,
        owned,
    )
    return FullestRanks(memory_bytes=worst, excess_bytes=excess, owned=owned)
