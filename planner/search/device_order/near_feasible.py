"""Meshes that lack memory by closed forms, but fit once a cut minds it.

Closed forms cut by time alone and recompute the same everywhere. Where memory is short
that calls most long pipelines too large, and what is left may be many times slower than
the best of those. An exact cut, with recomputation stage by stage, tells which fit.
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
from planner.search.device_order.subsets import Choices
from planner.search.moves import Solution
from planner.search.refine import ExactPricer, eager_variants
from planner.space import MESH_COLUMNS, StrategyTable, legal

__all__ = [
    "NearFeasible",
    "RecutMeshes",
    "RecutResult",
    "best_score",
    "find_near_feasible",
    "recut_near_feasible",
    "roomiest",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Meshes that are given a chance. On 20 validation worlds short of memory the best
#: mesh that an exact cut lets fit was among the first 10 by this order, and at up to
#: place 246 by the time they would take alone.
_MISSES = 12
#: What fits and is at most this much worse than the best so far is tried as eager 1F1B.
_VARIED = 1.4


@dataclass(eq=False, slots=True)
class RecutMeshes:
    """Meshes of which a row fitted once it was cut by memory.

    Other rows and orders of such a mesh that lack no more are taken to fit, too.

    Attributes:
        known: By degrees: the most that was lacked, in bytes; and what the simulator
            said of the best over what closed forms promised.
    """

    known: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)

    def learn(
        self, mesh: tuple[int, ...], lacked: float, hope: float, value: float
    ) -> None:
        """Take in a row that fits.

        Args:
            mesh: Its degrees.
            lacked: Bytes, by closed forms.
            hope: Its score by closed forms, if memory were enough.
            value: Its score when it was cut and simulated.
        """
        most, ratio = self.known.get(mesh, (0.0, np.inf))
        self.known[mesh] = max(most, lacked), min(ratio, value / hope)

    def scores(
        self, costs: CostTable, table: StrategyTable, objective: Objective
    ) -> Array:
        """:func:`scores_of`, also of rows that a cut by memory lets fit. Shape [n]."""
        found = scores_of(costs, table, objective)
        if not self.known or costs.fits.all():
            return found
        hope = scores_of(costs, table, objective, fitting=False)
        degrees = np.stack([getattr(table, name) for name in MESH_COLUMNS], axis=1)
        for mesh, (lacked, ratio) in self.known.items():
            alike = (degrees == mesh).all(axis=1) & ~costs.fits
            alike &= costs.excess_bytes <= lacked
            found[alike] = hope[alike] * ratio
        return found


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class NearFeasible:
    """A row under an order of devices that lacks memory.

    Attributes:
        choice: Its mesh, as an index into the
            :class:`~planner.search.device_order.subsets.Choices`.
        solution: Row and order.
        lacks_bytes: On the rank that lacks the most, by closed forms; below 0 if
            memory suffices.
        hope: Its score by closed forms, if memory were enough.
    """

    choice: int
    solution: Solution
    lacks_bytes: float
    hope: float


def find_near_feasible(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    seen: Screened,
) -> list[NearFeasible]:
    """Return one row each of meshes that lack little memory and would be fast.

    Args:
        request: The question.
        model: Counts the evaluations.
        groups: Of the request's devices.
        choices: All meshes.
        seen: What :func:`planner.search.device_order.screening.screen` found.
    Returns:
        The most promising first: those with the least product of what they lack and
        what they would take.
    """
    best = seen.score.min(initial=np.inf)
    missed = np.flatnonzero((seen.excess_bytes > 0) & (seen.hope < best))
    promise = seen.hope[missed] * seen.excess_bytes[missed]
    nearest = missed[np.argsort(promise, kind="stable")[:_MISSES]]
    return [
        _least_lacking(request, model, groups, choices, choice)
        for choice in seen.choice[nearest].tolist()
    ]


def roomiest(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    seen: Screened,
) -> Iterator[NearFeasible]:
    """Return one row each of meshes with most memory to spare, or that lack least.

    They are left to try where nothing that looked fast fits. Takes the arguments of
    :func:`find_near_feasible`, and prices one at a time: the first most often fits.
    """
    most = np.argsort(seen.excess_bytes, kind="stable")[:_MISSES]
    for choice in seen.choice[most].tolist():
        yield _least_lacking(request, model, groups, choices, choice)


def _least_lacking(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    choice: int,
) -> NearFeasible:
    """Return the row of a mesh, under its plain orders, that lacks least memory."""
    subset = choices.subsets[choices.subset[choice]]
    table = StrategyTable.concatenate(
        [few_rows(request, choices.mesh[[choice]], many) for many in (1, 2)]
    )
    ids = groups.orders(subset.sequences, subset.count)
    rows = np.tile(np.arange(len(table)), len(ids))
    order = np.repeat(np.arange(len(ids)), len(table))
    every = table[rows]
    costs = model.arranged(every, ids, order)
    hope = scores_of(costs, every, request.objective, fitting=False)
    at = int(costs.excess_bytes.argmin())
    return NearFeasible(
        choice=choice,
        solution=Solution(order=ids[order[at]], row=every.row(at)),
        lacks_bytes=float(costs.excess_bytes[at]),
        hope=float(hope[at]),
    )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RecutResult:
    """Result of cutting near-feasible rows.

    Attributes:
        found: Solutions with their cuts, whether they fit or not.
        choices: Meshes of which a row fits, the best first, as indices into the
            :class:`~planner.search.device_order.subsets.Choices`.
        meshes: What is known of them.
        best: Score of the best that fits; infinite if none does.
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
        near_feasible: The most promising first.
        until: Of :func:`time.perf_counter`, after which the rest is left out; the first
            is cut in any case. None for no clock.
        most: Simulations.
    """
    request, recut = exact.request, RecutMeshes()
    found: list[tuple[Solution, list[Candidate]]] = []
    fitted: dict[int, float] = {}
    best = np.inf
    waiting = near_feasible[::-1]
    while waiting and len(found) < most:
        if found and until is not None and time.perf_counter() >= until:
            break
        near = waiting.pop()
        one = near.solution
        cuts = exact.candidates(one.row, one.order)
        found.append((one, cuts))
        value = best_score(request, cuts)
        if np.isinf(value):
            continue
        recut.learn(one.mesh, near.lacks_bytes, near.hope, value)
        fitted[near.choice] = min(value, fitted.get(near.choice, np.inf))
        best = min(best, value)
        if value <= _VARIED * best:
            waiting += _eager(exact, near)
    ranked = sorted(fitted, key=fitted.__getitem__)
    return RecutResult(found=found, choices=ranked, meshes=recut, best=best)


def best_score(request: Request, cuts: list[Candidate]) -> float:
    """Best score of what fits; infinite if nothing does."""
    return min(
        (
            score(one.cost, one.strategy.mesh.num_devices, request.objective)
            for one in cuts
            if one.cost.fits
        ),
        default=np.inf,
    )


def _eager(exact: ExactPricer, near: NearFeasible) -> list[NearFeasible]:
    """A pipeline's row as eager 1F1B, if pins and rules allow that."""
    request, one = exact.request, near.solution
    found = [
        other
        for other in (eager_variants(one.row) if one.row["pp"] > 1 else [])
        if other != one.row
        and all(other[knob] == value for knob, value in request.pins.items())
    ]
    if not found:
        return []
    table = StrategyTable.from_columns(
        **{name: [each[name] for each in found] for name in one.row}
    )
    table = table[np.flatnonzero(legal(table, request.facts))]
    none = np.zeros(len(table), dtype=np.int64)
    costs = exact.model.arranged(table, one.order[None, :], none)
    hope = scores_of(costs, table, request.objective, fitting=False)
    return [
        NearFeasible(
            choice=near.choice,
            solution=Solution(order=one.order, row=table.row(at)),
            lacks_bytes=float(costs.excess_bytes[at]),
            hope=float(hope[at]),
        )
        for at in range(len(table))
    ]
