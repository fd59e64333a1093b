"""Moves that made splits better, to be imitated.

From a split along a task's own orders, moves are drawn evenly; those that make it
better are the examples, by what each gains. The best one gives the next split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.split import Groups, Split, best_along, standard_orders
from planner.split.task import Index
from policies.split.moves import sample_moves
from policies.split.standing import stand

__all__ = ["Hits", "find_hits"]

_NO_GAIN = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hits:
    """A split, and what makes it better.

    Attributes:
        standing: Of the split. Shape [m, standing].
        share: Of the gain by evenly drawn moves, by group moved forward and back; all
            add up to 1. Shape [m, 2].
    """

    standing: NDArray[np.float32]
    share: NDArray[np.float32]


def find_hits(
    groups: Groups, *, splits: int, tries: int, rng: np.random.Generator
) -> Iterator[Hits]:
    """Examples from one task.

    Args:
        groups: The task.
        splits: Most of them, each better than the one before.
        tries: Orders looked at for each.
        rng: What is left to chance.
    """
    orders = list(standard_orders(groups))
    order: Index = orders[int(rng.integers(len(orders)))]
    split = best_along(groups, order)
    even = np.zeros((len(groups), 2))
    for _ in range(splits):
        if split is None:
            return
        moved, taken = sample_moves(groups, order, even, tries, rng)
        gains = np.zeros(tries)
        best: Split | None = None
        for row, other in enumerate(moved):
            found = best_along(groups, other, split.load_ms, check=False)
            if found is None:
                continue
            gains[row] = np.log(split.load_ms / found.load_ms)
            if gains[row] == gains.max():
                best, following = found, other
        if best is None or gains.max() < _NO_GAIN:
            return
        share = np.tensordot(gains, taken, axes=1)
        yield Hits(
            standing=stand(groups, order, split),
            share=(share / share.sum()).astype(np.float32),
        )
        order, split = following, best
