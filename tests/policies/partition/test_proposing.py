"""Steps after the network's proposals: neighbours, and plans with memory to spare."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from planner.cost import CostModel
from planner.schema.schedules import schedule_spec
from planner.search import Request
from planner.search.device_order.near_feasible import best_score
from planner.search.moves import Solution
from planner.search.refine import ExactPricer
from planner.search.steps import completed
from planner.space import enumerate_strategies, legal
from planner.space.table import StrategyTable
from policies.partition.partitioner import LearnedPartitioner
from policies.partition.proposing import Known, Proposer, SearchConfig, polish
from tests.cost.made import device, hosts
from tests.search.device_order.made import prepared

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
