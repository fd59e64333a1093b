"""Plans for many parts of a cluster at once, by closed forms.

A scheduler that places jobs asks what each number of devices, packed or spread, is
worth to each job. All parts are priced together, so that a part takes a millisecond;
nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cluster.topology import HierarchicalTopology
from planner.cost import CostModel
from planner.cost.pipelines.flushed import has_textbook_time
from planner.errors import StrategyError
from planner.search.base import Request, scores_of
from planner.search.device_order.screening import few_rows
from planner.search.device_order.subsets import mesh_of_row
from planner.search.moves import Solution
from planner.space import StrategyTable, enumerate_meshes, expand_meshes
from planner.space.table import distinct

__all__ = ["PricedSolution", "plan_subclusters", "rank_subclusters"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Rows by which meshes are ranked: without recomputation and memory's limit no row of a
#: mesh is faster; with all of it and the smallest microbatches none needs less memory.
_RANKED = (
    *({"microbatch_size": size, "recompute": 0} for size in (1, 4, 16)),
    {"num_microbatches": 1, "recompute": 0},
    {"microbatch_size": 1, "recompute": 2},
)
#: Pins with which the rows that rank meshes are others.
_PINNED = {"zero_stage", "recompute", "microbatch_size", "num_microbatches"}
#: Meshes of a part that are priced with all their rows at a time, and how many times:
#: as long as a further mesh promises more than the best plan.
_OPENED, _TURNS = 4, 4


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

    Parts that see the same devices and links are priced once. Lists of meshes and rows
    are kept by the request: a second call with the same request takes half as long.

    Args:
        request: Model, cluster, batch and objective; its pins hold in every plan.
        parts: Device ids of each part; parts may overlap.

    Returns:
        One for each part; None where no strategy is legal or none fits.

    Raises:
        StrategyError: If a part is empty, or has a device twice or one that the cluster
            lacks.
    """
    ranked = rank_subclusters(request, parts, most=1)
    return [plans[0] if plans else None for plans in ranked]


