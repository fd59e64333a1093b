"""Plans for many parts of a cluster at once, by closed forms.

A scheduler that places jobs asks what each number of devices, packed or spread, is
worth to each job. All parts are priced together, so that a part takes a millisecond;
nothing is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.cost.pipelines.flushed import has_textbook_time
from planner.errors import StrategyError
from planner.search.base import Request, scores_of
from planner.search.device_order.screening import few_rows
from planner.search.device_order.subsets import mesh_of_row
from planner.search.moves import Solution
from planner.space import (
    MESH_COLUMNS,
    StrategyTable,
    enumerate_meshes,
    expand_meshes,
)

__all__ = ["PricedSolution", "plan_subclusters"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]
#: Degrees in the order of MESH_COLUMNS.
Mesh = tuple[int, ...]

#: Rows of each mesh by which the best are found, and how many of a part's meshes are
#: priced with all their rows.
_BATCHING = (
    *({"microbatch_size": 1}, {"microbatch_size": 4}, {"microbatch_size": 16}),
    {"num_microbatches": 1},
)
_OPENED = 3


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PricedSolution:
    """Best plan of a part of a cluster, by closed forms.

    Attributes:
        solution: Its row, and the device of each rank.
        step_time_s: Seconds of a step.
        memory_bytes: Memory of the fullest device.
        score: What the request minimises.
    """

    solution: Solution
    step_time_s: float
    memory_bytes: float
    score: float


def plan_subclusters(
    request: Request, parts: Sequence[Sequence[int] | Index]
) -> list[PricedSolution | None]:
    """Return the best plan on each part of a request's cluster.

    Every plan uses all devices of its part, in the order given. Its schedule is one
    whose time is a formula.

    Args:
        request: Model, cluster, batch and objective; its pins hold in every plan.
        parts: Device ids of each part; parts may overlap.

    Returns:
        One for each part; None where no strategy is legal or none fits.

    Raises:
        StrategyError: If a part is empty, or has a device twice or one that the cluster
            lacks.
    """
    ids = _padded(request, parts)
    counts = (ids >= 0).sum(axis=1)
    model = CostModel(request.context)
    found: list[PricedSolution | None] = [None] * len(ids)
    few = _joined(_few(request, counts))
    if few is None:
        return found
    rows, part = few
    score = scores_of(model.table_in_orders(rows, ids, part), rows, request.objective)
    opened = _joined(_opened(request, rows, part, score))
    if opened is None:
        return found
    rows, part = opened
    costs = model.table_in_orders(rows, ids, part)
    score = scores_of(costs, rows, request.objective)
    best = np.lexsort((score, part))
    first = np.unique(part[best], return_index=True)[1]
    for at in best[first][np.isfinite(score[best[first]])].tolist():
        order = ids[part[at], : counts[part[at]]]
        found[part[at]] = PricedSolution(
            solution=Solution(order=order, row=rows.row(at)),
            step_time_s=float(costs.step_time_s[at]),
            memory_bytes=float(costs.memory_bytes[at]),
            score=float(score[at]),
        )
    return found


def _padded(request: Request, parts: Sequence[Sequence[int] | Index]) -> Index:
    """Return the devices of the parts, -1 after the last. Shape [parts, most]."""
    known = request.context.cluster.num_devices
    ids = np.full((len(parts), max(map(len, parts), default=0)), -1, dtype=np.int64)
    for row, part in zip(ids, parts, strict=True):
        part = np.asarray(part, dtype=np.int64)
        wrong = len(part) == 0 or len(np.unique(part)) < len(part)
        if wrong or part.min() < 0 or part.max() >= known:
            raise StrategyError(
                f"part {part.tolist()} of a cluster of {known} devices; give at least "
                f"one device, each once, from 0 to {known - 1}"
            )
        row[: len(part)] = part
    return ids


def _few(request: Request, counts: Index) -> Iterator[tuple[StrategyTable, int]]:
    """Yield a few rows of every mesh of each part, and the part."""
    for count in np.unique(counts).tolist():
        mesh = enumerate_meshes(request.facts, count, request.pins)
        if not len(mesh):
            continue
        rows = few_rows(request, mesh, batching=_BATCHING)
        for part in np.flatnonzero(counts == count).tolist():
            yield rows, part


def _opened(
    request: Request, rows: StrategyTable, part: Index, score: Array
) -> Iterator[tuple[StrategyTable, int]]:
    """Yield all rows of each of the best meshes of each part, and the part."""
    best: dict[int, list[Mesh]] = {}
    meshes = np.stack([getattr(rows, name) for name in MESH_COLUMNS], axis=1)
    for at in np.argsort(score, kind="stable")[: np.isfinite(score).sum()].tolist():
        mine, mesh = best.setdefault(int(part[at]), []), tuple(meshes[at].tolist())
        if len(mine) < _OPENED and mesh not in mine:
            mine.append(mesh)
    by_size: dict[int, dict[Mesh, None]] = {}
    for mesh in (mesh for mine in best.values() for mesh in mine):
        by_size.setdefault(math.prod(mesh[:-1]), {})[mesh] = None
    expanded: dict[Mesh, StrategyTable] = {}
    for same in by_size.values():
        expanded |= _expanded(request, list(same))
    for index, mine in best.items():
        yield from ((expanded[mesh], index) for mesh in mine)


def _expanded(request: Request, meshes: list[Mesh]) -> dict[Mesh, StrategyTable]:
    """All rows, whose time is a formula, of meshes over equally many devices."""
    mesh = np.array(meshes, dtype=np.int64)
    table = expand_meshes(mesh, request.facts, request.pins)
    table = table[np.flatnonzero(has_textbook_time(table))]
    owner = mesh_of_row(table, mesh)
    return {one: table[np.flatnonzero(owner == at)] for at, one in enumerate(meshes)}


def _joined(
    found: Iterable[tuple[StrategyTable, int]],
) -> tuple[StrategyTable, Index] | None:
    """Join tables; return the part of each row as well. None if there is no row."""
    kept = [(table, part) for table, part in found if len(table)]
    if not kept:
        return None
    sizes = [len(table) for table, _ in kept]
    rows = StrategyTable.concatenate([table for table, _ in kept])
    return rows, np.repeat([part for _, part in kept], sizes)
