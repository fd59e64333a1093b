"""The best plan's neighbours, simulated, until none of them is better.

Closed forms rank a few rows of each mesh under one schedule that stands for others.
What is best by them need not be best under the schedule that won, with as many stages
a rank or samples a microbatch.
"""

from __future__ import annotations

import time

import numpy as np

from planner.cost import CostModel
from planner.schema import SCHEDULES
from planner.search import Request
from planner.search.arranging.mended import scores_of
from planner.search.arranging.misses import best_score
from planner.search.arranging.settling import Settler
from planner.search.moves import Row, Solution
from planner.search.row_moves import neighbours
from planner.space import StrategyTable
from policies.partition.refining import Known

__all__ = ["polish"]

#: Neighbours that are simulated at once, those that closed forms call at most this much
#: worse; and changes in a row.
_NEIGHBOURS, _WORSE, _CHANGES = 6, 1.1, 4


def polish(settler: Settler, known: Known, until: float | None) -> None:
    """Simulate the neighbours of the best that fits, and of what is better than it.

    Args:
        settler: Cuts and simulates; has the question.
        known: Gets what is found.
        until: When to stop, by ``time.perf_counter``; None for no clock.
    """
    request = settler.request
    tried = {
        (one.order.tobytes(), tuple(one.row.values()))
        for one, cuts in known.found
        if len(cuts) > 1 or one.row["pp"] == 1
    }
    for _ in range(_CHANGES):
        values = [best_score(request, cuts) for _, cuts in known.found]
        best = min(values, default=np.inf)
        if not np.isfinite(best) or _left(settler, until) < 1:
            return
        leader = known.found[int(np.argmin(values))][0]
        for row in _near(request, settler.model, leader):
            key = leader.order.tobytes(), tuple(row.values())
            if key in tried:
                continue
            cuts = min(_left(settler, until), 2 if row["pp"] > 1 else 1)
            if cuts < 1:
                return
            tried.add(key)
            one = Solution(order=leader.order, row=row)
            known.found.append((one, settler.settled(row, one.order, cuts=cuts)))
        if min(best_score(request, cuts) for _, cuts in known.found) >= best:
            return


def _left(settler: Settler, until: float | None) -> int:
    """Simulations that may still be run, if they are few; 0 when the time is up."""
    if until is not None and time.perf_counter() >= until:
        return 0
    budget, spent = settler.request.evaluation_budget, settler.model.evaluations
    return 2 if budget is None else budget - spent["simulated"]


def _near(request: Request, model: CostModel, leader: Solution) -> list[Row]:
    """The row itself, to be cut in two ways, and its most promising neighbours."""
    table = neighbours(leader.row, request.facts, request.pins, SCHEDULES)
    here = StrategyTable.from_columns(**leader.row)
    if table is None:
        return [leader.row]
    rows = StrategyTable.concatenate([here, table])
    none = np.zeros(len(rows), dtype=np.int64)
    costs = model.arranged(rows, leader.order[None, :], none)
    hope = scores_of(costs, rows, request.objective, fitting=False)
    promising = 1 + np.flatnonzero(hope[1:] <= _WORSE * hope[0])
    ranked = promising[np.argsort(hope[promising], kind="stable")]
    return [leader.row, *(rows.row(int(index)) for index in ranked[:_NEIGHBOURS])]
