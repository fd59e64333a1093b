"""Columns of a strategy table in the form that compiled loops take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.space.table import StrategyTable

__all__ = ["Columns", "columns_of", "plain"]

Index = NDArray[np.int64]


class Columns(NamedTuple):
    """What the costs of a row depend on. Shapes [n].

    A tuple, because numba takes those apart; in meaning as in
    :class:`planner.space.StrategyTable`.

    Attributes:
        pair: Which of the distinct cuts the row uses, see
            :class:`planner.cost.table.stages.Pairs`.
        place: Which of the distinct :class:`planner.cost.orders.Places`.
    """

    pp: Index
    dp_shard: Index
    cp: Index
    ep: Index
    zero_stage: Index
    schedule: Index
    virtual_stages: Index
    num_microbatches: Index
    recompute: Index
    pair: Index
    place: Index


def plain(column: Index) -> Index:
    """As contiguous and writable: any other layout would compile every loop again."""
    return np.require(column, np.int64, ("C", "W"))


def columns_of(table: StrategyTable, pair: Index, place: Index) -> Columns:
    """Columns of a table, without a copy where they are plain already."""
    of_table = (getattr(table, name) for name in Columns._fields[:-2])
    return Columns(*(plain(column) for column in (*of_table, pair, place)))
