"""Uniform draws from the legal space: the floor for any other partitioner."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from planner.cost import CostModel
from planner.search.base import Candidate, Request, SearchResult, finish
from planner.search.orders import device_orders
from planner.search.refine import candidates_of_row
from planner.space import StrategyTable, enumerate_strategies

__all__ = ["RandomPartitioner"]

_DRAWS = 64


class RandomPartitioner:
    """Draws legal strategies and keeps the best that fits.

    On the first order of devices that has any.
    """

    name = "random"

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        started = time.perf_counter()
        rng = np.random.default_rng(request.seed)
        budget = request.evaluation_budget or _DRAWS
        models: list[CostModel] = []
        candidates: list[Candidate] = []
        for order in device_orders(request):
            model = CostModel(replace(request.setting, order=order))
            models.append(model)
            for row in _sample(request, len(order), rng, budget):
                candidates += candidates_of_row(
                    model, row, free_recompute=False, most=1
                )
            if candidates:
                break
        return finish(self.name, request, models, candidates, started)


def _sample(
    request: Request, devices: int, rng: np.random.Generator, count: int
) -> list[dict[str, int]]:
    """Rows drawn evenly from all tables: each row gets a key, the lowest are kept."""
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
    return [] if kept is None else list(kept.rows())
