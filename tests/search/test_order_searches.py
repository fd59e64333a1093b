"""Guarantees of evolution, annealing and beam search over orders and rows."""

from __future__ import annotations

import itertools
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.cost import CostModel
from planner.schema.schedules import schedule_spec
from planner.search import (
    OBJECTIVES,
    Objective,
    Partitioner,
    Request,
    SearchResult,
    get_partitioner,
    score,
)
from planner.search.anneal import AnnealPartitioner
from planner.search.base import Candidate
from planner.search.beam import BeamPartitioner
from planner.search.evolutionary import EvolutionaryPartitioner
from planner.search.refine import candidates_of_row
from planner.space import RECOMPUTE_NAMES, StrategyTable, enumerate_strategies, legal
from tests.cost.made import device, hosts, request_for, uniform_graph
from tests.search.made import CLUSTERS, matrix, request_on

SEARCHES = (AnnealPartitioner, BeamPartitioner, EvolutionaryPartitioner)

each_search = pytest.mark.parametrize("search", SEARCHES, ids=lambda kind: kind.name)


def value(candidate: Candidate, request: Request) -> float:
    devices = candidate.strategy.mesh.num_devices
    return score(candidate.cost, devices, request.objective)


def best(result: SearchResult, request: Request) -> float:
    return value(result.candidates[0], request)


def everything(request: Request) -> Iterator[Candidate]:
    """Every row under every order of devices, cut exactly."""
    for order in itertools.permutations(request.context.order.tolist()):
        model = CostModel(request.context.reordered(np.array(order)))
        for table in enumerate_strategies(request.facts, pins=request.pins):
            for row in table.rows():
                yield from candidates_of_row(model, row)


@each_search
def test_the_best_of_all_orders_and_rows_is_found(search: type[Partitioner]) -> None:
    pins = {"tp": 1, "zero_stage": 0, "recompute": 0, "microbatch_size": 1}
    cluster = matrix([2, 1, 1], seed=1, slow=(1, 2))
    request = request_for(uniform_graph(5), cluster, 4, pins=pins)
    bound = min(
        value(candidate, request)
        for candidate in everything(request)
        if candidate.cost.fits
    )
    found = search().search(replace(request, evaluation_budget=100))
    assert best(found, request) <= bound * (1 + 1e-9)


@each_search
@pytest.mark.parametrize(
    ("name", "objective"),
    [
        *((name, "throughput") for name in CLUSTERS),
        *(("mixed matrix", objective) for objective in OBJECTIVES[1:]),
    ],
)
def test_answers_are_legal_sorted_and_not_worse_than_rules_of_thumb(
    search: type[Partitioner], name: str, objective: Objective
) -> None:
    request = request_on(name, objective=objective, evaluation_budget=16)
    found = search().search(request)
    assert found.partitioner == search.name
    assert found.nearest is None
    values = [value(candidate, request) for candidate in found.candidates]
    assert values == pytest.approx(sorted(values), rel=1e-9)
    table = StrategyTable.from_strategies([c.strategy for c in found.candidates])
    assert legal(table, request.facts).all()
    free = set(request.context.cluster.free.tolist())
    for candidate in found.candidates:
        ids = candidate.strategy.device_ids()
        assert len(set(ids)) == len(ids) == candidate.strategy.mesh.num_devices
        assert set(ids) <= free
        assert candidate.cost.fits
    assert 1 <= found.evaluations["simulated"] <= 16
    expert = get_partitioner("expert").search(request)
    assert values[0] <= best(expert, request) * (1 + 1e-9)


@each_search
@pytest.mark.parametrize("name", ["uniform", "mixed matrix"])
def test_the_same_request_gives_the_same_answer(
    search: type[Partitioner], name: str
) -> None:
    request = request_on(name, seed=3, evaluation_budget=30)
    first, second = (search().search(request) for _ in range(2))
    assert [c.strategy for c in first.candidates] == [
        c.strategy for c in second.candidates
    ]
    assert first.evaluations == second.evaluations


