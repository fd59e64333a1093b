"""Guarantees of partitioners, on models and clusters that people have."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from planner import plan
from planner.cluster import Cluster
from planner.cost import CostModel
from planner.errors import MeshwrightError, UnknownNameError
from planner.schema import Strategy
from planner.schema.cluster import Link
from planner.schema.schedules import schedule_spec
from planner.schema.violations import executor_violations
from planner.search import (
    OBJECTIVES,
    Objective,
    Partitioner,
    Request,
    SearchResult,
    base,
    get_partitioner,
    partitioner_names,
    score,
)
from planner.search.orders import device_orders
from planner.space import (
    RECOMPUTE_NAMES,
    build_strategy,
    enumerate_strategies,
    legal,
)
from planner.space.table import StrategyTable
from tests.cost.made import device, hosts, real_graph, request_for, uniform_graph

BUILT_IN = ("exhaustive", "expert", "random")
LINK = Link(bandwidth_bytes_per_s=2.5e10, latency_s=1e-5)


def mixed() -> Cluster:
    fast, slow = Cluster.parse("dgx-h100"), Cluster.parse("dgx-a100")
    return Cluster.mixed(fast, slow, level=LINK)


def best(request: Request) -> float:
    return best_of(get_partitioner("exhaustive").search(request), request)


def every_strategy(request: Request) -> Iterator[Strategy]:
    """Every row with every cut and the row's recomputation everywhere."""
    context = request.context
    names = context.graph.unit_names
    for table in enumerate_strategies(request.facts, pins=request.pins):
        for values in table.rows():
            stages = values["pp"] * values["virtual_stages"]
            for cut in itertools.combinations(range(1, len(names)), stages - 1):
                yield build_strategy(
                    values,
                    unit_names=names,
                    bounds=(0, *cut, len(names)),
                    recompute=(RECOMPUTE_NAMES[values["recompute"]],) * stages,
                    sharding=context.graph.sharding,
                )


@pytest.mark.parametrize("cluster", ["roomy", "tight", "slow network"])
def test_exhaustive_is_as_good_as_trying_everything(cluster: str) -> None:
    kind = device(memory_bytes=1.7e9 if cluster == "tight" else 80e9)
    machines = hosts((4, 1, kind), between=1e9 if cluster == "slow network" else 1e11)
    request = request_for(uniform_graph(5), machines, 8)
    model = CostModel(request.context)
    costs = [model.cost(strategy) for strategy in every_strategy(request)]
    fitting = [cost.step_time_s for cost in costs if cost.fits]
    assert fitting
    if cluster == "tight":
        assert len(fitting) < len(costs)
    assert best(request) <= min(fitting) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("model", "cluster", "objective"),
    [
        ("gpt2", "rtx4090-pc:4", "throughput"),
        ("llama3-8b", "dgx-h100:2", "throughput"),
        ("llama3-8b", "dgx-h100:2", "throughput_per_device"),
        ("llama3-8b", "dgx-h100:2", "memory"),
        ("llama3-8b", "mixed", "throughput"),
        ("mixtral-8x7b", "dgx-h100:4", "throughput"),
    ],
)
def test_exhaustive_is_never_worse_than_expert_or_random(
    model: str, cluster: str, objective: Objective
) -> None:
    machines = mixed() if cluster == "mixed" else Cluster.parse(cluster)
    request = request_for(real_graph(model), machines, 32, objective=objective, seed=3)
    exhaustive = get_partitioner("exhaustive").search(request)
    for name in ("expert", "random"):
        other = get_partitioner(name).search(replace(request, evaluation_budget=24))
        for candidate in other.candidates[:1]:
            devices = candidate.strategy.mesh.num_devices
            value = score(candidate.cost, devices, objective)
            assert best_of(exhaustive, request) <= value * (1 + 1e-9), name
    for candidate in exhaustive.candidates:
        assert candidate.cost.fits
        tied = request.facts.tied
        assert executor_violations(candidate.strategy, tied=tied, backend="nccl") == ()


def best_of(result: SearchResult, request: Request) -> float:
    found = result.candidates[0]
    return score(found.cost, found.strategy.mesh.num_devices, request.objective)


@pytest.mark.parametrize("name", BUILT_IN)
def test_results_are_sorted_legal_and_counted(name: str) -> None:
    request = request_for(uniform_graph(8), hosts((2, 4, device())), 16)
    result = get_partitioner(name).search(request)
    assert result.partitioner == name
    scores = [c.cost.step_time_s for c in result.candidates]
    assert scores
    assert scores == sorted(scores)
    assert result.evaluations["simulated"] >= len(scores)
    assert result.nearest is None
    table = StrategyTable.from_strategies([c.strategy for c in result.candidates])
    assert legal(table, request.facts).all()


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_same_request_gives_the_same_answer(name: str) -> None:
    request = request_for(uniform_graph(8), hosts((2, 4, device())), 16, seed=7)
    first, second = (get_partitioner(name).search(request) for _ in range(2))
    assert [c.strategy for c in first.candidates] == [
        c.strategy for c in second.candidates
    ]
    assert first.evaluations == second.evaluations


def test_random_draws_depend_on_the_seed() -> None:
    request = request_for(
        uniform_graph(8), hosts((2, 4, device())), 64, evaluation_budget=8
    )
    drawn = [
        {c.strategy.label() for c in get_partitioner("random").search(r).candidates}
        for r in (request, replace(request, seed=1))
    ]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("budget", [1, 2, 5])
