"""Prices of arrangements: layouts with an order of the device groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.schema.schedules import schedule_names
from planner.search.base import Candidate, Request
from planner.search.device_order.groups import DeviceGroups
from planner.search.device_order.layouts import Layouts, find_layouts_in_steps
from planner.search.device_order.near_feasible import RecutMeshes
from planner.search.device_order.subsets import Choices
from planner.search.refine import ExactPricer, schedule_variants
from planner.search.steps import Steps, completed
from planner.space import StrategyTable, legal

__all__ = [
    "Finalists",
    "OrderPricer",
    "Priced",
    "open_order_pricer",
    "open_order_pricer_in_steps",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Priced:
    """Arrangements with their scores by closed forms; arrays of shape [n].

    Attributes:
        layout: Index of the layout of each arrangement.
        sequence: Its groups in order, -1 after the last. Shape [n, groups].
        row: Index of its best row into ``Layouts.rows``.
        score: Score of that row; infinite if no row fits.
    """

    layout: Index
    sequence: Index
    row: Index
    score: Array

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, rows: Index | slice) -> Priced:
        return Priced(
            layout=self.layout[rows],
            sequence=self.sequence[rows],
            row=self.row[rows],
            score=self.score[rows],
        )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Finalists:
    """Rows, each with an order of groups; arrays of shape [n].

    Attributes:
        rows: Rows of the strategy table.
        layout: Index of each row's layout.
        sequence: Groups in order, -1 after the last. Shape [n, groups].
        score: Score by closed forms.
    """

    rows: StrategyTable
    layout: Index
    sequence: Index
    score: Array

    def __len__(self) -> int:
        return len(self.score)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class OrderPricer:
    """Prices arrangements for one request.

    Attributes:
        request: The question.
        model: Cost model; counts the evaluations.
        groups: Groups of devices that stay together.
        layouts: Meshes and their rows.
        exact: Cuts and simulates.
        recut: Meshes that fit once they are cut by memory.
    """

    request: Request
    model: CostModel
    groups: DeviceGroups
    layouts: Layouts
    exact: ExactPricer
    recut: RecutMeshes

    def with_best(self, count: int) -> OrderPricer:
        """Return a pricer with the best ``count`` layouts alone."""
        return replace(self, layouts=self.layouts.best(count))

    def price(self, layout: Index, sequence: Index) -> Priced:
        """Price arrangements by closed forms, each with the best of its layout's rows.

        Args:
            layout: Index of the layout of each arrangement. Shape [n].
            sequence: Groups in order, -1 after the last; usable ones, at least as many
                as the layout's devices need. Shape [n, groups].
        """
        starts = self.layouts.starts
        many = starts[layout + 1] - starts[layout]
        first = np.cumsum(many) - many
        order = np.repeat(np.arange(len(layout)), many)
        rows = starts[layout][order] + np.arange(len(order)) - first[order]
        score = self._scores(self.layouts.rows[rows], layout, sequence, order)
        best = np.minimum.reduceat(score, first) if len(first) else score
        at = np.flatnonzero(score == best[order])
        row = starts[layout].copy()
        # The first of equal rows is kept: it is written last.
        row[order[at[::-1]]] = rows[at[::-1]]
        return Priced(layout=layout, sequence=sequence, row=row, score=best)

    def _scores(
        self, table: StrategyTable, layout: Index, sequence: Index, order: Index
    ) -> Array:
        """Score rows, each under the arrangement with index ``order``. Shape [n]."""
        ids = self.groups.orders(sequence, self.layouts.count[layout])
        costs = self.model.table_in_orders(table, ids, order)
        score = self.recut.scores(costs, table, self.request.objective)
        if self.request.launcher_limits is not None:
            score = np.where(
                self.request.launcher_limits.mask(ids)[order], score, np.inf
            )
        return score

    def finalists(self, priced: Priced) -> Finalists:
        """Price all rows of arrangements by closed forms.

        Args:
            priced: Arrangements.
        Returns:
            The rows that fit, best first.
        """
        starts = self.layouts.starts
        many = starts[priced.layout + 1] - starts[priced.layout]
        of = np.repeat(np.arange(len(priced)), many)
        first = np.cumsum(many) - many
        table = self.layouts.rows[
            starts[priced.layout][of] + np.arange(len(of)) - first[of]
        ]
        score = self._scores(table, priced.layout, priced.sequence, of)
        best = np.argsort(score, kind="stable")
        best = best[np.isfinite(score[best])]
        return Finalists(
            rows=table[best],
            layout=priced.layout[of[best]],
            sequence=priced.sequence[of[best]],
            score=score[best],
        )

    def variants(self, finalists: Finalists, index: int) -> Finalists:
        """Return a finalist under the schedules that its own one represents.

        Their scores are infinite, because only the simulator can price them.
        """
        facts, pins = self.request.facts, self.request.pins
        row, virtual = finalists.rows.row(index), pins.get("virtual_stages")
        found = [
            other
            for other in schedule_variants(row, facts.num_units, schedule_names())
            if row["pp"] > 1
            and "schedule" not in pins
            and virtual in {None, other["virtual_stages"]}
        ]
        table = StrategyTable.from_columns(
            **{name: np.array([one[name] for one in found], dtype=int) for name in row}
        )
        table = table[np.flatnonzero(legal(table, facts))] if found else table
        return Finalists(
            rows=table,
            layout=np.repeat(finalists.layout[index], len(table)),
            sequence=np.repeat(finalists.sequence[index][None], len(table), axis=0),
            score=np.full(len(table), np.inf),
        )

    def best_row_candidates(
        self, priced: Priced, index: int, *, variants: bool = False
    ) -> list[Candidate]:
        """Cut and simulate an arrangement's best row, in both ways of cutting.

        Args:
            priced: Arrangements.
            index: Index of the arrangement.
            variants: Whether to try the schedules that its own one represents, too.
        """
        chosen = Finalists(
            rows=self.layouts.rows[priced.row[[index]]],
            layout=priced.layout[[index]],
            sequence=priced.sequence[[index]],
            score=priced.score[[index]],
        )
        found = self.candidates(chosen, 0, cuts=2)
        if variants:
            others = self.variants(chosen, 0)
            for other in range(len(others)):
                found += self.candidates(others, other, cuts=2)
        return found

    def candidates(
        self, finalists: Finalists, index: int, *, cuts: int = 1, spare: int = 0
    ) -> list[Candidate]:
        """Cut a finalist exactly and simulate it.

        Args:
            finalists: Rows with their orders.
            index: Index of the finalist.
            cuts: Most cuts to try, the exact one first.
            spare: Further cuts to try while none of them fits.
        """
        count = int(self.layouts.count[finalists.layout[index]])
        ids = self.groups.orders(finalists.sequence[index : index + 1], count)[0]
        row = finalists.rows.row(index)
        return self.exact.candidates(row, ids, cuts=cuts, spare=spare)


def open_order_pricer(
    request: Request,
    choices: Choices,
    groups: DeviceGroups,
    chosen: Index,
    model: CostModel | None = None,
    until: float | None = None,
    exact: ExactPricer | None = None,
    recut: RecutMeshes | None = None,
) -> OrderPricer | None:
    """Find the layouts of meshes and return a pricer of their arrangements.

    Args:
        request: The question.
        choices: All meshes of the request.
        groups: Groups of its devices.
        chosen: Meshes to price, the most promising first. Shape [n].
        model: Cost model that counts the evaluations; None for a new one.
        until: ``time.perf_counter`` after which the remaining meshes are left out; None
            for no limit.
        exact: Cuts and simulates; None for a new one.
        recut: Meshes that fit once they are cut by memory; None for none.
    Returns:
        None if no mesh has a row that fits under a plain order of the devices.
    """
    asked = request, choices, groups, chosen, model, until, exact, recut
    return completed(open_order_pricer_in_steps(*asked))


def open_order_pricer_in_steps(
    request: Request,
    choices: Choices,
    groups: DeviceGroups,
    chosen: Index,
    model: CostModel | None = None,
    until: float | None = None,
    exact: ExactPricer | None = None,
    recut: RecutMeshes | None = None,
) -> Steps[OrderPricer | None]:
    """Do the same in steps; see :func:`open_order_pricer`. Pauses between batches."""
    model = model or CostModel(request.context)
    recut = recut or RecutMeshes()
    asked = request, model, groups, choices, chosen, until, recut
    layouts = yield from find_layouts_in_steps(*asked)
    if layouts is None:
        return None
    return OrderPricer(
        request=request,
        model=model,
        groups=groups,
        layouts=layouts,
        exact=exact or ExactPricer(request=request, model=model),
        recut=recut,
    )
