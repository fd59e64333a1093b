"""Meshes that lack memory by closed forms, but fit once a cut minds it.

Closed forms cut by time alone and recompute the same everywhere. Where memory is short
that calls most long pipelines too large, and what is left may be many times slower than
the best of those. An exact cut, with recomputation stage by stage, tells which fit.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.search.arranging.fleets import Choices
from planner.search.arranging.groups import DeviceGroups
from planner.search.arranging.screening import Screened, few_rows
from planner.search.arranging.settling import Settler
from planner.search.base import Candidate, Request, score
from planner.search.moves import Row, Solution
from planner.search.refine import eager_variants
from planner.space import StrategyTable, legal

__all__ = ["best_score", "nearest_misses", "settle_misses"]

Index = NDArray[np.int64]

#: Meshes that are given a chance. On 20 validation worlds short of memory the best
#: mesh that an exact cut lets fit was among the first 10 by this order, and at up to
#: place 246 by the time they would take alone.
_MISSES = 12
#: What fits and is at most this much worse than the best so far is tried as eager 1F1B.
_VARIED = 1.25


def nearest_misses(
    request: Request,
    model: CostModel,
    groups: DeviceGroups,
    choices: Choices,
    seen: Screened,
) -> list[Solution]:
    """Of meshes that lack little memory and would be fast, a row each.

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
    found = []
    for choice in seen.choice[nearest].tolist():
        fleet = choices.fleets[choices.fleet[choice]]
        table = few_rows(request, choices.mesh[[choice]])
        ids = groups.orders(fleet.sequences, fleet.count)
        rows = np.tile(np.arange(len(table)), len(ids))
        order = np.repeat(np.arange(len(ids)), len(table))
        excess = model.arranged(table[rows], ids, order).excess_bytes
        at = int(excess.argmin())
        found.append(Solution(order=ids[order[at]], row=table.row(int(rows[at]))))
    return found


def settle_misses(
    settler: Settler, misses: list[Solution], until: float | None, most: int
) -> list[tuple[Solution, list[Candidate]]]:
    """Cut near misses exactly; those that turn out well as eager 1F1B, too.

    Args:
        settler: Cuts and simulates.
        misses: The most promising first.
        until: Of :func:`time.perf_counter`, after which the rest is left out; the first
            is cut in any case. None for no clock.
        most: Simulations.
    Returns:
        Each with its cuts, whether they fit or not.
    """
    request = settler.request
    found: list[tuple[Solution, list[Candidate]]] = []
    best = np.inf
    waiting = misses[::-1]
    while waiting and len(found) < most:
        if found and until is not None and time.perf_counter() >= until:
            break
        one = waiting.pop()
        cuts = settler.settled(one.row, one.order)
        found.append((one, cuts))
        value = best_score(request, cuts)
        best = min(best, value)
        if value <= _VARIED * best < np.inf:
            waiting += [
                Solution(order=one.order, row=row) for row in _eager(request, one.row)
            ]
    return found


def best_score(request: Request, cuts: list[Candidate]) -> float:
    """Of what fits; infinite if nothing does."""
    return min(
        (
            score(one.cost, one.strategy.mesh.num_devices, request.objective)
            for one in cuts
            if one.cost.fits
        ),
        default=np.inf,
    )


def _eager(request: Request, row: Row) -> list[dict[str, int]]:
    """A pipeline's row as eager 1F1B, if pins and rules allow that."""
    pins = request.pins
    if row["pp"] == 1:
        return []
    found = [
        other
        for other in eager_variants(row)
        if other != row and all(other[knob] == value for knob, value in pins.items())
    ]
    if not found:
        return []
    table = StrategyTable.from_columns(
        **{name: [one[name] for one in found] for name in row}
    )
    kept = np.flatnonzero(legal(table, request.facts))
    return [table.row(at) for at in kept.tolist()]
