"""Budget of a search in simulations and time."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel, CostTable
from planner.search.base import Request
from planner.space import StrategyTable

__all__ = ["SIMULATIONS", "Budget"]

Index = NDArray[np.int64]

#: Strategies to simulate with neither an evaluation budget nor a time budget.
SIMULATIONS = 96


class Budget:
    """Count of the simulations and the time that a search spends.

    Args:
        request: The question, with its budgets.
        contenders: Searches that share the budget of simulations, each with as many as
            the request says.

    Attributes:
        request: The question.
        started: ``time.perf_counter`` at the start.
    """

    def __init__(self, request: Request, contenders: int = 1) -> None:
        self.request = request
        self.started = time.perf_counter()
        self._model = CostModel(request.context)
        budget = request.evaluation_budget
        if budget is None and request.time_budget_s is None:
            budget = SIMULATIONS
        self._budget = None if budget is None else budget * contenders

    @property
    def left(self) -> int | None:
        """Simulations that may still be run; None without a limit."""
        if self._budget is None:
            return None
        return max(0, self._budget - self._model.evaluations["simulated"])

    @property
    def total(self) -> int | None:
        """Simulations that may be run in all; None without a limit."""
        return self._budget

    @property
    def until(self) -> float | None:
        """``time.perf_counter`` at the end of the time budget; None without a limit."""
        budget = self.request.time_budget_s
        return None if budget is None else self.started + budget

    def is_late(self, share: float = 1.0) -> bool:
        """Return True if this share of the time budget is over."""
        budget = self.request.time_budget_s
        return budget is not None and (
            time.perf_counter() - self.started > budget * share
        )

    @property
    def evaluations(self) -> dict[str, int]:
        """Number of strategies priced so far, by fidelity."""
        return dict(self._model.evaluations)

    def count(self, model: CostModel, before: Mapping[str, int] | None = None) -> None:
        """Add the evaluations of another cost model to those of this search.

        Args:
            model: The other one.
            before: Evaluations of it that were added before; None for none.
        """
        for fidelity, many in model.evaluations.items():
            counted = before[fidelity] if before else 0
            self._model.evaluations[fidelity] += many - counted

    def price_table(self, table: StrategyTable, ids: Index, order: Index) -> CostTable:
        """Price many strategies; see :meth:`CostModel.table_in_orders`."""
        return self._model.table_in_orders(table, ids, order)

    def count_simulations(self, many: int) -> None:
        """Add strategies that were simulated elsewhere."""
        self._model.evaluations["simulated"] += many

    def rounds(self, most: int) -> int | None:
        """Return the number of rounds for a search; None if a time budget ends it.

        Closed forms cost nothing of the evaluation budget, but a small budget asks for
        a short search.

        Args:
            most: Rounds with a large budget.
        """
        if self.request.time_budget_s is not None:
            return None
        return int(np.clip((self._budget or most) // 2, 2, most))

    def is_over(self, done: int, most: int, share: float) -> bool:
        """Return True if the rounds are over and the finalists are next.

        Args:
            done: Rounds so far.
            most: Rounds without a time budget and with a large evaluation budget.
            share: Share of the time that rounds may take.
        """
        rounds = self.rounds(most)
        if rounds is None:
            return self.is_late(share) or self.left == 0
        return done >= rounds

    def share_of(self, rounds: int) -> int:
        """Return the simulations a round that spend half of the budget in total."""
        if self._budget is None:
            return 2
        return min(self._budget // (2 * rounds) + 1, self.left or 0)

    def elapsed_share(self, share: float = 1.0) -> float:
        """Return the elapsed part of a share of the time, 0 to 1; 1 without a limit."""
        budget = self.request.time_budget_s
        if not budget:
            return 1.0
        spent = time.perf_counter() - self.started
        return min(1.0, spent / (budget * share))
