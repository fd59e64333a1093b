"""Uniform draws from the legal space: the baseline of any other partitioner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.cost import CostModel
from planner.search.base import Candidate, Request, SearchResult, finish
from planner.search.budget import Budget
from planner.search.orders import device_orders
from planner.search.refine import candidates_of_row
from planner.space import StrategyTable, enumerate_strategies

__all__ = ["RandomPartitioner"]

_DRAWS = 64
#: Share of the time that drawing may take; the rest is for prices.
_DRAWING = 0.3


class RandomPartitioner:
    """Draws legal strategies on the first order of devices that has any."""

    name = "random"

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        spending = Budget(request)
        rng = np.random.default_rng(request.seed)
        draws = request.evaluation_budget or _DRAWS
        models: list[CostModel] = []
        candidates: list[Candidate] = []
        for order in device_orders(request):
            model = CostModel(replace(request.context, order=order))
            models.append(model)
            for row in _sample(request, len(order), rng, draws, spending):
                candidates += candidates_of_row(
                    model,
                    row,
                    free_recompute=False,
                    most=1,
                    limits=request.launcher_limits,
                )
                if spending.is_late():
                    break
            if candidates:
                break
        return finish(self.name, request, models, candidates, spending.started)


def _sample(
    request: Request,
    devices: int,
    rng: np.random.Generator,
    count: int,
    spending: Budget,
) -> list[dict[str, int]]:
    """Draw rows uniformly: each row gets a random key, the lowest keys are kept.

    If time is short, only the tables of the first meshes are drawn from, in the order
    of their degrees.
    """
    kept: StrategyTable | None = None
    keys = np.zeros(0)
    for table in enumerate_strategies(
        request.facts, num_devices=devices, pins=request.pins
    ):
        drawn = rng.random(len(table))
        joined = StrategyTable.concatenate([kept, table] if kept else [table])
        keys = np.concatenate([keys, drawn])
        lowest = np.argsort(keys, kind="stable")[:count]
        kept, keys = joined[lowest], keys[lowest]
        if spending.is_late(_DRAWING):
            break
    return [] if kept is None else list(kept.rows())
