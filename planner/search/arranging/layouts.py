"""The meshes worth arranging devices for, each with its best rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel, CostTable
from planner.cost.row_times import has_textbook_time
from planner.search.arranging.fleets import Choices, Fleet
from planner.search.arranging.groups import DeviceGroups
from planner.search.base import Objective, Request
from planner.space import MESH_COLUMNS, StrategyTable, expand_meshes
from planner.space.table import distinct

__all__ = ["Layouts", "find_layouts", "mesh_of_row", "scores_of"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Rows kept of each mesh, besides the one that needs the least memory: under another
#: order it may be the only one that fits.
_ROWS = 4


def scores_of(
    costs: CostTable,
    table: StrategyTable,
    objective: Objective,
    *,
    fitting: bool = True,
) -> Array:
    """What the objective makes small, infinite where memory does not suffice. [n].

    Args:
        costs: Of the rows.
        table: The rows.
        objective: Of the request.
        fitting: False takes memory as enough.
    """
    if objective == "memory":
        value = costs.memory_bytes
    elif objective == "throughput_per_device":
        value = costs.step_time_s * table.num_devices
    else:
        value = costs.step_time_s
    return np.where(costs.fits, value, np.inf) if fitting else value


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Layouts:
    """Meshes (K) with their best rows (R), over device groups (G).

    Attributes:
        choice: Which of the :class:`Choices` each is. Shape [K].
        rows: Of all layouts, those of a layout side by side, best first.
        starts: First row of each layout, then R. Shape [K + 1].
        count: Devices of each layout. Shape [K].
        usable: Groups that it may use. Shape [K, G].
        score: Best price of its rows under any of its plain orders. Shape [K].
        sequence: Groups in the order that gave the score, -1 after the last. [K, G].
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
        """The first so many."""
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


def mesh_of_row(table: StrategyTable, mesh: Index) -> Index:
    """Which of some meshes each row has. Shape [n]."""
    both = [
        np.concatenate([mesh[:, at], getattr(table, name)])
        for at, name in enumerate(MESH_COLUMNS)
    ]
    number = distinct(*both)[1]
    place = np.empty(int(number.max()) + 1, dtype=np.int64)
    place[number[: len(mesh)]] = np.arange(len(mesh))
    return np.asarray(place[number[len(mesh) :]])


def find_layouts(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    chosen: Index,
) -> Layouts | None:
    """Price chosen meshes with all their rows under the plain orders of their fleets.

    Args:
        request: The question; its pins hold in every row.
        model: Counts the evaluations.
        groups: Of the request's devices.
        choices: All meshes.
        chosen: Those to price. Shape [n].
    Returns:
        Those of which a row fits, best first; None if there are none.
    """
    parts = []
    for number in np.unique(choices.fleet[chosen]).tolist():
        mine = chosen[choices.fleet[chosen] == number]
        fleet, mesh = choices.fleets[number], choices.mesh[mine]
        table = expand_meshes(mesh, request.facts, request.pins)
        if "schedule" not in request.pins:
            # What stands in for nothing else is simulated among the finalists.
            table = table[np.flatnonzero(has_textbook_time(table))]
        if not len(table):
            continue
        ids = groups.orders(fleet.sequences, fleet.count)
        many = len(ids)
        rows = np.tile(np.arange(len(table)), many)
        order = np.repeat(np.arange(many), len(table))
        costs = model.arranged(table[rows], ids, order)
        score = scores_of(costs, table[rows], request.objective).reshape(many, -1)
        owner = mesh_of_row(table, mesh)
        memory = costs.memory_bytes[: len(table)]
        parts.append((mine, fleet, table, owner, score, memory))
    return _assembled(parts)


def _assembled(
    parts: list[tuple[Index, Fleet, StrategyTable, Index, Array, Array]],
) -> Layouts | None:
    found: list[tuple[float, int, Fleet, StrategyTable, Index, Index]] = []
    for mine, fleet, table, owner, score, memory in parts:
        under = score.argmin(axis=0)
        best = score[under, np.arange(len(table))]
        ranked = np.lexsort((best, owner))
        ranked = ranked[np.isfinite(best[ranked])]
        heads = np.flatnonzero(np.diff(owner[ranked], prepend=-1))
        ends = [*heads[1:].tolist(), len(ranked)][: len(heads)]
        for start, stop in zip(heads.tolist(), ends, strict=True):
            rows = ranked[start : min(stop, start + _ROWS)]
            least = ranked[start + int(memory[ranked[start:stop]].argmin())]
            if least not in rows:
                rows = np.append(rows, least)
            first = int(rows[0])
            found.append(
                (
                    float(best[first]),
                    int(mine[owner[first]]),
                    fleet,
                    table,
                    rows,
                    fleet.sequences[under[first]],
                )
            )
    if not found:
        return None
    found.sort(key=lambda entry: entry[:2])
    return Layouts(
        choice=np.array([entry[1] for entry in found], dtype=np.int64),
        rows=StrategyTable.concatenate([e[3][e[4]] for e in found]),
        starts=np.cumsum([0] + [len(e[4]) for e in found]).astype(np.int64),
        count=np.array([e[2].count for e in found], dtype=np.int64),
        usable=np.stack([e[2].usable for e in found]),
        score=np.array([e[0] for e in found]),
        sequence=np.stack([e[5] for e in found]),
    )
