"""The ``learned`` solver of split tasks: a network orders, dynamic programming cuts.

The network reads the task once. Its heads' own orders come first, then orders drawn by
its scores, in rounds, until a round brings nothing; each order is cut exactly.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from planner.errors import StrategyError
from planner.split import (
    Groups,
    Solution,
    Split,
    SplitTask,
    best_along,
    breaches,
    group,
    order_by_priority,
)
from planner.split.task import Array, Index
from policies.split.features import observe
from policies.split.network import SplitNetwork, batch_of
from policies.split.orders import sample_orders
from policies.split.saved import load_policy

__all__ = ["SearchConfig", "best_by_network", "learned", "scores_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How long to draw orders.

    Attributes:
        first: Orders drawn in any case, besides each head's own.
        rounds: Rounds of so many after that, each only if the one before it brought a
            better split. As long as there is no split at all they go on.
        desperate: Rounds in which there may be no split at all.
        gain: By what part a round must be better to bring another.
    """

    first: int = 4
    rounds: int = 15
    desperate: int = 100
    gain: float = 1e-3

    def __post_init__(self) -> None:
        if min(self.first, self.rounds, self.desperate) < 0 or self.gain < 0:
            raise StrategyError(
                f"first={self.first}, rounds={self.rounds}, "
                f"desperate={self.desperate}, gain={self.gain}; none is negative"
            )


@lru_cache(maxsize=1)
def _shipped() -> SplitNetwork:
    return load_policy().network


def scores_of(network: SplitNetwork, groups: Groups) -> Array:
    """What the network makes of a task.

    Args:
        network: That scores.
        groups: What is to be ordered.

    Returns:
        Log odds to come next, by head. Shape [heads, m].
    """
    with torch.inference_mode():
        found = network(batch_of([observe(groups)]))
    scores: Array = found.numpy().T.astype(np.float64)
    return scores


def _rounds(
    groups: Groups, scores: Array, search: SearchConfig, rng: np.random.Generator
) -> Iterator[list[Index]]:
    """The heads' own orders with the first drawn ones, then further rounds."""
    heads = len(scores)
    own = [order_by_priority(groups, row) for row in scores]
    drawn = 0
    for _ in range(1 + max(search.rounds, search.desperate)):
        rows = (drawn + np.arange(search.first)) % heads
        drawn += search.first
        yield [*own, *sample_orders(groups, scores[rows], rng)[0]]
        own = []


def best_by_network(
    network: SplitNetwork,
    groups: Groups,
    *,
    seed: int = 0,
    search: SearchConfig | None = None,
    ends: float = np.inf,
) -> Split | None:
    """The best split along orders that the network scores highly.

    Args:
        network: That scores.
        groups: What is split.
        seed: Of the orders drawn.
        search: How many.
        ends: By the monotonic clock; one order at least is cut in any case.

    Returns:
        The split; None if there is none along any of the orders.
    """
    search = search or SearchConfig()
    scores, rng = scores_of(network, groups), np.random.default_rng(seed)
    best: Split | None = None
    for number, orders in enumerate(_rounds(groups, scores, search, rng)):
        before = np.inf if best is None else best.load_ms
        for order in orders:
            bound = np.inf if best is None else best.load_ms
            best = best_along(groups, order, bound, check=False) or best
            if time.monotonic() > ends:
                return best
        if best is None:
            continue
        if best.load_ms >= before * (1 - search.gain) or number >= search.rounds:
            break
    return best


def learned(
    task: SplitTask, *, time_limit_s: float = 60.0, seed: int = 0
) -> Solution | None:
    """Split a task by the shipped network; see :func:`best_by_network`.

    Args:
        task: What is split.
        time_limit_s: Time there is; it takes some hundredths of a second if left alone.
        seed: Of the orders drawn.

    Returns:
        A legal split; None if no order that was drawn allows one.

    Raises:
        NoFeasiblePlanError: If no device can hold a group.
        StrategyError: If the shipped weights are damaged.
    """
    ends = time.monotonic() + time_limit_s
    # Mirrored groups are rarely needed, and always legal.
    for mirrored in (False, True):
        groups = group(task, mirrored=mirrored)
        split = best_by_network(_shipped(), groups, seed=seed, ends=ends)
        if split is None:
            return None
        if not breaches(task, split.assignment):
            return Solution(
                load_ms=split.load_ms, assignment=split.assignment, found_by="learned"
            )
    return None