def rank_subclusters(
    request: Request, parts: Sequence[Sequence[int] | Index], most: int
) -> list[list[PricedSolution]]:
    """Return the best plans on each part, each with another mesh, for a closer look.

    Closed forms of pipelines with uneven stages are a few per cent off.

    Args:
        request: As :func:`plan_subclusters` takes it; likewise parts.
        parts: Device ids of each part.
        most: Plans for each part at most.

    Returns:
        The plans of each part, best first; empty where none fits.

    Raises:
        StrategyError: As :func:`plan_subclusters`.
    """
    if not len(parts):
        return []
    ids = _padded(request, parts)
    first, which = _alike(request, ids)
    made = [plans[:most] for plans in _plan(request, ids[first])]
    found = []
    for row, number in zip(ids, which.tolist(), strict=True):
        order = row[row >= 0]
        found.append(
            [
                replace(one, solution=Solution(order=order, row=one.solution.row))
                for one in made[number]
            ]
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


def _alike(request: Request, ids: Index) -> tuple[Index, Index]:
    """Number parts that see the same devices and links.

    Returns:
        First part of each kind, [kinds], and the kind of each part, [parts].
    """
    cluster = request.context.cluster
    topology = cluster.topology
    if not isinstance(topology, HierarchicalTopology) or len(ids) < 2:
        return np.arange(len(ids)), np.arange(len(ids))
    groups = [host.count * host.devices_per_host for host in cluster.document.hosts]
    of_device = np.repeat(np.arange(len(groups)), groups)
    kinds: dict[bytes, int] = {}
    first: list[int] = []
    which: list[int] = []
    for at, row in enumerate(ids):
        part = row[row >= 0]
        seen = [of_device[part]]
        for domain in topology.domains:
            _, start, own = np.unique(
                domain[part], return_index=True, return_inverse=True
            )
            seen.append(start[own])
        key = np.concatenate(seen).tobytes()
        if key not in kinds:
            kinds[key] = len(first)
            first.append(at)
        which.append(kinds[key])
    return np.array(first), np.array(which)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Meshes:
    """Meshes over some numbers of devices, with rows of each.

    Attributes:
        mesh: Degrees, in the columns :data:`planner.space.MESH_COLUMNS`. [meshes, 6].
        rows: Rows, in the order of the meshes.
        many: Rows of each mesh. Shape [meshes].
    """

    mesh: Index
    rows: StrategyTable
    many: Index

    @classmethod
    def of(cls, mesh: Index, table: StrategyTable) -> _Meshes:
        """Sort the rows of a table by their meshes."""
        owner = mesh_of_row(table, mesh) if len(table) else np.zeros(0, dtype=np.int64)
        rows = table[np.argsort(owner, kind="stable")]
        return cls(mesh=mesh, rows=rows, many=np.bincount(owner, minlength=len(mesh)))

    def select(self, chosen: Index) -> tuple[StrategyTable, Index]:
        """Return the rows of some meshes, and which of them each row belongs to."""
        many = self.many[chosen]
        owner = np.repeat(np.arange(len(chosen)), many)
        start = np.cumsum(self.many)[chosen] - np.cumsum(many)
        return self.rows[start[owner] + np.arange(len(owner))], owner


def _ranked(request: Request, counts: tuple[int, ...]) -> _Meshes:
    """List the meshes over numbers of devices, with the rows that rank them."""
    facts, pins = request.facts, request.pins
    mesh = np.concatenate([enumerate_meshes(facts, count, pins) for count in counts])
    if not len(mesh):
        return _Meshes.of(mesh, expand_meshes(mesh, facts, pins))
    kept = [
        {name: value for name, value in row.items() if name not in pins}
        for row in _RANKED
    ]
    table = few_rows(request, mesh, batching=kept)
    if not _PINNED & set(pins):
        # Weights are sharded for less memory alone.
        lean = (table.zero_stage < 3) | (table.recompute > 0)
        table = table[np.flatnonzero(lean)]
    return _Meshes.of(mesh, table)


def _opened(request: Request, mesh: Index) -> _Meshes:
    """List all rows, whose time is a formula, of meshes."""
    kept = request.kept
    keys = [("rows", *degrees) for degrees in mesh.tolist()]
    new = np.array([at for at, key in enumerate(keys) if key not in kept], dtype=int)
    if len(new):
        table = expand_meshes(mesh[new], request.facts, request.pins)
        made = _Meshes.of(mesh[new], table[np.flatnonzero(has_textbook_time(table))])
        for at, number in enumerate(new.tolist()):
            kept[keys[number]] = made.select(np.array([at]))[0]
    tables = [kept[key] for key in keys]
    many = np.array([len(table) for table in tables])
    return _Meshes(mesh=mesh, rows=StrategyTable.concatenate(tables), many=many)


def _plan(request: Request, ids: Index) -> list[list[PricedSolution]]:
    """Plan parts that differ; the best row of each mesh that was opened, best first."""
    found: list[list[PricedSolution]] = [[] for _ in ids]
    counts = (ids >= 0).sum(axis=1)
    sizes = tuple(np.unique(counts).tolist())
    if sizes not in request.kept:
        request.kept[sizes] = _ranked(request, sizes)
    listed: _Meshes = request.kept[sizes]
    devices = listed.mesh[:, :5].prod(axis=1)
    part, mesh = np.nonzero((counts[:, None] == devices) & (listed.many > 0))
    if not len(part):
        return found
    model = CostModel(request.context)
    rows, cell = listed.select(mesh)
    costs = model.table_in_orders(rows, ids, part[cell])
    unlimited = scores_of(costs, rows, request.objective, fitting=False)
    start = np.flatnonzero(np.diff(cell, prepend=-1))
    promise = np.minimum.reduceat(unlimited, start)
    doubtful = np.minimum.reduceat(costs.excess_bytes, start) > 0
    best = np.full(len(ids), np.inf)
    order = np.lexsort((promise, doubtful, part))
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order)) - np.searchsorted(part, part[order])
    for number in range(_TURNS):
        hopeful = (promise < best[part]) & (~doubtful | np.isinf(best[part]))
        mine = np.flatnonzero((turn // _OPENED == number) & hopeful)
        if not len(mine):
            break
        _open(request, model, ids, part[mine], listed.mesh[mesh[mine]], found)
        for place, plans in enumerate(found):
            plans.sort(key=lambda one: one.score)
            best[place] = plans[0].score if plans else np.inf
    return found


def _open(
    request: Request,
    model: CostModel,
    ids: Index,
    part: Index,
    mesh: Index,
    found: list[list[PricedSolution]],
) -> None:
    """Price all rows of meshes on parts; add the best row of each that fits."""
    first, which = distinct(*mesh.T)
    rows, cell = _opened(request, mesh[first]).select(which)
    of = part[cell]
    costs = model.table_in_orders(rows, ids, of)
    score = scores_of(costs, rows, request.objective)
    by = np.lexsort((score, cell))
    heads = by[np.flatnonzero(np.diff(cell[by], prepend=-1))]
    for at in heads[np.isfinite(score[heads])].tolist():
        found[of[at]].append(
            PricedSolution(
                solution=Solution(order=ids[of[at]], row=rows.row(at)),
                step_time_s=float(costs.step_time_s[at]),
                memory_bytes=float(costs.memory_bytes[at]),
                score=float(score[at]),
            )
        )
