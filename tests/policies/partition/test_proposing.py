"""Steps after the network's proposals: neighbours, and plans with memory to spare."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.cost import CostModel
from planner.schema.schedules import schedule_spec
from planner.search import Request
from planner.search.device_order.near_feasible import best_score
from planner.search.device_order.pricer import Priced
from planner.search.moves import Solution
from planner.search.refine import ExactPricer
from planner.search.steps import Steps, completed
from planner.space import enumerate_strategies, legal
from planner.space.table import StrategyTable
from policies.partition.network import load_network
from policies.partition.partitioner import LearnedPartitioner
from policies.partition.proposing import (
    Known,
    Problem,
    Proposer,
    SearchConfig,
    polish,
    shortlist,
)
from tests.cost.made import device, hosts
from tests.search.device_order.made import mixed_hosts, prepared

EVEN = hosts((2, 4, device(memory_bytes=6e9)))


def _request(**changes: object) -> Request:
    return prepared(EVEN, units=16, global_batch=48, **changes)[0]


def _known(request: Request, **wanted: int) -> tuple[ExactPricer, Known]:
    """A search that has simulated one row so far: the first with some values."""
    rows = StrategyTable.concatenate(
        list(enumerate_strategies(request.facts, pins=request.pins))
    ).rows()
    row = next(
        row for row in rows if all(row[name] == value for name, value in wanted.items())
    )
    exact = ExactPricer(request=request, model=CostModel(request.context))
    one = Solution(order=request.context.order, row=row)
    cuts = exact.candidates(row, one.order)
    assert any(cut.cost.fits for cut in cuts)
    return exact, Known(model=exact.model, found=[(one, cuts)])


def _best(request: Request, known: Known) -> float:
    return min(best_score(request, cuts) for _, cuts in known.found)


START = {"pp": 4, "schedule": schedule_spec("1F1B").code, "recompute": 2}


def test_neighbours_of_the_best_are_simulated_until_none_is_better() -> None:
    request = _request()
    exact, known = _known(request, **START)
    before = _best(request, known)
    completed(polish(exact, known, None))
    assert _best(request, known) < 0.9 * before
    # More than one change: the neighbours of what was better, too.
    first, best = (
        known.found[0][0].row,
        min(known.found, key=lambda found: best_score(request, found[1]))[0].row,
    )
    assert sum(first[name] != best[name] for name in first) > 1
    rows = StrategyTable.from_columns(
        **{name: [one.row[name] for one, _ in known.found] for name in first}
    )
    assert legal(rows, request.facts).all()
    # Nothing is left to find out.
    after, many = _best(request, known), len(known.found)
    completed(polish(exact, known, None))
    assert _best(request, known) == after
    assert len(known.found) - many <= 7


def test_pins_simulations_and_time_are_kept_to() -> None:
    pins = {"schedule": schedule_spec("1F1B").code, "dp_shard": 2}
    request = _request(pins=pins)
    exact, known = _known(request, pp=4)
    completed(polish(exact, known, None))
    assert len(known.found) > 1
    for one, _ in known.found:
        assert all(one.row[name] == value for name, value in pins.items())
    for budget in 3, 4:
        few = replace(_request(), evaluation_budget=budget)
        exact, known = _known(few, **START)
        completed(polish(exact, known, None))
        assert exact.model.evaluations["simulated"] == budget
    exact, known = _known(_request(), **START)
    completed(polish(exact, known, time.perf_counter() - 1))
    assert len(known.found) == 1


def test_without_anything_that_fits_there_is_nothing_to_polish() -> None:
    request = _request()
    exact = ExactPricer(request=request, model=CostModel(request.context))
    known = Known(model=exact.model)
    completed(polish(exact, known, None))
    assert known.found == []


def test_what_has_memory_to_spare_is_tried_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if nothing that was prepared had turned out to fit.
    monkeypatch.setattr(Proposer, "_arrange", lambda *_: iter(()))
    monkeypatch.setattr("policies.partition.partitioner.ExpertPartitioner", None)
    alone = LearnedPartitioner(config=SearchConfig(generations=0))
    request = _request()
    found = alone.search(request)
    assert found.candidates
    assert found.evaluations["simulated"] < 40
    none_left = replace(request, evaluation_budget=1)
    assert alone.search(none_left).evaluations["simulated"] == 1


def _hour(cluster: Cluster) -> Problem:
    """A question with time for everything, and 30 simulations."""
    request, groups, choices = prepared(
        cluster, units=16, global_batch=48, evaluation_budget=30
    )
    until = time.perf_counter() + 3600
    return Problem(
        request=request, groups=groups, choices=choices, until=until, ends=until
    )


@pytest.mark.parametrize("cluster", [EVEN, mixed_hosts()], ids=["even", "mixed"])
def test_proposals_pause_after_each_batch_and_each_plan(cluster: Cluster) -> None:
    problem = _hour(cluster)
    known = Known(model=CostModel(problem.request.context))
    proposer = Proposer(problem, load_network(), SearchConfig(climbing=0.0), known)
    simulated, priced = [0], [0]
    for _ in proposer.steps():
        simulated.append(known.model.evaluations["simulated"])
        priced.append(known.model.evaluations["analytic"])
    assert simulated[-1] > 3
    # A plan is cut in at most three ways.
    assert np.diff(simulated).max() <= 3
    # A batch of prices is no larger, however many meshes there are.
    assert np.diff(priced).max() <= 8_000


def test_meshes_of_closed_forms_and_of_the_network_are_opened_in_turn() -> None:
    problem = _hour(mixed_hosts())
    exact = ExactPricer(
        request=problem.request, model=CostModel(problem.request.context)
    )
    every = np.arange(len(problem.choices))
    seen = completed(shortlist(problem, exact, every)).seen
    best = seen.choice[np.argsort(seen.score, kind="stable")]
    # A network that is wrong about all meshes.
    ranked = np.concatenate([best[::-1], np.setdiff1d(every, best)])
    short = completed(shortlist(problem, exact, ranked))
    assert not len(short.recut.choices)
    fitting = seen.choice[np.isfinite(seen.score)]
    worst = ranked[np.isin(ranked, fitting)]
    assert short.chosen[:4].tolist() == [best[0], worst[0], best[1], worst[1]]
    assert len(set(short.chosen.tolist())) == len(short.chosen)


@pytest.mark.parametrize(("best", "drawing"), [(np.inf, True), (1.0, False)])
def test_orders_are_drawn_late_where_nothing_fits_yet(
    best: float, drawing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(_hour(mixed_hosts()), until=time.perf_counter())
    known = Known(model=CostModel(problem.request.context))
    proposer = Proposer(problem, load_network(), SearchConfig(), known)
    monkeypatch.setattr(Proposer, "_best", lambda self: best)
    assert bool(proposer._affordable()) == drawing


@pytest.mark.parametrize("late", [False, True])
def test_orders_are_drawn_before_the_first_plans_are_simulated(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = _hour(mixed_hosts())
    assert problem.order_matters
    if late:
        problem = replace(problem, until=time.perf_counter())
    known = Known(model=CostModel(problem.request.context))
    drawn: list[Priced] = []
    draw = Proposer._draw

    def watched(self: Proposer, *asked: Any) -> Steps[Priced]:
        assert not known.found
        drawn.append((yield from draw(self, *asked)))
        return drawn[-1]

    monkeypatch.setattr(Proposer, "_draw", watched)
    # There is no time for improving orders.
    monkeypatch.setattr(Proposer, "_climb", None)
    proposer = Proposer(problem, load_network(), SearchConfig(), known)
    with pytest.raises(TypeError):
        completed(proposer.steps())
    (orders,) = drawn
    assert len(orders) >= 4
    assert bool(known.found) != late
