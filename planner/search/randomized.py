"""Uniform draws from the legal space: the floor for any other partitioner."""

from __future__ import annotations

import time

import numpy as np

from planner.cost import CostModel
from planner.search.base import Candidate, Request, SearchResult, finish
from planner.search.refine import candidates_of_row
from planner.space import StrategyTable, enumerate_strategies

__all__ = ["RandomPartitioner"]

_DRAWS = 64


class RandomPartitioner:
    """Draws legal strategies and keeps the best that fits."""

    name = "random"

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        started = time.perf_counter()
        model = CostModel(request.setting)
        rng = np.random.default_rng(request.seed)
        budget = request.evaluation_budget or _DRAWS
        candidates: list[Candidate] = []
        rows = _sample(request, rng, budget)
        for row in rows:
            candidates += candidates_of_row(model, row, free_recompute=False, most=1)
        return finish(self.name, request, model, candidates, started)


def _sample(
    request: Request, rng: np.random.Generator, count: int
) -> list[dict[str, int]]:
    """Rows drawn evenly from all tables: each row gets a key, the lowest are kept."""
    kept: StrategyTable | None = None
    keys = np.zeros(0)
    for table in enumerate_strategies(
        request.facts, num_devices=len(request.setting.order), pins=request.pins
    ):
        drawn = rng.random(len(table))
        joined = StrategyTable.concatenate([kept, table] if kept else [table])
        keys = np.concatenate([keys, drawn])
        lowest = np.argsort(keys, kind="stable")[:count]
        kept, keys = joined[lowest], keys[lowest]
    return [] if kept is None else list(kept.rows())
