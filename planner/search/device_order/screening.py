"""Screening: a few rows of every mesh by closed forms."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.cost.pipelines.flushed import has_textbook_time
from planner.schema.schedules import schedule_name, schedule_spec
from planner.search.base import Request, scores_of
from planner.search.device_order.groups import DeviceGroups
from planner.search.device_order.subsets import Choices, distinct_meshes, mesh_of_row
from planner.search.steps import Steps, completed
from planner.space import StrategyTable, expand_meshes
from planner.space.table import distinct

__all__ = ["Screened", "few_rows", "screen", "screen_in_steps"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Rows priced at once, between two looks at the time, and of many devices so many for
#: each: the orders that rows have in common take longest there.
_AT_ONCE, _FOR_EACH = 8_000, 1
#: Least number of rows that a mesh is taken to have.
_ROWS_A_MESH = 8
#: Batching of the rows, and pins that set it instead.
_SIZES, _BATCHING = (
    ({"microbatch_size": 1}, {"microbatch_size": 4}),
    {"microbatch_size", "num_microbatches"},
)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Screened:
    """Result of screening; arrays of shape [n].

    Attributes:
        choice: Meshes that have any row, as indices into the :class:`Choices`.
        score: Score of the best row that fits under a plain order; infinite if none
            fits.
        unlimited: Score of the best row with enough memory.
        excess_bytes: Excess of the row with the least memory; 0 or less if it fits.
        least: Score of that row with enough memory.
    """

    choice: Index
    score: Array
    unlimited: Array
    excess_bytes: Array
    least: Array


def screen(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    among: Index,
    until: float | None = None,
) -> Screened:
    """Price a few rows of many meshes under the last of their plain orders, by links.

    Args:
        request: The question; its pins hold in every row.
        model: Cost model; counts the evaluations.
        groups: Groups of the request's devices.
        choices: All meshes.
        among: Choices to price, the most promising first. Shape [n].
        until: ``time.perf_counter`` after which the remaining meshes are left out; None
            for no limit. A row takes 4 us on one core.
    """
    return completed(screen_in_steps(request, model, groups, choices, among, until))


def screen_in_steps(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    among: Index,
    until: float | None = None,
) -> Steps[Screened]:
    """Do the same in steps; see :func:`screen`. Pauses between batches of meshes."""
    ids = groups.orders(
        np.stack([subset.sequences[-1] for subset in choices.subsets]),
        np.array([subset.count for subset in choices.subsets]),
    )
    at_once = max(_AT_ONCE, _FOR_EACH * ids.shape[1])
    # On a clock rows are only listed of meshes that there may be time for.
    size = len(among) if until is None else at_once // _ROWS_A_MESH
    found: list[tuple[Index, Array]] = []
    for start in range(0, len(among), max(1, size)):
        part = among[start : start + size]
        for mine, each, rows in _batches(request, choices, part, at_once):
            if found:
                yield
                if until is not None and time.perf_counter() >= until:
                    return _joined(found)
            costs = model.table_in_orders(
                rows, ids, np.repeat(choices.subset[mine], each)
            )
            score = scores_of(costs, rows, request.objective)
            unlimited = scores_of(costs, rows, request.objective, fitting=False)
            first = np.cumsum(each) - each
            excess = np.minimum.reduceat(costs.excess_bytes, first)
            least = np.where(
                costs.excess_bytes == np.repeat(excess, each), unlimited, np.inf
            )
            best = [
                np.minimum.reduceat(value, first) for value in (score, unlimited, least)
            ]
            found.append((mine, np.stack([*best, excess])))
    return _joined(found)


def _batches(
    request: Request, choices: Choices, among: Index, at_once: int
) -> Iterator[tuple[Index, Index, StrategyTable]]:
    """Yield choices with any row, how many rows each has, and those rows in turn.

    Choices of a batch are priced together; the time is checked between batches.
    """
    mesh, which = distinct_meshes(choices, among)
    table = few_rows(request, mesh)
    if not len(table):
        return
    owner = mesh_of_row(table, mesh)
    by_mesh = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(mesh)))
    many = np.diff(ends, prepend=0)[which]
    rowed = np.flatnonzero(many)
    batch = (np.cumsum(many[rowed]) - many[rowed]) // at_once
    for number in np.unique(batch).tolist():
        mine = rowed[batch == number]
        each = many[mine]
        first = np.cumsum(each) - each
        place = np.arange(each.sum()) + np.repeat(
            ends[which[mine]] - each - first, each
        )
        yield among[mine], each, table[by_mesh[place]]


def _joined(found: list[tuple[Index, Array]]) -> Screened:
    if not found:
        empty = np.zeros(0)
        return Screened(
            choice=empty.astype(np.int64),
            score=empty,
            unlimited=empty,
            excess_bytes=empty,
            least=empty,
        )
    values = np.concatenate([best for _, best in found], axis=1)
    return Screened(
        choice=np.concatenate([mine for mine, _ in found]),
        score=values[0],
        unlimited=values[1],
        excess_bytes=values[3],
        least=values[2],
    )


def few_rows(
    request: Request,
    mesh: Index,
    virtual_stages: int = 1,
    batching: Sequence[Mapping[str, int]] = _SIZES,
) -> StrategyTable:
    """Return rows that stand for meshes: few stages a rank, few microbatch sizes.

    Models that see whole batches, as batch norms do, have one microbatch as well.

    Args:
        request: The question; its pins hold in every row.
        mesh: Degrees in the order of the table's axes. Shape [n, 6].
        virtual_stages: Stages a rank, unless they are pinned.
        batching: Microbatch sizes or numbers, unless they are pinned.
    """
    pins = dict(request.pins)
    if "schedule" in pins:
        spec = schedule_spec(schedule_name(pins["schedule"]))
        virtual_stages = max(virtual_stages, spec.virtual_stages[0])
    pins.setdefault("virtual_stages", virtual_stages)
    facts = request.facts
    sizes = list(batching)
    whole = facts.batch_norm_values is not None or facts.own_loss == "coupled"
    if whole:
        sizes.append({"num_microbatches": 1})
    if _BATCHING & {*pins, *facts.regime.fixes}:
        sizes = [{}]
    parts = [expand_meshes(mesh, facts, {**pins, **size}) for size in sizes]
    table = StrategyTable.concatenate(parts)
    if whole:
        columns = (getattr(table, name) for name in StrategyTable.__dataclass_fields__)
        table = table[np.sort(distinct(*columns)[0])]
    kept = has_textbook_time(table)
    if "zero_stage" not in pins and len(table):
        # Stages below 3 differ in memory alone, and not with a pipeline: where a mesh
        # has both, one stands for them.
        owner, left_out = mesh_of_row(table, mesh), np.where(table.pp > 1, 2, 1)
        there = [np.bincount(owner, table.zero_stage == n, len(mesh)) for n in (1, 2)]
        both = np.minimum(*there) > 0
        kept &= (table.zero_stage != left_out) | ~both[owner]
    return table[np.flatnonzero(kept)]
