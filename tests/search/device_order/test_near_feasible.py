"""Meshes that lack memory by closed forms and may fit once they are cut by it."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.cost import CostModel
from planner.schema.schedules import schedule_spec
from planner.search import Candidate, Request
from planner.search.device_order.groups import DeviceGroups
from planner.search.device_order.near_feasible import (
    NearFeasible,
    RecutMeshes,
    best_score,
    find_near_feasible,
    recut_near_feasible,
    roomiest,
)
from planner.search.device_order.pricer import open_order_pricer
from planner.search.device_order.screening import Screened, screen
from planner.search.device_order.subsets import Choices
from planner.search.moves import Solution
from planner.search.refine import ExactPricer
from planner.space import StrategyTable
from tests.cost.made import device, hosts
from tests.search.device_order.made import prepared

_Seen = tuple[Request, DeviceGroups, Choices, Screened]


def _short() -> Cluster:
    """A host short of memory and one that has a little more."""
    big = device("big", memory_bytes=2.5e9)
    return hosts((1, 4, device(memory_bytes=1.71e9)), (1, 4, big))


@pytest.fixture(scope="module")
def seen() -> _Seen:
    """First pass where closed forms find most long pipelines too large."""
    request, groups, choices = prepared(_short(), units=12, global_batch=48)
    every = np.arange(len(choices))
    model = CostModel(request.context)
    found = screen(request, model, groups, choices, every)
    missed = (found.excess_bytes > 0) & (found.unlimited < found.score.min())
    assert 2 < missed.sum() < len(every)
    return request, groups, choices, found


def _near_feasible(seen: _Seen) -> tuple[Request, list[NearFeasible]]:
    request, groups, choices, found = seen
    model = CostModel(request.context)
    return request, find_near_feasible(request, model, groups, choices, found)


def test_near_feasible_rows_have_the_least_products_of_time_and_lack(
    seen: _Seen,
) -> None:
    request, _groups, choices, found = seen
    _, near_feasible = _near_feasible(seen)
    best = found.score.min()
    promise = {
        tuple(choices.mesh[choice].tolist()): unlimited * lack
        for choice, unlimited, lack in zip(
            found.choice, found.unlimited, found.excess_bytes, strict=True
        )
        if lack > 0 and unlimited < best
    }
    first = [one for one in near_feasible if not one.spare]
    expected = sorted(promise.values())[: len(first)]
    met = [one.solution for one in first]
    assert [promise[one.mesh] for one in met] == pytest.approx(expected)
    assert len(first) == min(12, len(promise))
    # Spare rows come last; they lack less, and are no faster.
    assert near_feasible[: len(first)] == first
    for spare in near_feasible[len(first) :]:
        (one,) = (near for near in first if near.choice == spare.choice)
        assert spare.excess_bytes < one.excess_bytes
        assert spare.unlimited > one.unlimited
    for near, one in zip(first, met, strict=True):
        assert tuple(choices.mesh[near.choice].tolist()) == one.mesh
        model = CostModel(request.context.reordered(one.order))
        row = StrategyTable.from_columns(**{k: [v] for k, v in one.row.items()})
        costs = model.table(row)
        assert costs.excess_bytes[0] == pytest.approx(near.excess_bytes)
        assert costs.step_time_s[0] == pytest.approx(near.unlimited)
        assert near.excess_bytes > 0


def _by_mesh(
    request: Request, found: list[tuple[Solution, list[Candidate]]]
) -> dict[tuple[int, ...], float]:
    best: dict[tuple[int, ...], float] = {}
    for one, cuts in found:
        value = best_score(request, cuts)
        best[one.mesh] = min(value, best.get(one.mesh, np.inf))
    return best


def test_a_near_feasible_row_may_fit_once_it_is_cut_by_memory(seen: _Seen) -> None:
    request, near_feasible = _near_feasible(seen)
    exact = ExactPricer(request=request, model=CostModel(request.context))
    recut = recut_near_feasible(exact, near_feasible, None, 99)
    found = recut.found
    # A spare row is only cut where no row before it fitted.
    fitted = {one.mesh for one, cuts in found if np.isfinite(best_score(request, cuts))}
    asked = [
        near.solution.key
        for near in near_feasible
        if not (near.spare and near.solution.mesh in fitted)
    ]
    assert [one.key for one, _ in found if one.key in asked] == asked
    values = [best_score(request, cuts) for _, cuts in found]
    assert recut.best == min(values) < 0.9 * seen[-1].score.min()
    assert exact.model.evaluations["simulated"] == len(
        [cut for _, cuts in found for cut in cuts]
    )
    # The best mesh comes first.
    meshes = [tuple(seen[2].mesh[choice].tolist()) for choice in recut.choices]
    assert meshes[0] == found[values.index(recut.best)][0].mesh
    assert set(meshes) == set(recut.meshes.known)
    # Meshes are no slower than with the row that lacks least.
    fastest = _by_mesh(request, found)
    least = [replace(near, spare=False) for near in near_feasible if near.spare]
    others = recut_near_feasible(exact, least, None, 99)
    # What fitted well was tried as eager 1F1B right after.
    found = others.found
    values = [best_score(request, cuts) for _, cuts in found]
    slower = _by_mesh(request, found)
    both = [mesh for mesh, value in slower.items() if np.isfinite(value)]
    assert both
    assert all(fastest[mesh] <= slower[mesh] for mesh in both)
    eager = schedule_spec("Eager1F1B").code
    first = next(place for place, value in enumerate(values) if np.isfinite(value))
    after = found[first + 1][0].row
    assert after["virtual_stages"] == 1
    assert {**found[first][0].row, "schedule": eager} == after


def test_a_mesh_that_fitted_is_opened_with_rows_that_lack_no_more(seen: _Seen) -> None:
    request, groups, choices, _ = seen
    exact = ExactPricer(request=request, model=CostModel(request.context))
    recut = recut_near_feasible(exact, _near_feasible(seen)[1], None, 99)
    chosen = np.array(recut.choices[:1])
    asked = (request, choices, groups, chosen)
    assert open_order_pricer(*asked) is None
    pricer = open_order_pricer(*asked, recut=recut.meshes)
    assert pricer is not None
    layouts = pricer.layouts
    lacked, ratio = recut.meshes.known[tuple(choices.mesh[chosen[0]].tolist())]
    ids = groups.orders(layouts.sequence[:1], layouts.count[:1])
    none = np.zeros(len(layouts.rows), dtype=np.int64)
    costs = CostModel(request.context).table_in_orders(layouts.rows, ids, none)
    assert 0 < costs.excess_bytes.max() <= lacked
    score = pricer.price(np.array([0]), layouts.sequence[:1]).score[0]
    fits = costs.excess_bytes <= lacked
    assert score == pytest.approx(costs.step_time_s[fits].min() * ratio)
    # Of several rows that fitted, the most that was lacked and the best ratio count.
    known = RecutMeshes()
    known.learn((2,), 3.0, 1.0, 2.0)
    known.learn((2,), 2.0, 1.0, 1.5)
    assert known.known == {(2,): (3.0, 1.5)}


def test_the_fastest_that_fit_come_before_those_with_much_room(
    seen: _Seen,
) -> None:
    request, groups, choices, found = seen
    model = CostModel(request.context)
    rows = list(roomiest(request, model, groups, choices, found))
    fast, few = rows[:2], rows[2:]
    best = np.argsort(found.score)[:2]
    assert [one.choice for one in fast] == found.choice[best].tolist()
    assert all(one.excess_bytes <= 0 for one in fast)
    assert [one.unlimited for one in fast] == pytest.approx(found.score[best])
    assert len(few) == 12
    at = [int(np.flatnonzero(found.choice == one.choice)[0]) for one in few]
    # Of a mesh's rows under all plain orders, so at least as much as was glanced at.
    lacks = found.excess_bytes[at]
    assert all(
        one.excess_bytes <= lack + 1 for one, lack in zip(few, lacks, strict=True)
    )
    # Those with at least half of the most room come first, the fastest before others.
    ample = lacks <= 0.5 * found.excess_bytes.min()
    assert ample.tolist() == sorted(ample, reverse=True)
    assert (np.diff(found.least[at][ample]) >= 0).all()
    assert (np.diff(lacks[~ample]) >= 0).all()
    most = found.excess_bytes <= 0.5 * found.excess_bytes.min()
    assert ample.sum() == min(12, most.sum()) > 0
    exact = ExactPricer(request=request, model=model)
    for first in fast[0].solution, few[0].solution:
        cuts = exact.candidates(first.row, first.order)
        assert np.isfinite(best_score(request, cuts))


def test_time_and_simulations_are_kept_to(seen: _Seen) -> None:
    request, near_feasible = _near_feasible(seen)
    exact = ExactPricer(request=request, model=CostModel(request.context))
    past = time.perf_counter() - 1
    assert len(recut_near_feasible(exact, near_feasible, past, 99).found) == 1
    assert len(recut_near_feasible(exact, near_feasible, None, 2).found) == 2
    for nothing in (near_feasible, None, 0), ([], None, 5):
        recut = recut_near_feasible(exact, *nothing)
        assert recut.found == recut.choices == []
        assert np.isinf(recut.best)


def test_pins_hold_in_what_is_tried_besides() -> None:
    pins = {"schedule": schedule_spec("1F1B").code}
    pinned, groups, choices = prepared(_short(), units=12, global_batch=48, pins=pins)
    model = CostModel(pinned.context)
    found = screen(pinned, model, groups, choices, np.arange(len(choices)))
    near_feasible = find_near_feasible(pinned, model, groups, choices, found)
    recut = recut_near_feasible(
        ExactPricer(request=pinned, model=model), near_feasible, None, 99
    )
    first = [near for near in near_feasible if not near.spare]
    assert len(recut.found) >= len(first) > 0
