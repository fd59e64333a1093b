"""Columns of a strategy table as compiled loops take them, and numbers of its rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled
from planner.space.table import StrategyTable

__all__ = ["Columns", "columns_of", "number_rows", "plain"]

Index = NDArray[np.int64]


class Columns(NamedTuple):
    """Columns that the cost of a row depends on. Shapes [n].

    A tuple, because numba takes those apart; in meaning as in
    :class:`planner.space.StrategyTable`.

    Attributes:
        pair: Which of the distinct cuts the row uses, see
            :class:`planner.cost.table.stages.Pairs`.
        place: Which of the distinct :class:`planner.cost.table.orders.Places`.
    """

    pp: Index
    dp_replicate: Index
    dp_shard: Index
    cp: Index
    tp: Index
    ep: Index
    zero_stage: Index
    schedule: Index
    virtual_stages: Index
    num_microbatches: Index
    recompute: Index
    pair: Index
    place: Index


def plain(column: Index) -> Index:
    """A column contiguous and writable: any other layout compiles every loop again."""
    return np.require(column, np.int64, ("C", "W"))


def columns_of(table: StrategyTable, pair: Index, place: Index) -> Columns:
    """Columns of a table, without a copy where they are plain already."""
    of_table = (getattr(table, name) for name in Columns._fields[:-2])
    return Columns(*(plain(column) for column in (*of_table, pair, place)))


_FEWEST_SLOTS = 1 << 12

#: Odd integer nearest 2**64 over the golden ratio, as a signed number: its products
#: spread consecutive keys. Source: Knuth, The Art of Computer Programming 3, 6.4.
_SPREAD = -7046029254386353131


@compiled
def _number(packed: Index, keys: Index, ids: Index, first: Index, which: Index) -> int:
    """Fill in first rows and numbers.

    ``keys`` and ``ids`` are an empty hash table, in which a number of -1 is a free
    slot; a key that finds its slot taken goes to the next free one.

    Returns:
        How many numbers there are, or -1 if the table is too small for them.
    """
    mask, count = len(keys) - 1, 0
    for row in range(len(packed)):
        key = packed[row]
        if row > 0 and key == packed[row - 1]:
            which[row] = which[row - 1]
            continue
        mixed = key * _SPREAD
        slot = (mixed ^ (mixed >> 32)) & mask
        while ids[slot] >= 0 and keys[slot] != key:
            slot = (slot + 1) & mask
        if ids[slot] < 0:
            if 2 * count > mask:
                return -1
            keys[slot], ids[slot], first[count] = key, count, row
            count += 1
        which[row] = ids[slot]
    return count


def number_rows(*columns: Index) -> tuple[Index, Index]:
    """Number the distinct combinations of columns in order of appearance.

    Args:
        columns: Of non-negative integers. Shape [n] each.
    Returns:
        First row of each combination, shape [combinations], and number of each row's
        combination, shape [n].
    """
    packed = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        packed *= int(column.max(initial=0)) + 1
        packed += column
    first, which = np.empty_like(packed), np.empty_like(packed)
    count, slots = -1, _FEWEST_SLOTS
    while count < 0:
        keys, ids = np.empty(slots, dtype=np.int64), np.full(slots, -1, dtype=np.int64)
        count = _number(packed, keys, ids, first, which)
        slots *= 8
    return first[:count], which