@each_search
def test_where_links_differ_an_order_is_found_that_others_do_not_try(
    search: type[Partitioner],
) -> None:
    request = request_for(uniform_graph(8), matrix([4, 4], seed=3), 32)
    exhaustive = get_partitioner("exhaustive").search(request)
    found = search().search(request)
    assert best(found, request) < 0.9 * best(exhaustive, request)


@each_search
@pytest.mark.parametrize(
    ("name", "budget"),
    [("uniform", 1), ("mixed", 2), ("occupied", 3), ("matrix", 1), ("one device", 1)],
)
def test_a_budget_of_few_evaluations_is_kept(
    search: type[Partitioner], name: str, budget: int
) -> None:
    found = search().search(request_on(name, evaluation_budget=budget))
    assert found.candidates
    assert 1 <= found.evaluations["simulated"] <= budget


@each_search
def test_a_model_of_one_unit(search: type[Partitioner]) -> None:
    found = search().search(request_on("mixed matrix", units=1, evaluation_budget=12))
    assert {c.strategy.mesh.pp for c in found.candidates} == {1}


@each_search
@pytest.mark.parametrize("seconds", [1e-6, 0.3])
def test_time_ends_the_search_but_not_before_an_answer(
    search: type[Partitioner], seconds: float
) -> None:
    request = request_on("mixed matrix")
    started = time.perf_counter()
    found = search().search(replace(request, time_budget_s=seconds))
    spent = time.perf_counter() - started
    assert found.candidates
    # No figure of speed: an unending search would take hours.
    assert spent < seconds + 30
    assert found.seconds <= spent


@each_search
def test_all_devices_or_all_of_one_type_are_used(search: type[Partitioner]) -> None:
    request = request_on("mixed", evaluation_budget=60)
    kinds = request.context.cluster.type_index
    for candidate in search().search(request).candidates:
        ids = list(candidate.strategy.device_ids())
        assert len(ids) == 8 or {len(ids), len(set(kinds[ids].tolist()))} == {4, 1}


@each_search
def test_with_any_devices_fewer_may_win(search: type[Partitioner]) -> None:
    request = request_on(
        "uneven",
        objective="throughput_per_device",
        devices="any",
        evaluation_budget=60,
    )
    found = search().search(request)
    assert found.candidates[0].strategy.mesh.num_devices < 9
    exhaustive = get_partitioner("exhaustive").search(
        replace(request, evaluation_budget=None)
    )
    assert best(found, request) <= best(exhaustive, request) * (1 + 1e-6)


@each_search
def test_pins_are_kept(search: type[Partitioner]) -> None:
    pins = {
        "pp": 3,
        "schedule": schedule_spec("1F1B").code,
        "recompute": RECOMPUTE_NAMES.index("selective"),
        "microbatch_size": 2,
    }
    request = request_on("uneven", pins=pins, evaluation_budget=30)
    found = search().search(request).candidates
    assert found
    for candidate in found:
        strategy = candidate.strategy
        assert strategy.mesh.pp == 3
        assert strategy.schedule == "1F1B"
        assert strategy.microbatch_size == 2
        assert {stage.recompute for stage in strategy.stages} == {"selective"}


@each_search
def test_what_cannot_fit_is_said(search: type[Partitioner]) -> None:
    tiny = hosts((2, 2, device(memory_bytes=1e6)))
    found = search().search(request_for(uniform_graph(4), tiny, 8, evaluation_budget=8))
    assert found.candidates == ()
    assert found.nearest is not None


@each_search
def test_nothing_legal_is_no_answer(search: type[Partitioner]) -> None:
    request = request_on("uniform", pins={"pp": 10}, evaluation_budget=4)
    found = search().search(request)
    assert found.candidates == ()
    assert found.nearest is None


def test_they_are_registered() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    points = tomllib.loads(project.read_text())["project"]["entry-points"]
    registered = points["meshwright.partitioners"]
    for search in SEARCHES:
        target = f"{search.__module__}:{search.__name__}"
        assert registered[search.name] == target
        assert isinstance(search(), Partitioner)
