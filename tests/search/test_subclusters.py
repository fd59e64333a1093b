"""Plans for many parts of a cluster at once."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from planner.cost import CostModel
from planner.cost.pipelines.flushed import has_textbook_time
from planner.errors import StrategyError
from planner.schema.schedules import schedule_spec
from planner.search import Request, get_partitioner
from planner.search.base import scores_of
from planner.search.refine import ExactPricer
from planner.search.subclusters import PricedSolution, plan_subclusters
from planner.space import StrategyTable, check, enumerate_strategies, legal
from planner.space.pins import normalize_pins
from tests.cost.made import device, hosts, real_graph, request_for, uniform_graph

#: One device to all of four hosts of four, packed and spread.
PARTS = [
    [5],
    [0, 1, 2, 3],
    [0, 4, 8, 12],
    [0, 1, 4, 5],
    list(range(8)),
    list(range(16)),
]


def _request(**changes: object) -> Request:
    cluster = hosts((4, 4, device(memory_bytes=8e9)), between=2e9, latency=1e-5)
    return request_for(real_graph("gpt2"), cluster, 64, **changes)


def _simulated(request: Request, one: PricedSolution) -> float:
    """Seconds of a step of a plan by the simulator."""
    exact = ExactPricer(request=request, model=CostModel(request.context))
    cut = exact.candidates(one.solution.row, one.solution.order, cuts=1)
    return min(candidate.cost.step_time_s for candidate in cut if candidate.cost.fits)


def test_plans_are_within_3_percent_of_an_exhaustive_search_of_each_part() -> None:
    request = _request()
    found = plan_subclusters(request, PARTS)
    for part, one in zip(PARTS, found, strict=True):
        assert one is not None
        assert one.solution.order.tolist() == part
        context = replace(request.context, order=np.array(part))
        alone = Request(context=context, global_batch=64, evaluation_budget=12)
        best = min(
            candidate.cost.step_time_s
            for candidate in get_partitioner("exhaustive").search(alone).candidates
            if candidate.strategy.mesh.num_devices == len(part)
        )
        assert _simulated(request, one) <= 1.03 * best


def test_a_part_has_the_price_that_it_has_alone() -> None:
    request = _request()
    together = plan_subclusters(request, PARTS)
    for part, one in zip(PARTS, together, strict=True):
        (alone,) = plan_subclusters(request, [part])
        assert alone is not None
        assert one is not None
        assert alone.solution.key == one.solution.key
        assert alone.step_time_s == pytest.approx(one.step_time_s)
        assert alone.score == one.score == pytest.approx(one.step_time_s)


def test_plans_are_legal_and_have_the_simulator_s_price() -> None:
    request = _request()
    for one in plan_subclusters(request, PARTS):
        assert one is not None
        row = StrategyTable.from_columns(**one.solution.row)
        assert legal(row, request.facts).all()
        exact = ExactPricer(request=request, model=CostModel(request.context))
        made = exact.candidates(one.solution.row, one.solution.order, cuts=2)
        for candidate in made:
            check(candidate.strategy, request.facts)
        assert list(made[0].strategy.device_ids()) == one.solution.order.tolist()
        best = min(c.cost.step_time_s for c in made if c.cost.fits)
        if one.solution.row["pp"] == 1:
            assert best == pytest.approx(one.step_time_s)
            assert made[0].cost.peak_memory_bytes == pytest.approx(one.memory_bytes)
        else:
            assert 0.9 * one.step_time_s <= best <= 1.03 * one.step_time_s


@pytest.mark.parametrize("memory_bytes", [3e9, 4e9, 8e9])
def test_no_row_of_any_mesh_is_faster(memory_bytes: float) -> None:
    cluster = hosts(
        (2, 4, device(memory_bytes=memory_bytes)), between=2e9, latency=1e-5
    )
    request = request_for(real_graph("gpt2"), cluster, 64)
    parts = [[1], [0, 1], [0, 4], [0, 1, 4, 5], list(range(8))]
    found = plan_subclusters(request, parts)
    fits = 0
    for part, one in zip(parts, found, strict=True):
        model = CostModel(request.context.reordered(np.array(part)))
        best = np.inf
        for table in enumerate_strategies(request.facts, num_devices=len(part)):
            rows = table[np.flatnonzero(has_textbook_time(table))]
            score = scores_of(model.table(rows), rows, request.objective)
            best = min(best, score.min(initial=np.inf))
        assert (one is None) == np.isinf(best)
        if one is not None:
            assert one.score == pytest.approx(best)
            fits += 1
    assert fits >= 2


def test_parts_that_see_the_same_links_have_the_same_plan() -> None:
    request = _request()
    first, other, apart = plan_subclusters(
        request, [[0, 1, 4, 5], [14, 15, 2, 3], [0, 1, 2, 4]]
    )
    assert first is not None
    assert other is not None
    assert apart is not None
    assert other.solution.order.tolist() == [14, 15, 2, 3]
    assert other.solution.row == first.solution.row
    assert other.step_time_s == first.step_time_s
    (alone,) = plan_subclusters(_request(), [[14, 15, 2, 3]])
    assert alone is not None
    assert alone.step_time_s == pytest.approx(other.step_time_s)
    assert apart.step_time_s != first.step_time_s


def test_parts_of_other_devices_have_other_plans() -> None:
    slow = device(
        "slow", memory_bytes=8e9, peak_flops_per_s={"bfloat16": 4e13, "float32": 2e13}
    )
    cluster = hosts((1, 4, device(memory_bytes=8e9)), (1, 4, slow))
    request = request_for(real_graph("gpt2"), cluster, 64)
    fast, late = plan_subclusters(request, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert fast is not None
    assert late is not None
    assert late.step_time_s > 1.3 * fast.step_time_s


def test_a_second_call_gives_the_same_plans() -> None:
    request = _request()
    first, second = (plan_subclusters(request, PARTS) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one is not None
        assert other is not None
        assert one.solution.key == other.solution.key


def test_links_of_the_part_count() -> None:
    packed, spread = plan_subclusters(_request(), PARTS[1:3])
    assert packed is not None
    assert spread is not None
    assert packed.step_time_s < spread.step_time_s


def test_pins_hold_in_every_plan() -> None:
    pins = normalize_pins({"pp": 2, "schedule": "1F1B"})
    found = plan_subclusters(_request(pins=pins), PARTS)
    assert found[0] is None  # One device has no two stages.
    for one in found[1:]:
        assert one is not None
        assert one.solution.row["pp"] == 2
        assert one.solution.row["schedule"] == schedule_spec("1F1B").code


def test_parts_without_memory_or_rows_have_no_plan() -> None:
    small = hosts((1, 2, device(memory_bytes=1e8)))
    request = request_for(real_graph("gpt2"), small, 8)
    assert plan_subclusters(request, [[0], [0, 1]]) == [None, None]
    # Two samples and two units do not divide among seven.
    odd = request_for(uniform_graph(2), hosts((1, 7, device())), 2)
    assert plan_subclusters(odd, [list(range(7))]) == [None]
    assert plan_subclusters(odd, []) == []


@pytest.mark.parametrize("part", [[], [0, 0], [-1], [16]])
def test_parts_that_are_none_are_refused(part: list[int]) -> None:
    message = f"part {part} of a cluster of 16 devices; give at least one device"
    with pytest.raises(StrategyError, match=re.escape(message)):
        plan_subclusters(_request(), [[1], part])
