"""Meshes that exceed memory by closed forms, but fit once they are cut by memory.

Closed forms cut by time alone and recompute the same in all stages. Where memory is
short, most long pipelines exceed it by closed forms, and the meshes that fit may be
many times slower than the best of those. An exact cut, with recomputation stage by
stage, finds the ones that fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel, CostTable
from planner.search.base import Candidate, Objective, Request, score, scores_of
from planner.search.device_order.groups import DeviceGroups
from planner.search.device_order.screening import Screened, few_rows
from planner.search.device_order.subsets import Choices, distinct_meshes, mesh_of_row
from planner.search.moves import Solution
from planner.search.refine import ExactPricer, schedule_variants
from planner.search.steps import Steps, completed
from planner.space import MESH_COLUMNS, StrategyTable, legal

__all__ = [
    "NearFeasible",
    "RecutMeshes",
    "RecutResult",
    "best_score",
    "find_near_feasible",
    "recut_in_steps",
    "recut_near_feasible",
    "roomiest",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Meshes that are recut. On 20 validation worlds short of memory the best
#: mesh that an exact cut lets fit was among the first 10 by this order, and at up to
#: place 246 by the time they would take alone.
_MISSES = 12
#: Least part of the memory limit that is taken for the excess of a row.
_DOUBT = 0.02
#: Meshes that fit by closed forms and are simulated before those with the most room.
_FASTEST = 2
#: Largest ratio to the best score so far for a trial as eager 1F1B.
_VARIED = 1.4


@dataclass(eq=False, slots=True)
class RecutMeshes:
    """Meshes with a row that fitted once it was cut by memory.

    Other rows and orders of such a mesh with no more excess are taken to fit, too.

    Attributes:
        known: Largest excess in bytes of a row that fitted, and least ratio of the
            simulated score to the closed form, by degrees of the mesh.
    """

    known: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)

    def learn(
        self,
        mesh: tuple[int, ...],
        excess_bytes: float,
        unlimited: float,
        value: float,
    ) -> None:
        """Add a row that fitted.

        Args:
            mesh: Degrees of its mesh.
            excess_bytes: Its excess by closed forms.
            unlimited: Its score by closed forms with enough memory.
            value: Its score after the cut, simulated.
        """
        most, ratio = self.known.get(mesh, (0.0, np.inf))
        self.known[mesh] = max(most, excess_bytes), min(ratio, value / unlimited)

    def scores(
        self, costs: CostTable, table: StrategyTable, objective: Objective
    ) -> Array:
        """Return :func:`scores_of`, where rows that fit by a cut count. Shape [n]."""
        found = scores_of(costs, table, objective)
        if not self.known or costs.fits.all():
            return found
        unlimited = scores_of(costs, table, objective, fitting=False)
        degrees = np.stack([getattr(table, name) for name in MESH_COLUMNS], axis=1)
        for mesh, (most, ratio) in self.known.items():
            alike = (degrees == mesh).all(axis=1) & ~costs.fits
            alike &= costs.excess_bytes <= most
            found[alike] = unlimited[alike] * ratio
        return found


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class NearFeasible:
    """A row under an order of devices that exceeds memory by closed forms.

    Attributes:
        choice: Its mesh, as an index into the
            :class:`~planner.search.device_order.subsets.Choices`.
        solution: Row and order.
        excess_bytes: Excess on the rank with the most, by closed forms; below 0 if it
            fits.
        unlimited: Its score by closed forms with enough memory.
        spare: True if it is only wanted where no other row of its mesh fits.
    """

    choice: int
    solution: Solution
    excess_bytes: float
    unlimited: float
    spare: bool = False


def find_near_feasible(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    seen: Screened,
) -> list[NearFeasible]:
    """Return one or two rows for each mesh that lacks little memory and would be fast.

    Args:
        request: The question.
        model: Cost model; counts the evaluations.
        groups: Groups of the request's devices.
        choices: All meshes.
        seen: Result of :func:`planner.search.device_order.screening.screen`.

    Returns:
        Rows in the order of excess times score of their meshes, the least first; where
        nothing fits, in turn with those of the least excess. Spare rows come last.
    """
    best = seen.score.min(initial=np.inf)
    missed = np.flatnonzero((seen.excess_bytes > 0) & (seen.unlimited < best))
    promise = seen.unlimited[missed] * seen.excess_bytes[missed]
    nearest = missed[np.argsort(promise, kind="stable")[:_MISSES]]
    if np.isinf(best):
        least = missed[np.argsort(seen.excess_bytes[missed], kind="stable")]
        turns = np.stack([least[: len(nearest)], nearest], axis=1).ravel()
        nearest = np.array(list(dict.fromkeys(turns.tolist())), dtype=np.int64)
        nearest = nearest[:_MISSES]
    rows = _rows_of_meshes(request, model, groups, choices, seen.choice[nearest])
    return sorted(rows, key=lambda near: near.spare)


def roomiest(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    seen: Screened,
) -> Iterator[NearFeasible]:
    """Yield one row for each mesh: the fastest that fit, then those with much room.

    They are left to try where nothing was simulated that fits. Of meshes that leave at
    least half as much room as any the fastest come first, then the rest by their room.
    Takes the arguments of :func:`find_near_feasible`, and prices one at a time: the
    first most often fits.
    """
    fast = np.argsort(seen.score, kind="stable")[:_FASTEST]
    room = -seen.excess_bytes
    ample = room >= 0.5 * np.abs(room.max(initial=0.0))
    roomy = np.lexsort((np.where(ample, seen.least, -room), ~ample))[:_MISSES]
    for among, fastest in (fast[np.isfinite(seen.score[fast])], True), (roomy, False):
        for place in range(len(among)):
            choice = seen.choice[among[place : place + 1]]
            rows = _rows_of_meshes(request, model, groups, choices, choice)
            yield rows[0 if fastest else -1]


def _rows_of_meshes(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    chosen: Index,
) -> list[NearFeasible]:
    """Return the most promising row of each mesh, and that with the least excess.

    Promise is the product of the score with enough memory and of what exceeds memory:
    a row that shards less may be several times faster, and fit once it is cut exactly.
    """
    if not len(chosen):
        return []
    mesh, which = distinct_meshes(choices, chosen)
    table = StrategyTable.concatenate([few_rows(request, mesh, n) for n in (1, 2)])
    owner = mesh_of_row(table, mesh)
    subsets = [choices.subsets[at] for at in choices.subset[chosen]]
    ids = groups.orders(
        np.concatenate([subset.sequences for subset in subsets]),
        np.repeat(
            [subset.count for subset in subsets],
            [len(subset.sequences) for subset in subsets],
        ),
    )
    rows: list[Index] = []
    order: list[Index] = []
    first = 0
    for one, subset in zip(which.tolist(), subsets, strict=True):
        mine, many = np.flatnonzero(owner == one), len(subset.sequences)
        rows.append(np.tile(mine, many))
        order.append(np.repeat(np.arange(first, first + many), len(mine)))
        first += many
    every, under = table[np.concatenate(rows)], np.concatenate(order)
    costs = model.table_in_orders(every, ids, under)
    unlimited = scores_of(costs, every, request.objective, fitting=False)
    limit = costs.memory_bytes - costs.excess_bytes
    promise = unlimited * np.maximum(costs.excess_bytes / limit, _DOUBT)
    found, start = [], 0
    for choice, part in zip(chosen.tolist(), rows, strict=True):
        stop = start + len(part)
        best = start + int(promise[start:stop].argmin())
        least = start + int(costs.excess_bytes[start:stop].argmin())
        start = stop
        for at in dict.fromkeys([best, least]):
            ranks = ids[under[at]]
            found.append(
                NearFeasible(
                    choice=choice,
                    solution=Solution(order=ranks[ranks >= 0], row=every.row(at)),
                    excess_bytes=float(costs.excess_bytes[at]),
                    unlimited=float(unlimited[at]),
                    spare=at != best,
                )
            )
    return found


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RecutResult:
    """Result of cutting near-feasible rows.

    Attributes:
        found: Solutions with their cuts, whether they fit or not.
        choices: Meshes with a row that fits, the best first, as indices into the
            :class:`~planner.search.device_order.subsets.Choices`.
        meshes: The meshes with a row that fits.
        best: Score of the best row that fits; infinite if none fits.
    """

    found: list[tuple[Solution, list[Candidate]]]
    choices: list[int]
    meshes: RecutMeshes
    best: float


def recut_near_feasible(
    exact: ExactPricer,
    near_feasible: list[NearFeasible],
    until: float | None,
    most: int,
) -> RecutResult:
    """Cut near-feasible rows exactly; the good ones as eager 1F1B, too.

    Args:
        exact: Cuts and simulates.
        near_feasible: Rows, the most promising first.
        until: ``time.perf_counter`` after which the remaining rows are left out, but
            for the first; None for no limit.
        most: Most rows to cut.
    """
    return completed(recut_in_steps(exact, near_feasible, until, most))


def recut_in_steps(
    exact: ExactPricer,
    near_feasible: list[NearFeasible],
    until: float | None,
    most: int,
) -> Steps[RecutResult]:
    """Do the same in steps; see :func:`recut_near_feasible`. Pauses after each row."""
    request, recut = exact.request, RecutMeshes()
    found: list[tuple[Solution, list[Candidate]]] = []
    fitted: dict[int, float] = {}
    best = np.inf
    waiting = near_feasible[::-1]
    while waiting and len(found) < most:
        if found and until is not None and time.perf_counter() >= until:
            break
        near = waiting.pop()
        if near.spare and near.choice in fitted:
            continue
        one = near.solution
        cuts = exact.candidates(one.row, one.order)
        found.append((one, cuts))
        yield
        value = best_score(request, cuts)
        if np.isinf(value):
            continue
        recut.learn(one.mesh, near.excess_bytes, near.unlimited, value)
        fitted[near.choice] = min(value, fitted.get(near.choice, np.inf))
        best = min(best, value)
        if value <= _VARIED * best:
            waiting += _eager(exact, near)
    ranked = sorted(fitted, key=fitted.__getitem__)
    return RecutResult(found=found, choices=ranked, meshes=recut, best=best)


def best_score(request: Request, cuts: list[Candidate]) -> float:
    """Return the best score of candidates that fit; infinite if none fits."""
    return min(
        (
            score(one.cost, one.strategy.mesh.num_devices, request.objective)
            for one in cuts
            if one.cost.fits
        ),
        default=np.inf,
    )


def _eager(exact: ExactPricer, near: NearFeasible) -> list[NearFeasible]:
    """Return a pipeline's row as eager 1F1B, if pins and rules allow that."""
    request, one = exact.request, near.solution
    units = request.facts.num_units if one.row["pp"] > 1 else 0
    found = [
        other
        for other in schedule_variants(one.row, units, ("Eager1F1B",))
        if all(other[knob] == value for knob, value in request.pins.items())
    ]
    if not found:
        return []
    table = StrategyTable.from_columns(
        **{name: [each[name] for each in found] for name in one.row}
    )
    table = table[np.flatnonzero(legal(table, request.facts))]
    none = np.zeros(len(table), dtype=np.int64)
    costs = exact.model.table_in_orders(table, one.order[None, :], none)
    unlimited = scores_of(costs, table, request.objective, fitting=False)
    return [
        NearFeasible(
            choice=near.choice,
            solution=Solution(order=one.order, row=table.row(at)),
            excess_bytes=float(costs.excess_bytes[at]),
            unlimited=float(unlimited[at]),
        )
        for at in range(len(table))
    ]
