"""Budget of a search: simulations, and time."""

from __future__ import annotations

import time

import numpy as np

from planner.cost import CostModel
from planner.search.base import Request

__all__ = ["SIMULATIONS", "Budget"]

#: Strategies to simulate where neither a budget nor a time is given.
SIMULATIONS = 96


class Budget:
    """Counts what a search spends.

    Args:
        request: What is asked.

    Attributes:
        request: The same.
        started: When, by ``time.perf_counter``.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started = time.perf_counter()
        self._model = CostModel(request.setting)
        budget = request.evaluation_budget
        if budget is None and request.time_budget_s is None:
            budget = SIMULATIONS
        self._budget = budget

    @property
    def left(self) -> int | None:
        """Simulations that may still be run; None without a limit."""
        if self._budget is None:
            return None
        return max(0, self._budget - self._model.evaluations["simulated"])

    @property
    def until(self) -> float | None:
        """When the time is over, by ``time.perf_counter``; None without a limit."""
        budget = self.request.time_budget_s
        return None if budget is None else self.started + budget

    def is_late(self, share: float = 1.0) -> bool:
        """True if this share of the time that was given is over."""
        budget = self.request.time_budget_s
        return budget is not None and (
            time.perf_counter() - self.started > budget * share
        )

    @property
    def evaluations(self) -> dict[str, int]:
        """Strategies priced so far, by fidelity."""
        return dict(self._model.evaluations)

    def count(self, model: CostModel) -> None:
        """Add what another model priced for this search."""
        for fidelity, many in model.evaluations.items():
            self._model.evaluations[fidelity] += many

    def rounds(self, most: int) -> int | None:
        """Rounds that a search should take; None where the time says when to end.

        Closed forms cost nothing of the budget, but many rounds for a handful of
        simulations are not what was asked for.
        """
        if self.request.time_budget_s is not None:
            return None
        return int(np.clip((self._budget or most) // 2, 2, most))

    def is_over(self, done: int, most: int, share: float) -> bool:
        """True if the search goes on to the finalists.

        Args:
            done: Rounds so far.
            most: Rounds where no time is given and the budget is large.
            share: Of the time that rounds may take.
        """
        rounds = self.rounds(most)
        if rounds is None:
            return self.is_late(share) or self.left == 0
        return done >= rounds

    def share_of(self, rounds: int) -> int:
        """Simulations a round, if so many rounds are to take half of the budget."""
        if self._budget is None:
            return 2
        return min(self._budget // (2 * rounds) + 1, self.left or 0)

    def elapsed_share(self, share: float = 1.0) -> float:
        """Elapsed part of a share of the time, from 0 to 1; 1 without a limit."""
        budget = self.request.time_budget_s
        if not budget:
            return 1.0
        spent = time.perf_counter() - self.started
        return min(1.0, spent / (budget * share))
