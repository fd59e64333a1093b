"""Meshes that lack memory by closed forms, but fit once a cut minds it.

Closed forms cut by time alone and recompute the same everywhere. Where memory is short
that calls most long pipelines too large, and what is left may be many times slower than
the best of those. An exact cut, with recomputation stage by stage, tells which fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.search.arranging.fleets import Choices
from planner.search.arranging.groups import DeviceGroups
from planner.search.arranging.mended import Mended, scores_of
from planner.search.arranging.screening import Screened, few_rows
from planner.search.arranging.settling import Settler
from planner.search.base import Candidate, Request, score
from planner.search.moves import Solution
from planner.search.refine import eager_variants
from planner.space import StrategyTable, legal

__all__ = [
    "Miss",
    "Settled",
    "best_score",
    "nearest_misses",
    "roomiest",
    "settle_misses",
]

Index = NDArray[np.int64]

#: Meshes that are given a chance. On 20 validation worlds short of memory the best
#: mesh that an exact cut lets fit was among the first 10 by this order, and at up to
#: place 246 by the time they would take alone.
_MISSES = 12
#: What fits and is at most this much worse than the best so far is tried as eager 1F1B.
_VARIED = 1.4


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Miss:
    """A row under an order of devices that lacks memory.

    Attributes:
        choice: Its mesh, as an index into the
            :class:`~planner.search.arranging.fleets.Choices`.
        solution: Row and order.
        lacks_bytes: On the rank that lacks the most, by closed forms; below 0 if
            memory suffices.
        hope: Its score by closed forms, if memory were enough.
    """

    choice: int
    solution: Solution
    lacks_bytes: float
    hope: float


def nearest_misses(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    seen: Screened,
) -> list[Miss]:
    """Return one row each of meshes that lack little memory and would be fast.

    Args:
        request: The question.
        model: Counts the evaluations.
        groups: Of the request's devices.
        choices: All meshes.
        seen: What :func:`planner.search.arranging.screening.screen` found.
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
) -> Iterator[Miss]:
    """Return one row each of meshes with most memory to spare, or that lack least.

    What is left to try where nothing that looked fast fits; takes what
    :func:`nearest_misses` does, and prices one at a time: the first most often fits.
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
) -> Miss:
    """Return the row of a mesh, under its plain orders, that lacks least memory."""
    fleet = choices.fleets[choices.fleet[choice]]
    table = StrategyTable.concatenate(
        [few_rows(request, choices.mesh[[choice]], many) for many in (1, 2)]
    )
    ids = groups.orders(fleet.sequences, fleet.count)
    rows = np.tile(np.arange(len(table)), len(ids))
    order = np.repeat(np.arange(len(ids)), len(table))
    every = table[rows]
    costs = model.arranged(every, ids, order)
    hope = scores_of(costs, every, request.objective, fitting=False)
    at = int(costs.excess_bytes.argmin())
    return Miss(
        choice=choice,
        solution=Solution(order=ids[order[at]], row=every.row(at)),
        lacks_bytes=float(costs.excess_bytes[at]),
        hope=float(hope[at]),
    )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Settled:
    """Result of cutting near misses.

    Attributes:
        found: Solutions with their cuts, whether they fit or not.
        choices: Meshes of which a row fits, the best first, as indices into the
            :class:`~planner.search.arranging.fleets.Choices`.
        mended: What is known of those meshes.
        best: Score of the best that fits; infinite if none does.
    """

    found: list[tuple[Solution, list[Candidate]]]
    choices: list[int]
    mended: Mended
    best: float


def settle_misses(
    settler: Settler, misses: list[Miss], until: float | None, most: int
) -> Settled:
    """Cut near misses exactly; those that turn out well as eager 1F1B, too.

    Args:
        settler: Cuts and simulates.
        misses: The most promising first.
        until: Of :func:`time.perf_counter`, after which the rest is left out; the first
            is cut in any case. None for no clock.
        most: Simulations.
    """
    request, mended = settler.request, Mended()
    found: list[tuple[Solution, list[Candidate]]] = []
    fitted: dict[int, float] = {}
    best = np.inf
    waiting = misses[::-1]
    while waiting and len(found) < most:
        if found and until is not None and time.perf_counter() >= until:
            break
        miss = waiting.pop()
        one = miss.solution
        cuts = settler.settled(one.row, one.order)
        found.append((one, cuts))
        value = best_score(request, cuts)
        if np.isinf(value):
            continue
        mended.learn(one.mesh, miss.lacks_bytes, miss.hope, value)
        fitted[miss.choice] = min(value, fitted.get(miss.choice, np.inf))
        best = min(best, value)
        if value <= _VARIED * best:
            waiting += _eager(settler, miss)
    ranked = sorted(fitted, key=fitted.__getitem__)
    return Settled(found=found, choices=ranked, mended=mended, best=best)


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


def _eager(settler: Settler, miss: Miss) -> list[Miss]:
    """A pipeline's row as eager 1F1B, if pins and rules allow that."""
    request, one = settler.request, miss.solution
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
    costs = settler.model.arranged(table, one.order[None, :], none)
    hope = scores_of(costs, table, request.objective, fitting=False)
    return [
        Miss(
            choice=miss.choice,
            solution=Solution(order=one.order, row=table.row(at)),
            lacks_bytes=float(costs.excess_bytes[at]),
            hope=float(hope[at]),
        )
        for at in range(len(table))
    ]
