"""Layouts: meshes that are worth a search for device orders, with their best rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.cost.pipelines.flushed import has_textbook_time
from planner.schema.schedules import schedule_spec
from planner.search.base import Request
from planner.search.device_order.groups import DeviceGroups
from planner.search.device_order.near_feasible import RecutMeshes
from planner.search.device_order.subsets import (
    Choices,
    DeviceSubset,
    distinct_meshes,
    mesh_of_row,
)
from planner.search.steps import Steps, completed
from planner.space import StrategyTable, expand_meshes

__all__ = ["Layouts", "find_layouts", "find_layouts_in_steps", "orders_of"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Rows kept for each mesh, besides the one that needs the least memory: under another
#: order it may be the only one that fits.
_ROWS = 4
#: Prices computed at once without a time limit, and between two looks at the time.
_AT_ONCE, _TIMED = 20_000, 4_000


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Layouts:
    """Meshes (K) with their best rows (R), over device groups (G).

    Attributes:
        choice: Index of each layout into the :class:`Choices`. Shape [K].
        rows: Rows of all layouts, those of a layout side by side, best first.
        starts: First row of each layout, then R. Shape [K + 1].
        count: Number of devices of each layout. Shape [K].
        usable: Mask of the groups that each layout may use. Shape [K, G].
        score: Best score of its rows under any of its plain orders. Shape [K].
        sequence: Groups in the order with that score, -1 after the last. Shape [K, G].
    """

    choice: Index
    rows: StrategyTable
    starts: Index
    count: Index
    usable: Mask
    score: Array
    sequence: Index

    def __len__(self) -> int:
        return len(self.count)

    def best(self, count: int) -> Layouts:
        """Return the first ``count`` layouts."""
        kept, rows = slice(0, count), int(self.starts[min(count, len(self))])
        return Layouts(
            choice=self.choice[kept],
            rows=self.rows[slice(0, rows)],
            starts=self.starts[: min(count, len(self)) + 1],
            count=self.count[kept],
            usable=self.usable[kept],
            score=self.score[kept],
            sequence=self.sequence[kept],
        )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Cell:
    """A choice to price: its rows, each under all orders of :func:`orders_of`."""

    choice: int
    subset: DeviceSubset
    rows: Index
    sequences: Index

    @property
    def many(self) -> int:
        """Number of prices to compute."""
        return len(self.rows) * len(self.sequences)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Layout:
    """A mesh with its best rows, the best first."""

    score: float
    cell: _Cell
    rows: Index
    sequence: Index


def find_layouts(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    chosen: Index,
    until: float | None = None,
    recut: RecutMeshes | None = None,
) -> Layouts | None:
    """Price chosen meshes with all their rows under the plain orders of their subsets.

    Args:
        request: The question; its pins hold in every row.
        model: Cost model; counts the evaluations.
        groups: Groups of the request's devices.
        choices: All meshes.
        chosen: Choices to price, the most promising first. Shape [n].
        until: ``time.perf_counter`` after which the remaining meshes are left out; None
            for no limit. A row takes 5 us on one core.
        recut: Meshes that fit once they are cut by memory.
    Returns:
        Meshes with a row that fits, best first; None if there are none.
    """
    asked = request, model, groups, choices, chosen, until, recut
    return completed(find_layouts_in_steps(*asked))


def find_layouts_in_steps(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    chosen: Index,
    until: float | None = None,
    recut: RecutMeshes | None = None,
) -> Steps[Layouts | None]:
    """Do the same in steps; see :func:`find_layouts`. Pauses between batches."""
    mesh, which = distinct_meshes(choices, chosen)
    table = expand_meshes(mesh, request.facts, request.pins)
    if "schedule" not in request.pins:
        # Schedules without a closed form are simulated among the finalists.
        table = table[np.flatnonzero(has_textbook_time(table))]
        if "virtual_stages" not in request.pins:
            table = StrategyTable.concatenate([table, _eager(request, mesh)])
    if not len(table):
        return None
    owner = mesh_of_row(table, mesh)
    cells = [
        _Cell(
            choice=choice,
            subset=(subset := choices.subsets[choices.subset[choice]]),
            rows=rows,
            sequences=orders_of(request, groups, subset, int(mesh[one, 0])),
        )
        for choice, one in zip(chosen.tolist(), which.tolist(), strict=True)
        if len(rows := np.flatnonzero(owner == one))
    ]
    found: list[_Layout] = []
    for batch in _batches(cells, _AT_ONCE if until is None else _TIMED):
        if found:
            yield
            if until is not None and time.perf_counter() >= until:
                break
        found += _priced(request, model, groups, table, batch, recut or RecutMeshes())
    return _assembled(table, found)


def orders_of(
    request: Request, groups: DeviceGroups, subset: DeviceSubset, pp: int
) -> Index:
    """Return the plain orders, and one in which each pipeline is a run of near groups.

    In plain orders each stage is such a run. Where links between sites are slow,
    pipelines within sites send gradients over them, once a step, and no activations.

    Args:
        request: The question.
        groups: Groups of its devices.
        subset: The devices to use.
        pp: Number of pipeline ranks; of fewer than two groups each there is no run.
    Returns:
        Groups in order, -1 after the last. Shape [n, groups].
    """
    last = subset.sequences[-1]
    held = np.cumsum(groups.sizes[last[last >= 0]])
    used = 1 + int(np.searchsorted(held, subset.count))
    if pp == 1 or used < 2 * pp or request.launcher_limits is not None:
        return subset.sequences
    if not groups.links_differ(last[:used]):
        return subset.sequences
    turned = np.concatenate([*(last[at:used:pp] for at in range(pp)), last[used:]])
    return np.concatenate([subset.sequences, turned[None]])


def _eager(request: Request, mesh: Index) -> StrategyTable:
    """Return rows of Eager1F1B, whose microbatches under way hide transfers."""
    code = schedule_spec("Eager1F1B").code
    pins = {**request.pins, "schedule": code, "virtual_stages": 1}
    table = expand_meshes(mesh[mesh[:, 0] > 1], request.facts, pins)
    return table[np.flatnonzero(has_textbook_time(table))]


def _batches(cells: Sequence[_Cell], most: int) -> Iterator[list[_Cell]]:
    """Yield runs of cells with at most so many prices, or of one cell."""
    batch: list[_Cell] = []
    for cell in cells:
        if batch and sum(one.many for one in batch) + cell.many > most:
            yield batch
            batch = []
        batch.append(cell)
    if batch:
        yield batch


def _priced(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    table: StrategyTable,
    cells: Sequence[_Cell],
    recut: RecutMeshes,
) -> list[_Layout]:
    """Return a layout for every cell with a row that fits."""
    sequences = np.concatenate([cell.sequences for cell in cells])
    counts = np.concatenate([np.full(len(c.sequences), c.subset.count) for c in cells])
    each = [len(cell.rows) for cell in cells for _ in cell.sequences]
    order = np.repeat(np.arange(len(sequences)), each)
    rows = table[np.concatenate([np.tile(c.rows, len(c.sequences)) for c in cells])]
    costs = model.table_in_orders(rows, groups.orders(sequences, counts), order)
    score = recut.scores(costs, rows, request.objective)
    found, start = [], 0
    for cell in cells:
        stop, count = start + cell.many, len(cell.rows)
        under = score[start:stop].reshape(-1, count)
        memory = costs.memory_bytes[start : start + count]
        start = stop
        best = under.min(axis=0)
        ranked = np.argsort(best, kind="stable")
        ranked = ranked[np.isfinite(best[ranked])]
        if not len(ranked):
            continue
        kept = ranked[:_ROWS]
        least = ranked[memory[ranked].argmin()]
        if least not in kept:
            kept = np.append(kept, least)
        found.append(
            _Layout(
                score=float(best[kept[0]]),
                cell=cell,
                rows=cell.rows[kept],
                sequence=cell.sequences[under[:, kept[0]].argmin()],
            )
        )
    return found


def _assembled(table: StrategyTable, found: list[_Layout]) -> Layouts | None:
    if not found:
        return None
    found = sorted(found, key=lambda one: (one.score, one.cell.choice))
    return Layouts(
        choice=np.array([one.cell.choice for one in found], dtype=np.int64),
        rows=table[np.concatenate([one.rows for one in found])],
        starts=np.cumsum([0] + [len(one.rows) for one in found]).astype(np.int64),
        count=np.array([one.cell.subset.count for one in found], dtype=np.int64),
        usable=np.stack([one.cell.subset.usable for one in found]),
        score=np.array([one.score for one in found]),
        sequence=np.stack([one.sequence for one in found]),
    )
