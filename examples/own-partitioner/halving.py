"""A partitioner of one's own: successive halving over the prices of strategies."""

from __future__ import annotations

import time

import numpy as np

from planner.cost import CostModel
from planner.search import Candidate, Request, SearchResult
from planner.search.base import finish
from planner.search.refine import candidates_of_row
from planner.space import StrategyTable, enumerate_strategies


class HalvingPartitioner:
    """Prices all strategies by closed forms, few by simulation, the best half better.

    Source: Jamieson and Talwalkar 2016, "Non-stochastic best arm identification and
    hyperparameter optimization".

    Args:
        first: Strategies that are simulated with the exact cut of the model; the
            better half of them is simulated with other cuts and recomputation, too.
    """

    name = "halving"

    def __init__(self, first: int = 16) -> None:
        self._first = first

    def search(self, request: Request) -> SearchResult:
        """Answer a request; the same request gives the same answer."""
        started = time.perf_counter()
        model = CostModel(request.context)
        most = request.evaluation_budget or 2 * self._first
        candidates: list[Candidate] = []

        def spent() -> bool:
            late = request.time_budget_s is not None and (
                time.perf_counter() - started >= request.time_budget_s
            )
            return late or model.evaluations["simulated"] >= most

        rows = self._ranked(request, model)
        for rank, row in enumerate(rows):
            fits = any(one.cost.fits for one in candidates)
            if fits and (spent() or rank >= self._first):
                break
            candidates += candidates_of_row(
                model, row, free_recompute=False, most=1, limits=request.launcher_limits
            )
        for row in rows[: self._first // 2]:
            if spent():
                break
            free = "recompute" not in request.pins
            candidates += candidates_of_row(
                model, row, free_recompute=free, most=1, limits=request.launcher_limits
            )
        return finish(self.name, request, model, candidates, started)

    def _ranked(self, request: Request, model: CostModel) -> list[dict[str, int]]:
        """Strategies of all devices, the fastest by closed forms first."""
        tables = list(
            enumerate_strategies(
                request.facts, num_devices=len(request.context.order), pins=request.pins
            )
        )
        if not tables:
            return []
        table = StrategyTable.concatenate(tables)
        costs = model.table(table)
        # What does not fit comes last, but comes: the closed form is not exact.
        seconds = np.where(costs.fits, costs.step_time_s, np.inf)
        best = np.argsort(seconds, kind="stable")[: 4 * self._first]
        return [table.row(at) for at in best.tolist()]
