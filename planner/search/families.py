"""Families of strategies, and which of nearly equal strategies is the simplest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.cost import CostModel
from planner.schema import Strategy
from planner.search.base import (
    Candidate,
    Objective,
    Request,
    preference,
    scores_of,
)
from planner.search.launcher_limits import rank_ranges
from planner.search.refine import candidates_of_row
from planner.space import enumerate_strategies

__all__ = [
    "NEAR",
    "PLAIN",
    "complexity",
    "data_parallel_alone",
    "family",
    "in_order",
    "simplest",
]

#: Score over the best within which strategies count as equally good: repeated runs of
#: one configuration differ by about as much.
NEAR = 1.03

#: Family of strategies without any other axis than those of data parallelism.
PLAIN = "data parallel alone"


def family(strategy: Strategy) -> str:
    """Name the kinds of parallelism of a strategy: those of one family share them."""
    mesh = strategy.mesh
    splits = strategy.schedule_spec.splits_backward
    pipeline = "split-backward pipeline" if splits else "pipeline"
    axes = {"tp": mesh.tp, pipeline: mesh.pp, "cp": mesh.cp, "ep": mesh.ep}
    used = [name for name, degree in axes.items() if degree > 1]
    return " + ".join(used) or PLAIN


def complexity(strategy: Strategy) -> int:
    """Count the axes that a strategy uses, and its knobs that are not at rest."""
    mesh = strategy.mesh
    knobs = (
        mesh.pp > 1 and strategy.schedule != "1F1B",
        strategy.virtual_stages > 1,
        len({stage.recompute for stage in strategy.stages}) > 1,
        mesh.cp > 1 and strategy.context_algorithm != "ring",
    )
    return sum(degree > 1 for degree in (*mesh.degrees, mesh.ep)) + sum(knobs)


def simplest(candidates: Sequence[Candidate], objective: Objective) -> Candidate:
    """Return the candidate to choose: of those nearly as good as the best the simplest.

    Args:
        candidates: At least one, best first by :func:`planner.search.base.preference`.
        objective: The request's; of memory the best is chosen.
    """
    if objective == "memory":
        return candidates[0]
    most = preference(candidates[0], objective)[0] * NEAR
    near = [one for one in candidates if preference(one, objective)[0] <= most]
    return min(near, key=lambda one: complexity(one.strategy))


def in_order(request: Request, candidate: Candidate) -> Candidate:
    """Return a candidate with its devices in the order of their ids, if that will do.

    It does where the candidate is as good as before: launchers number devices so.

    Args:
        request: What it answers.
        candidate: That was chosen.
    """
    strategy = candidate.strategy
    ids = strategy.device_ids()
    order = np.sort(ids)
    if request.objective == "memory" or np.array_equal(ids, order):
        return candidate
    other = strategy.model_copy(update={"device_ranges": rank_ranges(order)})
    context = request.context.reordered(order)
    cost = CostModel(context).cost(other)
    found = Candidate(strategy=other, cost=cost)
    most = preference(candidate, request.objective)[0] * NEAR
    near = cost.fits and preference(found, request.objective)[0] <= most
    return found if near else candidate


#: What data parallelism alone leaves at 1.
_ALONE = {"pp": 1, "tp": 1, "cp": 1, "ep": 1}


def data_parallel_alone(request: Request) -> Candidate | None:
    """Price the best of FSDP, HSDP, ZeRO and plain replicas without any other axis.

    Args:
        request: The question; its pins are kept.

    Returns:
        The best that fits; else the one that is nearest to fitting. None if none is
        legal.
    """
    if any(request.pins.get(axis, 1) != 1 for axis in _ALONE):
        return None
    model = CostModel(request.context)
    pins = {**request.pins, **_ALONE}
    best: Candidate | None = None
    for table in enumerate_strategies(
        request.facts, num_devices=len(request.context.order), pins=pins
    ):
        if not len(table):
            continue
        costs = model.table(table)
        scores = scores_of(costs, table, request.objective)
        fits = bool(np.isfinite(scores).any())
        row = int(scores.argmin() if fits else costs.excess_bytes.argmin())
        for found in candidates_of_row(
            model, table.row(row), most=1, limits=request.launcher_limits
        ):
            if best is None or _key(found, request) < _key(best, request):
                best = found
    return best


def _key(candidate: Candidate, request: Request) -> tuple[bool, float, float]:
    """Order those that fit by the objective, before others by what they lack."""
    cost = candidate.cost
    lack = cost.lack_bytes
    if lack > 0:
        return True, lack, 0.0
    return False, 0.0, preference(candidate, request.objective)[0]
