"""Every legal strategy by closed forms; the best of them cut exactly and simulated."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel, CostTable
from planner.schema.schedules import schedule_names
from planner.search.base import Candidate, Request, SearchResult, finish, scores_of
from planner.search.budget import Budget
from planner.search.ideals import along_ideals
from planner.search.orders import device_orders
from planner.search.refine import candidates_of_row, schedule_variants
from planner.space import MESH_COLUMNS, StrategyTable, enumerate_strategies, legal

__all__ = ["ExhaustivePartitioner", "search_order"]

#: Rows that go on to exact cuts and the simulator.
_FINALISTS = 24
#: Most finalists with one mesh, so that they are not all alike.
_PER_MESH = 3
#: Rows over the memory limit that are tried, too, with recomputation by stage.
_OVER = 4

Index = NDArray[np.int64]
#: Rows priced at once without a time budget, and with one.
_ROWS_AT_ONCE, _ROWS_TIMED = 500_000, 100_000


class ExhaustivePartitioner:
    """Prices the whole space by closed forms, then simulates the finalists.

    On a uniform cluster this is close to optimal: it leaves out stages with different
    degrees, and orders of devices beyond those of
    :func:`planner.search.orders.device_orders`.
    """

    name = "exhaustive"

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        spending = Budget(request)
        until = spending.until
        models: list[CostModel] = []
        candidates: list[Candidate] = []
        orders = device_orders(request)
        for waiting, order in zip(range(len(orders), 0, -1), orders, strict=True):
            budget = request.evaluation_budget
            if budget is not None:
                # An equal part of the rest; an order that needs less leaves it over.
                spent = sum(other.evaluations["simulated"] for other in models)
                budget = -(-(budget - spent) // waiting)
            if candidates and spending.is_late():
                break
            model = CostModel(request.context.reordered(order))
            models.append(model)
            candidates += search_order(request, model, budget, until)
        return finish(self.name, request, models, candidates, spending.started)


def search_order(
    request: Request,
    model: CostModel,
    budget: int | None,
    until: float | None = None,
) -> list[Candidate]:
    """Return candidates with one order of devices: the best rows, cut and simulated.

    Args:
        request: The question.
        model: Prices strategies with that order of devices.
        budget: Most strategies to simulate; None for all finalists.
        until: ``time.perf_counter`` after which the search ends once a candidate fits;
            None for no limit.
    """

    def late() -> bool:
        return until is not None and time.perf_counter() >= until

    count = len(model.context.order)
    finalists = _Finalists(request)
    size = _ROWS_AT_ONCE if until is None else _ROWS_TIMED
    for table in enumerate_strategies(
        request.facts, num_devices=count, pins=request.pins, rows=size
    ):
        finalists.add(table, model.table(table))
        if late() and finalists.any_fits:
            break
    rows = list(finalists.rows())
    if "schedule" not in request.pins:
        rows += _variants(request, rows[: _FINALISTS // 3])
    free = "recompute" not in request.pins
    candidates: list[Candidate] = []
    for row in rows:
        left = 2 if budget is None else budget - model.evaluations["simulated"]
        if left <= 0 or (late() and any(one.cost.fits for one in candidates)):
            break
        candidates += candidates_of_row(
            model,
            row,
            free_recompute=free,
            most=min(left, 2),
            limits=request.launcher_limits,
        )
    if not candidates:
        return []
    left = len(rows) if budget is None else budget - model.evaluations["simulated"]
    if left > 0 and not late():
        candidates += along_ideals(request, model, candidates, left)
    priced = StrategyTable.from_strategies([c.strategy for c in candidates])
    kept = np.flatnonzero(legal(priced, request.facts))
    return [candidates[index] for index in kept.tolist()]


def _variants(request: Request, rows: list[dict[str, int]]) -> list[dict[str, int]]:
    """Return legal rows with other schedules for pipelines, within the pins."""
    virtual = request.pins.get("virtual_stages")
    found = [
        variant
        for row in rows
        if row["pp"] > 1
        for variant in schedule_variants(row, request.facts.num_units, schedule_names())
        if virtual in {None, variant["virtual_stages"]}
    ]
    if not found:
        return []
    table = StrategyTable.from_columns(
        **{name: np.array([row[name] for row in found]) for name in found[0]}
    )
    kept = np.flatnonzero(legal(table, request.facts))
    unique = {tuple(table.row(int(i)).items()): None for i in kept}
    return [dict(items) for items in unique]


class _Finalists:
    """The best rows seen so far, a few with each mesh."""

    def __init__(self, request: Request) -> None:
        self._objective = request.objective
        self._tables: list[StrategyTable] = []
        self._scores: list[NDArray[np.float64]] = []
        self._excess: list[NDArray[np.float64]] = []

    def add(self, table: StrategyTable, costs: CostTable) -> None:
        """Keep the rows of a table that may be finalists."""
        score = scores_of(costs, table, self._objective, fitting=False)
        keep = _best_per_mesh(table, np.where(costs.fits, score, np.inf))
        over = np.argsort(costs.excess_bytes, kind="stable")[:_OVER]
        rows = np.unique(np.concatenate([keep, over]))
        self._tables.append(table[rows])
        self._scores.append(score[rows])
        self._excess.append(costs.excess_bytes[rows])

    @property
    def any_fits(self) -> bool:
        """True if any row that was kept fits."""
        return any(bool((excess <= 0).any()) for excess in self._excess)

    def rows(self) -> Iterator[dict[str, int]]:
        """Yield the finalists, best first; then the rows closest to fitting."""
        if not self._tables:
            return
        table = StrategyTable.concatenate(self._tables)
        score, excess = np.concatenate(self._scores), np.concatenate(self._excess)
        best = _best_per_mesh(table, np.where(excess <= 0, score, np.inf))
        nearest = np.argsort(np.maximum(excess, 0), kind="stable")[:_OVER]
        for index in dict.fromkeys([*best.tolist(), *nearest.tolist()]):
            yield table.row(int(index))


def _best_per_mesh(table: StrategyTable, score: NDArray[np.float64]) -> Index:
    """Return the rows with the lowest finite scores, a few with each mesh."""
    order = np.argsort(score, kind="stable")[: 400 * _FINALISTS]
    order = order[np.isfinite(score[order])]
    taken: dict[tuple[int, ...], int] = {}
    rows: list[int] = []
    columns = [getattr(table, name) for name in MESH_COLUMNS]
    for row in order:
        mesh = tuple(int(column[row]) for column in columns)
        if taken.get(mesh, 0) < _PER_MESH:
            taken[mesh] = taken.get(mesh, 0) + 1
            rows.append(int(row))
        if len(rows) == _FINALISTS:
            break
    return np.array(rows, dtype=np.int64)
