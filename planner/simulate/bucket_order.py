"""Times at which buckets of gradients have been summed, by the order they are sent in.

Backward fills buckets one after the other, those of the last layers first; the next
forward needs those of the first layers first. Sums go over one channel, a round of a
bucket at a time: a bucket that comes later may go before what is left of another.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError
from planner.schema.strategy_parts import BucketOrder

__all__ = ["bucket_ends", "first_layer_wait_s", "next_forward_wait_s"]


def bucket_ends(
    filled_s: Sequence[float],
    sum_s: Sequence[float],
    order: BucketOrder,
    rounds: int = 1,
) -> NDArray[np.float64]:
    """Return when the sum of each bucket has ended.

    Args:
        filled_s: When backward has filled each bucket, in the order of buckets, those
            of the last layers first. Shape [buckets].
        sum_s: Seconds of its sum, alone. Shape [buckets].
        order: ``filled``: in the order in which they are full. ``needed``: of the full
            ones the last, which the next forward needs first.
        rounds: Equal parts of a sum, between which another bucket may go first.
    Returns:
        Shape [buckets].
    Raises:
        StrategyError: If a bucket has no sum, or there is no round.
    """
    if len(filled_s) != len(sum_s) or rounds < 1:
        raise StrategyError(
            f"{len(filled_s)} buckets, {len(sum_s)} sums and rounds={rounds}; give as "
            f"many sums as buckets, and a round at least"
        )
    coming = sorted(range(len(filled_s)), key=lambda one: (filled_s[one], one))
    ends, left = np.zeros(len(filled_s)), [rounds] * len(filled_s)
    waiting: list[tuple[float, int]] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, filled_s[coming[0]])
        while coming and filled_s[coming[0]] <= now:
            bucket = coming.pop(0)
            rank = float(-bucket) if order == "needed" else filled_s[bucket]
            heapq.heappush(waiting, (rank, bucket))
        bucket = waiting[0][1]
        now += sum_s[bucket] / rounds
        left[bucket] -= 1
        if not left[bucket]:
            ends[bucket] = now
            heapq.heappop(waiting)
    return ends


def first_layer_wait_s(
    filled_s: Sequence[float],
    sum_s: Sequence[float],
    order: BucketOrder,
    rounds: int = 1,
) -> float:
    """Return the seconds from the end of backward until the first layers are summed.

    Args:
        filled_s: As :func:`bucket_ends`, whose last bucket is the first layers'.
        sum_s: As there; likewise order and rounds.
    """
    ends = bucket_ends(filled_s, sum_s, order, rounds)
    return float(ends[-1] - max(filled_s))


def next_forward_wait_s(
    filled_s: Sequence[float],
    sum_s: Sequence[float],
    wanted_s: Sequence[float],
    rounds: int = 1,
) -> float:
    """Return the seconds by which sums hold up the next forward in all.

    It takes each bucket as it comes, so that a wait for one moves all that comes later.

    Args:
        filled_s: As :func:`bucket_ends`; sums are in the order ``needed``.
        sum_s: As there; likewise rounds.
        wanted_s: Seconds after its begin, at the end of backward, at which a forward
            that waits for nothing reads the weights of each bucket. Shape [buckets].
    """
    ends = bucket_ends(filled_s, sum_s, "needed", rounds)
    late = ends - max(filled_s) - np.asarray(wanted_s, dtype=np.float64)
    return float(max(late.max(), 0.0))
