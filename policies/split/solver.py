"""The ``learned`` solver of split tasks: a network orders, dynamic programming cuts.

The network reads the task once. Its heads' own orders come first, then orders drawn by
its scores, then orders a few moves away from the best one, which the network weighs by
how that one's split stands; each order is cut exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
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
from planner.split.search import NO_BETTER
from planner.split.task import Array, Index
from policies.split.features import observe
from policies.split.moves import sample_moves
from policies.split.network import SplitNetwork, batch_of
from policies.split.orders import sample_orders
from policies.split.saved import load_policy
from policies.split.screening import can_tell, first_below
from policies.split.standing import stand

__all__ = ["SearchConfig", "best_by_network", "learned"]

_WIDER = 24  # times that a bound is made wider before it is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How many orders are cut.

    Attributes:
        drawn: Orders drawn by scores, besides each head's own.
        more: Most orders drawn as long as none of them allows a split.
        moved: Orders drawn in a round of moves.
        rounds: Most rounds of moves.
        patience: Rounds that bring nothing before that is the end.
        gain: By what part a round must be better to have brought something.
        sharp: What scores of moves are multiplied by. They are those of all moves of
            an order that was a hit, though one of them would often have done.
    """

    drawn: int = 4
    more: int = 400
    moved: int = 8
    rounds: int = 24
    patience: int = 2
    gain: float = 1e-4
    sharp: float = 4.0

    def __post_init__(self) -> None:
        counts = (self.drawn, self.more, self.moved, self.rounds, self.patience)
        if min(counts) < 0 or min(self.gain, self.sharp) < 0:
            raise StrategyError(
                f"drawn, more, moved, rounds, patience = {counts}, gain={self.gain}, "
                f"sharp={self.sharp}; none is negative"
            )


@lru_cache(maxsize=1)
def _shipped() -> SplitNetwork:
    return load_policy().network


@dataclass(slots=True, kw_only=True)
class _Best:
    """The best split so far, and the order it is cut along."""

    groups: Groups
    ends: float
    split: Split | None = None
    order: Index = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def over(self) -> bool:
        return time.monotonic() > self.ends

    @property
    def load_ms(self) -> float:
        return np.inf if self.split is None else self.split.load_ms

    def look(self, orders: Index) -> None:
        """Cut along each order that allows better, as long as there is time."""
        at = 0
        while at < len(orders):
            # Loads that are equal differ in their last digits.
            asked = self.load_ms * (1 - NO_BETTER)
            at += first_below(self.groups, orders[at:], asked)
            if at == len(orders):
                return
            order = orders[at]
            bound = self.load_ms if self.split else _near(self.groups, order)
            found = best_along(self.groups, order, bound, check=False)
            if found is not None:
                self.split, self.order = found, order
            if self.over:
                return
            at += 1


def _near(groups: Groups, order: Index) -> float:
    """A load that the order's best cut is not far below: cuts are quicker with one."""
    if not can_tell(groups):
        return np.inf
    bound = float(groups.accelerator_ms.sum()) / max(groups.task.accelerators, 1)
    for _ in range(_WIDER):
        if bound > 0 and first_below(groups, order[None], bound) == 0:
            return bound
        bound *= 1.3
    return np.inf


def _begin(
    best: _Best, scores: Array, search: SearchConfig, rng: np.random.Generator
) -> None:
    """The heads' own orders, and some drawn by their scores."""
    groups, heads = best.groups, len(scores)
    best.look(np.stack([order_by_priority(groups, row) for row in scores]))
    drawn = 0
    while drawn < search.drawn or (best.split is None and drawn < search.more):
        if best.over:
            return
        rows = (drawn + np.arange(max(search.drawn, 1))) % heads
        drawn += len(rows)
        best.look(sample_orders(groups, scores[rows], rng)[0])


@torch.inference_mode()
def best_by_network(
    network: SplitNetwork,
    groups: Groups,
    *,
    seed: int = 0,
    search: SearchConfig | None = None,
    ends: float = np.inf,
) -> Split | None:
    """The best split along orders that the network thinks of.

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
    rng = np.random.default_rng(seed)
    best = _Best(groups=groups, ends=ends)
    batch = batch_of([observe(groups)])
    encoded = network.encode(batch)
    scores = network.orders(batch, encoded).numpy().astype(np.float64)
    _begin(best, scores.T, search, rng)
    barren, at = 0, np.inf
    for _ in range(search.rounds):
        if best.split is None or best.over or barren >= search.patience:
            break
        if best.load_ms < at:
            standing = torch.from_numpy(stand(groups, best.order, best.split))
            odds = search.sharp * network.moves(batch, encoded, standing).numpy()
            at = best.load_ms
        best.look(sample_moves(groups, best.order, odds, search.moved, rng)[0])
        barren = 0 if best.load_ms < at * (1 - search.gain) else barren + 1
    return best.split


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
