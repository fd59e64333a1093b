"""Orders of a ring on unlike links: the tour whose slowest link is fastest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.simulate.send_tables import Network

__all__ = ["ring_order", "slowest_link_s"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Ranks up to which the best tour is found by dynamic programming: 2^n n^2 steps.
_EXACT = 11
#: Exponent by which a tour's sum stands for its slowest link; tours that are begun, and
#: swaps made of each at most; gains below which a swap is none.
_SHARPNESS, _STARTS, _SWAPS, _LEAST_GAIN = 8.0, 16, 1_000, 1e-15


def slowest_link_s(order: list[int], seconds: FloatArray) -> float:
    """Seconds of the slowest message of a tour.

    Args:
        order: Ranks, each of which sends to the next, the last to the first.
        seconds: Of a message from a rank to another. Shape [n, n].
    """
    return float(seconds[order, np.roll(order, -1)].max())


def ring_order(network: Network, message_bytes: float) -> list[int]:
    """Return ranks in the order in which a ring's slowest message is fastest.

    Exact for up to 11 ranks. For more the tour is grown from the
    nearest neighbours, then improved by swapping runs of it.

    Args:
        network: That joins the ranks.
        message_bytes: Of the message of a step: the tensor's over the ranks.
    """
    n = network.ranks
    with np.errstate(divide="ignore"):
        seconds = network.latency + message_bytes / network.bandwidth
    plain = list(range(n))
    if n <= 2:
        return plain
    found = _best_tour(seconds) if n <= _EXACT else _good_tour(seconds)
    better = slowest_link_s(found, seconds) < slowest_link_s(plain, seconds)
    return found if better else plain


def _best_tour(seconds: FloatArray) -> list[int]:
    """Held and Karp's program, with the slowest link in place of the sum.

    ``best[set, last]``: over paths from rank 0 through all of a set to its last.
    """
    n = len(seconds) - 1
    inner = seconds[1:, 1:]
    best = np.full((1 << n, n), np.inf)
    came = np.zeros((1 << n, n), dtype=np.int64)
    for rank in range(n):
        best[1 << rank, rank] = seconds[0, rank + 1]
    for members in range(1, 1 << n):
        inside = members >> np.arange(n) & 1 == 1
        if inside.sum() == 1:
            continue
        for last in np.flatnonzero(inside).tolist():
            before = best[members ^ (1 << last)]
            through = np.maximum(before, inner[:, last])
            came[members, last] = through.argmin()
            best[members, last] = through.min()
    members = (1 << n) - 1
    last = int(np.maximum(best[members], seconds[1:, 0]).argmin())
    tour = []
    while members:
        tour.append(last + 1)
        members, last = members ^ (1 << last), int(came[members, last])
    return [0, *tour[::-1]]


def _good_tour(seconds: FloatArray) -> list[int]:
    """Nearest neighbours from some ranks, improved; the best of them."""
    n = len(seconds)
    weights = (seconds / seconds.max()) ** _SHARPNESS
    starts = range(0, n, max(1, n // _STARTS))
    tours = [_improved(_nearest(seconds, start), weights) for start in starts]
    return min(tours, key=lambda tour: slowest_link_s(tour, seconds))


def _nearest(seconds: FloatArray, start: int) -> list[int]:
    left = np.ones(len(seconds), dtype=bool)
    tour = [start]
    left[start] = False
    while left.any():
        next_rank = int(np.where(left, seconds[tour[-1]], np.inf).argmin())
        tour.append(next_rank)
        left[next_rank] = False
    return tour


def _improved(tour: list[int], weights: FloatArray) -> list[int]:
    """Swap neighbouring runs of a tour for as long as the sum of its weights falls.

    Messages keep their direction, since links may be faster one way.
    """
    for _ in range(_SWAPS):
        slow = int(weights[tour, np.roll(tour, -1)].argmax()) + 1
        for turn in range(len(tour)):
            first = (slow + turn) % len(tour)
            path = np.array(tour[first:] + tour[:first])
            found = _best_swap(path, weights)
            if found is not None:
                one, two = found
                swapped = [*path[:one], *path[two:], *path[one:two]]
                tour = [int(rank) for rank in swapped]
                break
        else:
            break
    return tour


def _best_swap(path: IntArray, weights: FloatArray) -> tuple[int, int] | None:
    """Ends of the first two runs of A B C that had better go A C B, if any.

    The link from the end of the path to its beginning is taken out, too.
    """
    n = len(path)
    links = weights[path[:-1], path[1:]]
    one, two = np.triu_indices(n, 1)
    one, two = one[one > 0], two[one > 0]
    added = (
        weights[path[one - 1], path[two]]
        + weights[path[-1], path[one]]
        + weights[path[two - 1], path[0]]
    )
    removed = links[one - 1] + links[two - 1] + weights[path[-1], path[0]]
    gain = removed - added
    best = int(gain.argmax())
    return (int(one[best]), int(two[best])) if gain[best] > _LEAST_GAIN else None
