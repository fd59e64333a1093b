"""Orders made from another order by moves that a network weighs.

A move takes a group forward, with what must come before it, or back, with what must
come after it, by a distance left to chance. What comes out is an order again.
"""

from __future__ import annotations

import numpy as np

from planner.simulate.compiled import compiled, copy_into
from planner.split import Groups
from planner.split.task import Array, Index, Mask

__all__ = ["sample_moves"]

_MOST_MOVES = 3
_FARTHEST = 0.7  # of all places


@compiled
def _shift(
    order: Index,
    group: int,
    back: bool,
    distance: int,
    before_start: Index,
    before: Index,
    after_start: Index,
    after: Index,
    goes: Mask,
    line: Index,
) -> None:
    """Move a group and what must go with it, in place.

    Args:
        order: All groups.
        goes: Scratch. Shape [m].
        line: Scratch. Shape [m].
    """
    m = len(order)
    place = 0
    while order[place] != group:
        place += 1
    goes[:] = False
    goes[group] = True
    first, last = max(0, place - distance), place
    if back:
        first, last = place, min(m - 1, place + distance)
    start, flat = (before_start, before) if back else (after_start, after)
    for i in range(last - first + 1):
        at = order[first + i] if back else order[last - i]
        for k in range(start[at], start[at + 1]):
            if goes[flat[k]]:
                goes[at] = True
                break
    fill = 0
    for turn in range(2):
        for i in range(first, last + 1):
            # Those that go come first if they go forward, last if back.
            if goes[order[i]] == ((turn == 0) != back):
                line[fill] = order[i]
                fill += 1
    copy_into(order[first : last + 1], line[:fill])


@compiled
def _move(
    start: Index,
    picks: Index,
    distances: Index,
    counts: Index,
    before_start: Index,
    before: Index,
    after_start: Index,
    after: Index,
    orders: Index,
) -> None:
    m = len(start)
    goes, line = np.empty(m, dtype=np.bool_), np.empty(m, dtype=np.int64)
    for row in range(len(orders)):
        orders[row] = start
        for k in range(counts[row]):
            _shift(
                orders[row],
                picks[row, k] // 2,
                picks[row, k] % 2 == 1,
                distances[row, k],
                before_start,
                before,
                after_start,
                after,
                goes,
                line,
            )


def sample_moves(
    groups: Groups, order: Index, scores: Array, count: int, rng: np.random.Generator
) -> tuple[Index, Array]:
    """Draw orders that are a few moves away.

    Args:
        groups: What is ordered.
        order: To start from, producers first. Shape [m].
        scores: Log odds of each group to move forward and to move back. Shape [m, 2].
        count: Orders wanted.
        rng: What is left to chance.

    Returns:
        Groups in their order, producers first, shape [count, m], and how often each
        one moved a group forward and back, shape [count, m, 2].
    """
    m = len(groups)
    scores = scores.reshape(-1).astype(np.float64)
    odds = np.exp(scores - scores.max())
    odds /= odds.sum()
    ends = np.cumsum(odds)
    picks = np.searchsorted(ends, rng.random((count, _MOST_MOVES)) * ends[-1], "right")
    picks = np.minimum(picks, 2 * m - 1)
    far = np.log(max(_FARTHEST * m, 2.0))
    distances = np.exp(far * rng.random((count, _MOST_MOVES))).astype(np.int64)
    counts = rng.integers(1, _MOST_MOVES + 1, count)
    orders = np.empty((count, m), dtype=np.int64)
    _move(
        np.ascontiguousarray(order),
        picks,
        distances,
        counts,
        groups.before_start,
        groups.before,
        groups.after_start,
        groups.after,
        orders,
    )
    taken = np.zeros((count, 2 * m))
    made = np.arange(_MOST_MOVES)[None, :] < counts[:, None]
    row = np.broadcast_to(np.arange(count)[:, None], picks.shape)
    np.add.at(taken, (row[made], picks[made]), 1.0)
    return orders, taken.reshape(count, m, 2)
