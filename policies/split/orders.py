"""Orders of groups drawn by scores.

Of the groups that may come next, each comes with the softmax of its score. The slope of
an order's log probability comes with it, since it needs the same sums.
"""

from __future__ import annotations

import numpy as np

from planner.simulate.compiled import compiled
from planner.split.task import Array, Index, Precedence

__all__ = ["sample_orders"]


@compiled
def _sample(
    scores: Array,
    chance: Array,
    before_start: Index,
    after_start: Index,
    after: Index,
    orders: Index,
    slopes: Array,
) -> None:
    """One order for each row of scores; see :func:`sample_orders`."""
    rows, m = scores.shape
    ready = np.empty(m, dtype=np.int64)
    share = np.empty(m)
    for row in range(rows):
        waits = before_start[1:] - before_start[:-1]
        count = 0
        for at in range(m):
            if waits[at] == 0:
                ready[count] = at
                count += 1
        for place in range(m):
            most = -np.inf
            for k in range(count):
                most = max(most, scores[row, ready[k]])
            total = 0.0
            for k in range(count):
                share[k] = np.exp(scores[row, ready[k]] - most)
                total += share[k]
            pick, left = count - 1, chance[row, place] * total
            for k in range(count):
                left -= share[k]
                if left < 0:
                    pick = k
                    break
            for k in range(count):
                slopes[row, ready[k]] -= share[k] / total
            at = ready[pick]
            slopes[row, at] += 1.0
            orders[row, place] = at
            count -= 1
            ready[pick] = ready[count]
            for k in range(after_start[at], after_start[at + 1]):
                waits[after[k]] -= 1
                if waits[after[k]] == 0:
                    ready[count] = after[k]
                    count += 1


def sample_orders(
    groups: Precedence, scores: Array, rng: np.random.Generator
) -> tuple[Index, Array]:
    """Draw an order for each row of scores.

    Args:
        groups: What is ordered.
        scores: Log odds of each group to come next. Shape [orders, m].
        rng: What is left to chance.

    Returns:
        Groups in their order, producers first, shape [orders, m], and the slopes of
        each order's log probability by its scores, of the same shape.
    """
    scores = np.ascontiguousarray(scores, dtype=np.float64)
    orders = np.empty(scores.shape, dtype=np.int64)
    slopes = np.zeros(scores.shape)
    _sample(
        scores,
        rng.random(scores.shape),
        groups.before_start,
        groups.after_start,
        groups.after,
        orders,
        slopes,
    )
    return orders, slopes
