"""Rules of thumb of an experienced practitioner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.search.base import Candidate, Request, SearchResult, finish
from planner.search.ladder import FILL, host_size, ladder
from planner.search.orders import device_orders
from planner.search.refine import candidates_of_row
from planner.space import StrategyTable, enumerate_strategies, legal

__all__ = ["ExpertPartitioner"]

_MOST_TRIES = 200
#: Rows over the memory limit that are tried all the same: the closed form that sorts
#: them out is not exact.
_OVER = 4
#: Rows of the whole space that are kept when the rules of thumb lead nowhere.
_WIDENED = 32

Index = NDArray[np.int64]
_RowsOf = Callable[[Request, CostModel], StrategyTable | None]


class ExpertPartitioner:
    """The first rule of thumb that fits, and the few after it.

    The rules (:mod:`planner.search.ladder`) complete what is pinned. Where they lead to
    nothing legal that fits, the strategies of the whole space that depart least from
    them are tried, so that it finds something whenever there is something.

    Args:
        keep: Fitting strategies to price before stopping.
        widen: False leaves the whole space, which takes up to seconds and has no
            answer half-way, to others that are asked as well.
    """

    name = "expert"

    def __init__(self, keep: int = 3, *, widen: bool = True) -> None:
        self._keep = keep
        self._sources = (_by_the_rules, _widened) if widen else (_by_the_rules,)

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        started = time.perf_counter()
        models: list[CostModel] = []
        candidates: list[Candidate] = []
        left = request.evaluation_budget or _MOST_TRIES
        for order in device_orders(request):
            model = CostModel(replace(request.setting, order=order))
            models.append(model)
            asked = replace(request, setting=model.context)
            for rows in _rounds(asked, model, self._sources):
                keep = self._keep
                if request.time_budget_s is not None:
                    spent = time.perf_counter() - started
                    keep = keep if spent < request.time_budget_s else 1
                priced = _price(request, model, rows[:left], keep)
                left -= len(priced)
                candidates += priced
                if any(candidate.cost.fits for candidate in priced):
                    return finish(self.name, request, models, candidates, started)
        return finish(self.name, request, models, candidates, started)


def _price(
    request: Request, model: CostModel, rows: Sequence[dict[str, int]], keep: int
) -> list[Candidate]:
    """Price rows until ``keep`` of them fit."""
    priced: list[Candidate] = []
    fitting = 0
    for row in rows:
        if fitting == keep:
            break
        found = candidates_of_row(
            model, row, free_recompute=False, most=1, limits=request.launcher_limits
        )
        priced += found
        fitting += sum(one.cost.fits for one in found)
    return priced


def _rounds(
    request: Request, model: CostModel, sources: Sequence[_RowsOf]
) -> Iterator[list[dict[str, int]]]:
    """Rows worth a price: by the rules, else near to them, else the closest misses."""
    near_misses: list[dict[str, int]] = []
    for rows_of in sources:
        table = rows_of(request, model)
        if table is None or not len(table):
            continue
        excess = model.table(table).excess_bytes
        yield [table.row(int(index)) for index in np.flatnonzero(excess <= 0)]
        over = np.flatnonzero(excess > 0)
        near_misses += table[
            over[np.argsort(excess[over], kind="stable")[:_OVER]]
        ].rows()
    yield near_misses


def _by_the_rules(request: Request, model: CostModel) -> StrategyTable | None:
    table = ladder(request, len(model.context.order))
    return table and table[np.flatnonzero(legal(table, request.facts))]


def _widened(request: Request, model: CostModel) -> StrategyTable | None:
    """Return the rows that depart least from the rules, and near misses."""
    host = host_size(request)
    kept = [
        _least_departing(table, model, host)
        for table in enumerate_strategies(
            request.facts, num_devices=len(model.context.order), pins=request.pins
        )
    ]
    if not kept:
        return None
    return _least_departing(StrategyTable.concatenate(kept), model, host)


def _least_departing(
    table: StrategyTable, model: CostModel, host: int
) -> StrategyTable:
    """The rows that fit, in the order of the rules; then by what they lack."""
    lack = np.maximum(model.table(table).excess_bytes, 0)
    order = np.lexsort((*reversed(_departures(table, host)), lack))
    return table[order[:_WIDENED]]


def _departures(table: StrategyTable, host: int) -> tuple[Index, ...]:
    """Measure departures of rows from the rules, the gravest first. Shapes [n]."""
    deep = table.pp > 1
    shallow = deep & (table.num_microbatches < FILL * table.pp)
    return (
        table.cp * table.ep,
        np.maximum(table.tp // host, 1),
        table.pp * table.tp,
        table.pp,
        table.recompute,
        ((table.dp_replicate > 1) & (table.dp_shard > 1)).astype(np.int64),
        table.virtual_stages,
        table.zero_stage,
        (shallow & (table.microbatch_size > 1)).astype(np.int64),
        -table.microbatch_size,
    )
