"""Meshes that lack memory by closed forms and may fit once they are cut by it."""

from __future__ import annotations

import time

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.cost import CostModel
from planner.schema import SCHEDULES
from planner.search import Request
from planner.search.arranging.fleets import Choices
from planner.search.arranging.groups import DeviceGroups
from planner.search.arranging.misses import (
    best_score,
    nearest_misses,
    settle_misses,
)
from planner.search.arranging.screening import Screened, screen
from planner.search.arranging.settling import Settler
from planner.search.moves import Solution
from planner.space import StrategyTable
from tests.cost.made import device, hosts
from tests.search.arranging.made import arranged

_Seen = tuple[Request, DeviceGroups, Choices, Screened]


def _short() -> Cluster:
    """A host short of memory and one that has a little more."""
    big = device("big", memory_bytes=2.5e9)
    return hosts((1, 4, device(memory_bytes=1.72e9)), (1, 4, big))


@pytest.fixture(scope="module")
def seen() -> _Seen:
    """What a glance finds where most long pipelines are too large by closed forms."""
    request, groups, choices = arranged(_short(), units=12, global_batch=48)
    every = np.arange(len(choices))
    model = CostModel(request.setting)
    found = screen(request, model, groups, choices, every)
    missed = (found.excess_bytes > 0) & (found.hope < found.score.min())
    assert 2 < missed.sum() < len(every)
    return request, groups, choices, found


def _misses(seen: _Seen) -> tuple[Request, list[Solution]]:
    request, groups, choices, found = seen
    model = CostModel(request.setting)
    return request, nearest_misses(request, model, groups, choices, found)


def test_misses_are_the_least_products_of_time_and_lack(seen: _Seen) -> None:
    request, _groups, choices, found = seen
    _, misses = _misses(seen)
    best = found.score.min()
    promise = {
        tuple(choices.mesh[choice].tolist()): hope * lack
        for choice, hope, lack in zip(
            found.choice, found.hope, found.excess_bytes, strict=True
        )
        if lack > 0 and hope < best
    }
    expected = sorted(promise.values())[: len(misses)]
    assert [promise[one.mesh] for one in misses] == pytest.approx(expected)
    assert len(misses) == min(12, len(promise))
    for one in misses:
        model = CostModel(request.setting.reordered(one.order))
        row = StrategyTable.from_columns(**{k: [v] for k, v in one.row.items()})
        assert model.table(row).excess_bytes[0] > 0


def test_a_miss_may_fit_once_it_is_cut_by_memory(seen: _Seen) -> None:
    request, misses = _misses(seen)
    settler = Settler(request=request, model=CostModel(request.setting))
    found = settle_misses(settler, misses, None, 99)
    asked = [one.key for one in misses]
    assert [one.key for one, _ in found if one.key in asked] == asked
    values = [best_score(request, cuts) for _, cuts in found]
    assert min(values) < 0.9 * seen[-1].score.min()
    assert settler.model.evaluations["simulated"] == len(
        [cut for _, cuts in found for cut in cuts]
    )
    # What fitted well was tried as eager 1F1B right after.
    eager = SCHEDULES.index("Interleaved1F1B")
    first = next(place for place, value in enumerate(values) if np.isfinite(value))
    after = found[first + 1][0].row
    assert after["virtual_stages"] == 1
    assert {**found[first][0].row, "schedule": eager} == after


def test_time_and_simulations_are_kept_to(seen: _Seen) -> None:
    request, misses = _misses(seen)
    settler = Settler(request=request, model=CostModel(request.setting))
    assert len(settle_misses(settler, misses, time.perf_counter() - 1, 99)) == 1
    assert len(settle_misses(settler, misses, None, 2)) == 2
    assert settle_misses(settler, misses, None, 0) == []
    assert settle_misses(settler, [], None, 5) == []


def test_pins_hold_in_what_is_tried_besides() -> None:
    pins = {"schedule": SCHEDULES.index("1F1B")}
    pinned, groups, choices = arranged(_short(), units=12, global_batch=48, pins=pins)
    model = CostModel(pinned.setting)
    found = screen(pinned, model, groups, choices, np.arange(len(choices)))
    misses = nearest_misses(pinned, model, groups, choices, found)
    settled = settle_misses(Settler(request=pinned, model=model), misses, None, 99)
    assert len(settled) == len(misses) > 0