@pytest.mark.parametrize("machines", ["uniform", "mixed"])
def test_the_evaluation_budget_is_kept(name: str, budget: int, machines: str) -> None:
    slow = device("slow", peak_flops_per_s={"bfloat16": 2e13})
    cluster = hosts((1, 4, device()), (1, 4, slow if machines == "mixed" else device()))
    request = request_for(uniform_graph(8), cluster, 16, evaluation_budget=budget)
    result = get_partitioner(name).search(request)
    assert 1 <= result.evaluations["simulated"] <= budget


@pytest.mark.parametrize("name", BUILT_IN)
def test_occupied_devices_are_left_alone(name: str) -> None:
    cluster = Cluster.parse("dgx-h100:2").with_occupied([0, 3, 9])
    request = request_for(uniform_graph(26), cluster, 8 * 13)
    for candidate in get_partitioner(name).search(request).candidates:
        ids = candidate.strategy.device_ids()
        assert len(ids) == candidate.strategy.mesh.num_devices
        assert set(ids) <= set(cluster.free.tolist())
        assert len(set(ids)) == len(ids)


def test_faster_devices_get_more_units() -> None:
    pins = {"pp": 2, "schedule": schedule_spec("1F1B").code}
    request = request_for(real_graph("llama3-8b"), mixed(), 32, pins=pins)
    found = get_partitioner("exhaustive").search(request).candidates[0]
    types = request.context.cluster.type_index
    speed = [
        max(d.peak_flops_per_s.values()) for d in request.context.cluster.device_types
    ]
    ids = found.strategy.device_ids()
    half = len(ids) // 2
    if half * 2 < 16:
        pytest.fail(f"one type alone was chosen: {found.strategy.label()}")
    first, second = (speed[types[ids[i]]] for i in (0, half))
    sizes = [len(stage.modules) for stage in found.strategy.stages]
    assert first != second
    assert (sizes[0] > sizes[1]) == (first > second)


def test_objectives_trade_time_devices_and_memory() -> None:
    request = request_for(
        real_graph("gpt2"), Cluster.parse("dgx-h100"), 8, devices="any"
    )
    chosen = {
        o: get_partitioner("exhaustive").search(replace(request, objective=o))
        for o in OBJECTIVES
    }
    costs = {o: r.candidates[0] for o, r in chosen.items()}
    for objective, candidate in costs.items():
        mine = score(candidate.cost, candidate.strategy.mesh.num_devices, objective)
        for other in costs.values():
            devices = other.strategy.mesh.num_devices
            assert mine <= score(other.cost, devices, objective) * (1 + 1e-9)
    cheapest = costs["throughput_per_device"].strategy.mesh.num_devices
    assert cheapest < costs["throughput"].strategy.mesh.num_devices


def test_a_batch_that_all_devices_do_not_divide_uses_fewer() -> None:
    graph = replace(uniform_graph(1), sharding={})
    request = request_for(graph, hosts((2, 4, device())), 7)
    orders = device_orders(request)
    assert [len(order) for order in orders] == [7]
    found = get_partitioner("exhaustive").search(request).candidates[0]
    assert found.strategy.mesh.data_parallel == 7


def test_sequences_are_divided_over_devices_that_batch_and_layers_do_not_fill() -> None:
    graph = replace(uniform_graph(3), sharding={}, attention="causal")
    request = request_for(graph, hosts((1, 13, device())), 7)
    # 3 stages x cp 4; 7 replicas, or 3 stages alone, fill fewer.
    assert [len(order) for order in device_orders(request)] == [12]


def test_a_prime_batch_on_a_large_cluster_is_answered_at_once() -> None:
    graph = replace(uniform_graph(3), tp_dims={"heads": 4})
    request = request_for(graph, Cluster.parse("dgx-h100:512"), 11)
    # 3 stages x tp 4 x 11 replicas.
    assert [len(order) for order in device_orders(request)] == [132]


def test_device_orders_are_permutations_of_free_devices() -> None:
    cluster = mixed().with_occupied([2, 12])
    request = request_for(uniform_graph(8), cluster, 16)
    orders = device_orders(request)
    assert len({tuple(o.tolist()) for o in orders}) == len(orders) > 1
    for order in orders:
        assert set(order.tolist()) <= set(cluster.free.tolist())
        assert len(np.unique(order)) == len(order)


def test_the_registry_knows_the_built_in_ones() -> None:
    assert set(BUILT_IN) <= set(partitioner_names())
    for name in BUILT_IN:
        made = get_partitioner(name)
        assert isinstance(made, Partitioner)
        assert made.name == name


def test_an_unknown_partitioner_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'exhaustive'"):
        get_partitioner("exhaustiv")


class _Point:
    """An entry point that loads what a test says."""

    value = "elsewhere:Thing"

    def __init__(self, made: object) -> None:
        self._made = made

    def load(self) -> object:
        if isinstance(self._made, ImportError):
            raise self._made
        return lambda: self._made


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (ImportError("no pymetis", name="pymetis"), "'pymetis'.*install it"),
        (object(), "has no search"),
    ],
)
def test_a_partitioner_that_cannot_be_used_says_why(
    made: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_registered", lambda: {"theirs": _Point(made)})
    with pytest.raises(MeshwrightError, match=words):
        get_partitioner("theirs")


_FRESH = """
import hashlib
from planner import plan
from tests.cost.made import device, hosts, uniform_graph
made = plan(uniform_graph(8), hosts((2, 4, device())), global_batch=16, seed=5)
print(hashlib.sha256(made.canonical_bytes()).hexdigest())
"""


def test_a_fresh_process_writes_the_same_bytes() -> None:
    import hashlib

    request = (uniform_graph(8), hosts((2, 4, device())))
    here = [plan(*request, global_batch=16, seed=5).canonical_bytes() for _ in range(2)]
    assert here[0] == here[1]
    ended = subprocess.run(
        [sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == hashlib.sha256(here[0]).hexdigest()
