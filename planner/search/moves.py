"""Small changes of a solution's order: which devices are which ranks.

Every order that comes out has as many devices as went in, each once, of those that may
be used. For changes of the row see :mod:`planner.search.row_moves`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AXES",
    "Row",
    "Solution",
    "block_sizes",
    "crossed",
    "moved_order",
    "refilled",
    "spare_of",
    "swapped",
]

Index = NDArray[np.int64]
Row = Mapping[str, int]

#: Axes whose degrees multiply to the devices; a factor may move among them.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
#: Points at which the orders of two parents change over.
_POINTS = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """A row of the strategy table and the devices that its ranks are.

    Attributes:
        order: Device id of each rank. Shape [ranks].
        row: As :meth:`planner.space.StrategyTable.row` gives it; its degrees multiply
            to the ranks.
        key: What makes two solutions the same.
    """

    order: Index
    row: Row
    key: tuple[bytes, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        key = (self.order.tobytes(), tuple(self.row.values()))
        object.__setattr__(self, "key", key)

    @property
    def mesh(self) -> tuple[int, ...]:
        """Degrees alone."""
        return tuple(self.row[axis] for axis in (*AXES, "ep"))


# -- Orders ----------------------------------------------------------------------


def block_sizes(row: Row, host: int) -> tuple[int, ...]:
    """Numbers of neighbouring ranks that are worth moving as one.

    Single devices, what shares a layer, shards of a copy, a stage, a host.

    Args:
        row: Of a table.
        host: Devices of a host.
    """
    inner, stage = row["tp"] * row["cp"], 1
    for axis in AXES[1:]:
        stage *= row[axis]
    ranks = stage * row["pp"]
    found = {1, inner, inner * row["dp_shard"], stage, host, math.gcd(host, stage)}
    return tuple(sorted(size for size in found if 2 * size <= ranks)) or (1,)


def swapped(order: Index, size: int, first: int = 0, step: int = 1) -> Iterator[Index]:
    """The order with two of its blocks exchanged, for any two or some.

    Args:
        order: Device id of each rank. Shape [ranks].
        size: Ranks of a block.
        first: Pair to begin with, in the order of the first block, then the second.
        step: How many pairs further the next is.
    """
    count = len(order) // size
    ones, others = np.triu_indices(count, k=1)
    for one, other in zip(
        (ones[first::step] * size).tolist(),
        (others[first::step] * size).tolist(),
        strict=True,
    ):
        made = order.copy()
        made[one : one + size] = order[other : other + size]
        made[other : other + size] = order[one : one + size]
        yield made


def moved_order(
    order: Index, spare: Index, size: int, rng: np.random.Generator
) -> Index:
    """A random move of blocks: exchange, insert, reverse a run, rotate one, replace.

    Args:
        order: Device id of each rank. Shape [ranks].
        spare: Devices that may be used but are not; a block may be replaced by some.
        size: Ranks of a block, at most half of the ranks.
        rng: Of everything random.
    """
    if len(spare) and rng.random() < 0.25:
        return _replaced(order, spare, size, rng)
    count = len(order) // size
    if count < 2:
        return order.copy()
    first, last = int(rng.random() * count), int(rng.random() * (count - 1))
    first, last = min(first, last), max(first, last) + (last >= first)
    kind = int(rng.random() * 4)
    made = order.copy()
    start, middle, stop = first * size, last * size, (last + 1) * size
    if kind == 0:
        made[start : start + size] = order[middle:stop]
        made[middle:stop] = order[start : start + size]
    elif kind == 1:
        made[start + size : stop] = order[start:middle]
        made[start : start + size] = order[middle:stop]
    elif kind == 2:
        blocks = order[start:stop].reshape(-1, size)
        made[start:stop] = blocks[::-1].reshape(-1)
    else:
        turn = start + size * int(1 + rng.random() * (last - first))
        made[start : start + stop - turn] = order[turn:stop]
        made[start + stop - turn : stop] = order[start:turn]
    return made


def _replaced(order: Index, spare: Index, size: int, rng: np.random.Generator) -> Index:
    """A block gives way to devices that were left out."""
    many = min(size, len(spare))
    start = int(rng.integers(len(order) // many)) * many
    made = order.copy()
    begin = int(rng.integers(len(spare) - many + 1))
    made[start : start + many] = spare[begin : begin + many]
    return made


def crossed(one: Index, other: Index, rng: np.random.Generator) -> Index:
    """Pieces of one order in place, the rest filled up in the order of the other.

    Args:
        one: Device id of each rank; gives as many ranks. Shape [ranks].
        other: May have other devices, and more or fewer of them.
        rng: Of the points at which they change over.
    """
    points = np.sort(rng.integers(0, len(one) + 1, size=_POINTS))
    piece = np.searchsorted(points, np.arange(len(one)), side="right")
    kept = piece % 2 == 0
    taken = set(one[kept].tolist())
    candidates = dict.fromkeys([*other.tolist(), *one.tolist()])
    fill = [device for device in candidates if device not in taken]
    made = one.copy()
    made[~kept] = fill[: int((~kept).sum())]
    return made


def spare_of(pool: Index, order: Index) -> Index:
    """Devices of a pool that an order leaves out, by id. Shape [left out]."""
    left = np.zeros(1 + max(int(pool.max()), int(order.max())), dtype=bool)
    left[pool] = True
    left[order] = False
    return np.flatnonzero(left)


def refilled(
    order: Index, old: Row, new: Row, spare: Index, rng: np.random.Generator
) -> Index:
    """Devices for a row of another number of them.

    Whole stages come or go if the pipeline changes, else as many in every stage.

    Args:
        order: Device id of each rank of the old row.
        old: Row with those devices.
        new: Row with more or fewer.
        spare: Devices that may be added, enough of them.
        rng: Of where devices are taken out.
    """
    ranks = math.prod(new[axis] for axis in AXES)
    stages = new["pp"] if new["pp"] == old["pp"] else 1
    grid, each = order.reshape(stages, -1), ranks // stages
    if each > grid.shape[1]:
        more = spare[: ranks - len(order)].reshape(stages, -1)
        return np.concatenate([grid, more], axis=1).reshape(-1)
    gone = grid.shape[1] - each
    start = gone * int(rng.random() * (grid.shape[1] // gone)) if gone else 0
    kept = np.delete(grid, slice(start, start + gone), axis=1)
    return np.ascontiguousarray(kept.reshape(-1))
