"""Every legal strategy by closed forms; the best of them cut exactly and simulated."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel, CostTable
from planner.schema.schedules import schedule_names
from planner.search.base import Candidate, Request, SearchResult, finish, scores_of
from planner.search.budget import Budget
from planner.search.campaign import Campaign
from planner.search.device_order.screening import few_rows
from planner.search.ideals import along_ideals
from planner.search.moves import Row, Solution
from planner.search.orders import device_orders
from planner.search.refine import candidates_of_row, schedule_variants
from planner.space import (
    MESH_COLUMNS,
    StrategyTable,
    enumerate_meshes,
    enumerate_strategies,
    legal,
)

__all__ = ["ExhaustivePartitioner", "search_order"]

#: Rows that go on to exact cuts and the simulator.
_FINALISTS = 24
#: Most finalists with one mesh, so that they are not all alike.
_PER_MESH = 3
#: Rows over the memory limit that are tried, too, with recomputation by stage.
_OVER = 4

Array = NDArray[np.float64]
Index = NDArray[np.int64]
#: Rows priced at once without a time budget, with one, and in a race for each second
#: of it, up to as many as outside of races.
_ROWS_AT_ONCE, _ROWS_TIMED, _ROWS_RACED = 500_000, 100_000, 30_000
#: Rows with the least excess that fit by an exact cut before others come first again.
_RESCUED = 4
#: Prices in one glance at several numbers of devices; prices times ranks above which
#: the orders of one number come one after the other.
_ROWS_GLANCED, _RANKS_GLANCED = 4_000, 400_000_000
#: In a race: finalists simulated after a glance at all orders, and after the whole
#: space of each; pipelines tried under other schedules for each order; scores over the
#: best up to which they are, and from which on finalists are dropped.
_GLANCED, _EACH, _VARIED, _NEAR, _HOPELESS = 6, 3, 8, 1.15, 1.4
#: Factor on the score of rows that exceed memory: many do not fit by an exact cut.
_DOUBTFUL = 1.1


class ExhaustivePartitioner:
    """Prices the whole space by closed forms, then simulates the finalists.

    On a uniform cluster this is close to optimal: it leaves out stages with different
    degrees, and orders of devices beyond those of
    :func:`planner.search.orders.device_orders`.
    """

    name = "exhaustive"
    first_share = 0.15

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

    def contend(self, campaign: Campaign) -> Iterator[None]:
        """Take part in a race; see :class:`planner.search.race.Racer`.

        A few rows of every mesh are priced under every order first; what promises more
        than the best plan is simulated at once. Then orders come by promise, each with
        its whole space, and their finalists in one queue.
        """
        queue = _Queue(campaign)
        for _ in queue.glance():
            yield
            if queue.promise < campaign.best_score and queue.simulate_next():
                yield
        for _ in range(_GLANCED):
            if queue.simulate_next():
                yield
        for count in queue.ranked_counts():
            for _ in queue.price(count):
                yield
            for _ in range(_EACH):
                if queue.simulate_next():
                    yield
        while queue.simulate_next():
            yield
        queue.follow_ideals()
        yield


class _Queue:
    """Finalists of all orders in one queue, the most promising first.

    Rows that exceed memory by closed forms are at most every other one, as most of them
    do not fit however they are cut; while nothing fits they come by excess.

    Args:
        campaign: Simulates them.
    """

    def __init__(self, campaign: Campaign) -> None:
        self._campaign, self._request = campaign, campaign.request
        self._waiting: list[tuple[float, int, Index, Row]] = []
        self._over: list[tuple[float, int, Index, Row]] = []
        self._nearest: list[tuple[float, int, Index, Row]] = []
        self._doubt = False
        self._rescued = 0
        self._varied: dict[bytes, int] = {}
        self._number = itertools.count()
        self._orders: dict[int, list[Index]] = {}
        for order in device_orders(campaign.request):
            self._orders.setdefault(len(order), []).append(order)
        self._promise = dict.fromkeys(self._orders, np.inf)

    def ranked_counts(self) -> list[int]:
        """Return the numbers of devices, the most promising first."""
        return sorted(self._orders, key=lambda count: self._promise[count])

    @property
    def promise(self) -> float:
        """Least score of a finalist by closed forms; infinite if there is none."""
        heads = [queue[0][0] for queue in (self._waiting, self._over) if queue]
        return min(heads, default=np.inf)

    def glance(self) -> Iterator[None]:
        """Price a few rows of every mesh under every order, many orders at once."""
        request, many = self._request, 0
        parts: list[tuple[int, StrategyTable, Sequence[Index]]] = []
        for count, orders in self._orders.items():
            mesh = enumerate_meshes(request.facts, count, request.pins)
            if not len(mesh):
                continue
            table = few_rows(request, mesh)
            turns = 1 + len(orders) * len(table) * count // _RANKS_GLANCED
            each = -(-len(orders) // turns)
            for start in range(0, len(orders), each):
                parts.append((count, table, orders[start : start + each]))
                many += len(parts[-1][-1]) * len(table)
                if many >= _ROWS_GLANCED:
                    self._add(parts)
                    parts, many = [], 0
                    yield
        if parts:
            self._add(parts)
            yield

    def price(self, count: int) -> Iterator[None]:
        """Price the whole space on a number of devices, one table at a time."""
        seconds, size = self._request.time_budget_s, _ROWS_AT_ONCE
        if seconds is not None:
            many = min(int(_ROWS_RACED * max(seconds, 1.0)), _ROWS_TIMED)
            size = max(1, many // len(self._orders[count]))
        for table in enumerate_strategies(
            self._request.facts,
            num_devices=count,
            pins=self._request.pins,
            rows=size,
        ):
            self._add([(count, table, self._orders[count])])
            yield

    def _add(self, parts: Sequence[tuple[int, StrategyTable, Sequence[Index]]]) -> None:
        """Price tables of numbers of devices under some orders; queue the best."""
        request = self._request
        tables = [(order, n, t) for n, t, orders in parts if len(t) for order in orders]
        if not tables:
            return
        rows = StrategyTable.concatenate([table for _, _, table in tables])
        ids = np.full((len(tables), max(len(order) for order, *_ in tables)), -1)
        for place, (order, *_) in enumerate(tables):
            ids[place, : len(order)] = order
        lengths = [len(table) for *_, table in tables]
        # Orders that are priced together share the time of the blocks.
        which = np.repeat(np.arange(len(tables)), lengths)
        costs = self._campaign.price_table(rows, ids, which)
        score = scores_of(costs, rows, request.objective, fitting=False)
        stops = np.cumsum(lengths).tolist()
        for (order, count, table), stop in zip(tables, stops, strict=True):
            mine = slice(stop - len(table), stop)
            finalists = _Finalists(request)
            finalists.keep(table, score[mine], costs.excess_bytes[mine])
            for value, excess, row in finalists.ranked():
                self._promise[count] = min(self._promise[count], value)
                if excess > 0:
                    self._push(self._over, value, order, row)
                    self._push(self._nearest, excess, order, row)
                else:
                    self._push(self._waiting, value, order, row)

    def _push(
        self,
        queue: list[tuple[float, int, Index, Row]],
        value: float,
        order: Index,
        row: Row,
    ) -> None:
        heapq.heappush(queue, (value, next(self._number), order, row))

    def _next(self) -> tuple[float, Index, Row] | None:
        """Return the next finalist with its score; None if there is none."""
        rescuing = not self._campaign.has_fit or 0 < self._rescued < _RESCUED
        if self._nearest and rescuing:
            _, _, order, row = heapq.heappop(self._nearest)
            return 0.0, order, row
        first, over = self._waiting, self._over
        self._doubt = not self._doubt
        doubtful = bool(over) and (not first or (self._doubt and over[0] < first[0]))
        if not (first or over):
            return None
        value, _, order, row = heapq.heappop(over if doubtful else first)
        return value, order, row

    def simulate_next(self) -> bool:
        """Cut and simulate the next finalist; False if there is none, or no budget."""
        campaign = self._campaign
        while campaign.left != 0 and (found := self._next()) is not None:
            value, order, row = found
            rescuing = value == 0.0
            if value > _HOPELESS * campaign.best_score:
                continue
            one = Solution(order=order, row=row)
            campaign.price([one])
            if campaign.was_simulated(one):
                continue
            campaign.simulate(one, cuts=2)
            self._rescued += rescuing and campaign.may_fit(one)
            self._vary(one)
            return True
        return False

    def _vary(self, one: Solution) -> None:
        """Queue a good pipeline's row under the schedules that its own stands for.

        One that exceeds memory may fit under schedules that even out stages' memory.
        """
        key, campaign = one.order.tobytes(), self._campaign
        fits = campaign.may_fit(one)
        value = campaign.corrected(one) if fits else campaign.unlimited(one)
        queue = self._waiting if fits else self._over
        many = self._varied.get(key, 0)
        if one.row["pp"] == 1 or "schedule" in self._request.pins or many >= _VARIED:
            return
        if value > _NEAR * campaign.best_score:
            return
        self._varied[key] = many + 1
        rows = [dict(one.row)]
        if one.row["recompute"] and "recompute" not in self._request.pins:
            # Schedules that split backward go without recomputation.
            rows.append({**one.row, "recompute": 0})
        for other in _variants(self._request, rows):
            self._push(queue, value, one.order, other)

    def follow_ideals(self) -> None:
        """Recut the best pipelines along ideals, under the order of the best plan."""
        campaign, leader = self._campaign, self._campaign.leader
        if leader is None or campaign.left == 0 or campaign.is_late():
            return
        model = campaign.model_of(leader.order)
        ids = tuple(leader.order.tolist())
        here = [one for one in campaign.candidates if one.strategy.device_ids() == ids]
        most = _FINALISTS if campaign.left is None else campaign.left
        before = model.evaluations["simulated"]
        found = list(along_ideals(self._request, model, here, most))
        campaign.count_simulations(model.evaluations["simulated"] - before)
        campaign.add(campaign.legal(found))


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
        self.keep(table, score, costs.excess_bytes)

    def keep(self, table: StrategyTable, score: Array, excess_bytes: Array) -> None:
        """Keep the rows of a table that may be finalists, by score and excess. [n]."""
        keep = _best_per_mesh(table, np.where(excess_bytes <= 0, score, np.inf))
        over = np.argsort(excess_bytes, kind="stable")[:_OVER]
        rows = np.unique(np.concatenate([keep, over]))
        self._tables.append(table[rows])
        self._scores.append(score[rows])
        self._excess.append(excess_bytes[rows])

    @property
    def any_fits(self) -> bool:
        """True if any row that was kept fits."""
        return any(bool((excess <= 0).any()) for excess in self._excess)

    def rows(self) -> Iterator[dict[str, int]]:
        """Yield the finalists, best first; then the rows closest to fitting."""
        yield from (row for *_, row in self.ranked())

    def ranked(self) -> Iterator[tuple[float, float, dict[str, int]]]:
        """Yield the same with scores, higher where they exceed memory, and excess."""
        if not self._tables:
            return
        table = StrategyTable.concatenate(self._tables)
        score, excess = np.concatenate(self._scores), np.concatenate(self._excess)
        best = _best_per_mesh(table, np.where(excess <= 0, score, np.inf))
        nearest = np.argsort(np.maximum(excess, 0), kind="stable")[:_OVER]
        for index in dict.fromkeys([*best.tolist(), *nearest.tolist()]):
            factor = 1.0 if excess[index] <= 0 else _DOUBTFUL
            value = float(score[index]) * factor
            yield value, float(excess[index]), table.row(int(index))


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
