"""Small changes of arrangements: which group stands where, under which layout."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled

__all__ = ["neighbours"]

Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: How often a change is: two groups swap, one moves, a run is turned round, two runs
#: of equal length swap, the layout is another.
_SHARES = np.cumsum([0.35, 0.25, 0.1, 0.1, 0.2])


@compiled
def _swap_runs(row: Index, first: int, second: int, length: int) -> None:
    for at in range(length):
        row[first + at], row[second + at] = row[second + at], row[first + at]


@compiled
def _move(row: Index, source: int, target: int) -> None:
    group = row[source]
    step = 1 if target > source else -1
    for at in range(source, target, step):
        row[at] = row[at + step]
    row[target] = group


@compiled
def _restrict(row: Index, usable: Mask) -> None:
    """Keep usable groups in their order, then add those that are missing."""
    seen = np.zeros(len(usable), dtype=np.bool_)
    kept = 0
    for at in range(len(row)):
        group = row[at]
        if group >= 0 and usable[group]:
            row[kept] = group
            seen[group] = True
            kept += 1
    for group in range(len(usable)):
        if usable[group] and not seen[group]:
            row[kept] = group
            kept += 1
    row[kept:] = -1


@compiled
def _change(
    layout: Index,
    sequence: Index,
    usable: Mask,
    draws: NDArray[np.float64],
    shares: NDArray[np.float64],
) -> None:
    for row in range(len(layout)):
        groups = sequence[row]
        count = 0
        while count < len(groups) and groups[count] >= 0:
            count += 1
        kind, a, b, c = draws[row]
        first, second = int(a * count), int(b * count)
        if kind >= shares[3] or count < 2:
            layout[row] = int(c * len(usable))
            _restrict(groups, usable[layout[row]])
        elif kind < shares[0]:
            _swap_runs(groups, first, second, 1)
        elif kind < shares[1]:
            _move(groups, first, second)
        elif kind < shares[2]:
            low, high = min(first, second), max(first, second)
            groups[low : high + 1] = groups[low : high + 1][::-1].copy()
        else:
            low, high = min(first, second), max(first, second)
            length = min(high - low, count - high)
            _swap_runs(groups, low, high, min(length, 1 + int(c * length)))


def neighbours(
    layout: Index, sequence: Index, usable: Mask, rng: np.random.Generator
) -> tuple[Index, Index]:
    """One random change of each arrangement.

    Args:
        layout: Of each. Shape [n].
        sequence: Its usable groups in order, -1 after the last. Shape [n, groups].
        usable: Groups that each layout may use. Shape [layouts, groups].
        rng: Of the changes.
    Returns:
        As the first two.
    """
    layout, sequence = layout.copy(), np.ascontiguousarray(sequence).copy()
    _change(layout, sequence, usable, rng.random((len(layout), 4)), _SHARES)
    return layout, sequence
