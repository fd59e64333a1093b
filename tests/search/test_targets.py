"""Plans inside a launcher's limits: every partitioner, every launcher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from planner import plan
from planner.cluster import Cluster
from planner.errors import NoFeasiblePlanError, UnknownNameError
from planner.export.registry import export_files, require_expressible
from planner.export.torchrun import case_of
from planner.schema import Plan
from planner.schema.cluster import Link
from planner.schema.strategy_parts import ContextAlgorithm
from planner.search import Request, get_partitioner, partitioner_names
from planner.search.orders import device_orders
from planner.space import build_strategy, enumerate_strategies
from planner.space.target import target_violated
from planner.targets import Case, get_target, may_be_even, target_names
from tests.cost.made import device, hosts, real_graph, request_for
from tests.plans import gpt2_graph, tiny_graph
from tests.search.launchers import LAUNCHERS, installed
from tests.search.made import cluster_of

#: Launchers that can express some plan.
EXPRESSIVE = tuple(sorted(set(LAUNCHERS) - {"mute", "bare"}))
SHIPPED = ("json", "torchrun")
BUDGET = 4
#: Clusters on which each launcher is tried: its limits differ on them.
CLUSTERS = {
    "even": ("uniform",),
    "whole": ("mixed", "uneven", "occupied"),
    "flat": ("uniform", "occupied"),
    "narrow": ("uniform",),
    "gpipe": ("matrix",),
    "json": ("matrix",),
    "torchrun": ("matrix",),
}


@pytest.fixture(autouse=True)
def _launchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with installed(monkeypatch):
        yield


def _request(cluster: str, target: str, **pins: int) -> Request:
    return request_for(
        tiny_graph(),
        cluster_of(cluster),
        24,
        target=target,
        pins=pins,
        evaluation_budget=BUDGET,
    )


def _said(request: Request, candidate: object) -> bool:
    """Asked of the target, not of what the search makes of it."""
    facts = request.facts
    case = Case(
        strategy=candidate.strategy,  # type: ignore[attr-defined]
        hosts=request.context.cluster.reference().hosts,
        tied=facts.tied,
        backend=facts.backend,
        attention=facts.attention,
        device_types=facts.device_types,
    )
    return not get_target(request.target).violations(case)


@pytest.mark.parametrize("name", partitioner_names())
@pytest.mark.parametrize("target", [*EXPRESSIVE, *SHIPPED])
def test_all_that_a_partitioner_returns_can_be_said(name: str, target: str) -> None:
    for cluster in CLUSTERS[target]:
        request = _request(cluster, target)
        found = get_partitioner(name).search(request)
        assert all(_said(request, c) for c in found.candidates)
        assert found.candidates, cluster


@pytest.mark.parametrize("name", partitioner_names())
def test_pipelines_are_cut_into_equally_many_layers(name: str) -> None:
    request = _request("uniform", "even", pp=4)
    found = get_partitioner(name).search(request)
    assert found.candidates
    for candidate in found.candidates:
        assert may_be_even(candidate.strategy)
        assert candidate.strategy.mesh.pp == 4


@pytest.mark.parametrize("target", EXPRESSIVE)
def test_no_legal_strategy_that_can_be_said_is_missing(target: str) -> None:
    """The table under a launcher is the whole table, less what it refuses."""
    request = _request("uniform", target)
    legal = next(iter(enumerate_strategies(replace(request, target="any").facts)))
    within = list(enumerate_strategies(request.facts))
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero_stage")
    names = (*names, "microbatch_size", "recompute")

    def meshes(table: object, kept: list[int] | slice) -> set[tuple[int, ...]]:
        columns = [getattr(table, name)[kept].tolist() for name in names]
        return set(zip(*columns, strict=True))

    found = {mesh for table in within for mesh in meshes(table, slice(None))}
    assert found <= meshes(legal, slice(None))
    # Without a pipeline, no other choice hides what the launcher can express.
    flat = np.flatnonzero((legal.pp == 1) & (legal.tp == 1)).tolist()
    for row in meshes(legal, flat):
        values = dict(zip(names, row, strict=True))
        expressible = target != "flat" or values["cp"] == 1
        run = target != "narrow" or values["cp"] == 1 or row in found
        expressible = expressible and (
            target != "narrow" or values["dp_shard"] in {1, 4}
        )
        assert (row in found) == (expressible and run), values


@pytest.mark.parametrize("target", [*EXPRESSIVE, *target_names()])
def test_a_kind_of_rows_stands_for_all_of_it(target: str) -> None:
    """Asked for every row by itself, at its own sizes, the launcher says the same."""
    request = _request("uniform", target)
    table = next(iter(enumerate_strategies(replace(request, target="any").facts)))
    table = table[np.random.default_rng(0).permutation(len(table))[:400]]
    refused = target_violated(table, replace(request.facts, layers=None))
    even = get_target(target).even_layers
    for place in range(len(table)):
        row = table.row(place)
        stages = row["pp"] * row["virtual_stages"]
        expressible = False
        # No halo serves a sequence.
        for context in sorted({*get_args(ContextAlgorithm)} - {"halo"}):
            case = Case(
                strategy=build_strategy(
                    row,
                    unit_names=[str(unit) for unit in range(stages)],
                    bounds=range(stages + 1),
                    sharding=request.facts.sharding,
                    precision=request.facts.precision,
                    optimizer=request.facts.optimizer,
                    context=context,
                ),
                hosts=request.facts.hosts,
                layers=False,
                placed=False,
                tied=request.facts.tied,
                backend=request.facts.backend,
                attention=request.facts.attention,
                device_types=request.facts.device_types,
            )
            expressible = expressible or not get_target(target).violations(case)
        expressible = expressible and not (even and row["pp"] > 1)
        assert refused[place] == (not expressible), row


def test_sizes_that_a_launcher_looks_at_are_told_apart() -> None:
    request = _request("uniform", "narrow")
    degrees = {
        int(degree)
        for table in enumerate_strategies(request.facts)
        for degree in np.unique(table.dp_shard)
    }
    assert degrees == {1, 4}


def test_sequence_parallelism_is_left_out_where_it_has_no_word() -> None:
    tables = list(enumerate_strategies(_request("uniform", "flat", tp=4).facts))
    assert tables
    assert not any(table.sequence_parallel.any() for table in tables)


def test_a_stand_in_is_tried_where_its_counterpart_cannot_be_said() -> None:
    request = _request("uniform", "gpipe", pp=2)
    tables = list(enumerate_strategies(request.facts, pins=request.pins))
    assert {int(s) for table in tables for s in np.unique(table.schedule)} == {0}


@pytest.mark.parametrize("cluster", ["uneven", "occupied"])
def test_the_same_devices_of_every_host_are_used(cluster: str) -> None:
    request = _request(cluster, "whole")
    orders = device_orders(request)
    assert orders
    for order in orders:
        assert request.launcher_limits is not None
        assert request.launcher_limits.allows_order(order)
    most = max(map(len, orders))
    # Two of the hosts with two or more; three of those with the first three free.
    assert most == 6


def test_any_devices_are_those_that_can_be_said() -> None:
    request = replace(_request("uniform", "whole"), devices="any")
    counts = sorted(len(order) for order in device_orders(request))
    assert counts == [1, 2, 3, 4, 8]


@pytest.mark.parametrize("target", [*EXPRESSIVE, "torchrun"])
def test_a_plan_within_limits_can_be_exported(target: str) -> None:
    made = plan(
        gpt2_graph(),
        hosts((2, 4, device())),
        global_batch=16,
        partitioner="exhaustive",
        target=target,
    )
    require_expressible(get_target(target), made)
    assert not get_target(target).violations(case_of(made))


@pytest.mark.parametrize("target", ["slurm", "jobset"])
def test_a_plan_for_unlike_hosts_can_be_exported(target: str) -> None:
    boxes = [Cluster.parse(f"{name}:1") for name in ("dgx-a100-80", "dgx-h100")]
    wire = Link(bandwidth_bytes_per_s=25e9, latency_s=5e-6)
    made = plan(
        gpt2_graph(),
        Cluster.mixed(*boxes, level=wire),
        global_batch=16,
        partitioner="expert",
        pin={"dp_shard": 16},
        target=target,
    )
    assert made.cluster.host_types == ((1, "a100-80"), (1, "h100-80"))
    assert not get_target(target).violations(case_of(made))
    (text,) = (t for n, t in export_files(made, target).items() if n != "plan.json")
    if target == "slurm":
        assert "#SBATCH hetjob\n" in text
    else:
        assert "name: node-1\n" in text


@pytest.mark.parametrize(
    ("target", "pins", "message"),
    [
        ("flat", {"pp": 2}, r"mesh\.pp=2: Flat 9\.1 has no word for it; use 1"),
        ("even", {"pp": 3}, r"pp=3 x virtual_stages=1 does not divide the model's 8 l"),
        ("mute", {}, r"grad_clip_norm=1\.0: Mute 9\.1 has no word for it; use None"),
        ("bare", {}, r"optimizer=.*Bare 9\.1 has no word"),
    ],
)
def test_what_cannot_be_said_at_all_is_the_reason(
    target: str, pins: dict[str, int], message: str
) -> None:
    with pytest.raises(NoFeasiblePlanError, match=message) as caught:
        plan(
            tiny_graph(),
            hosts((3, 4, device())),
            global_batch=24,
            pin=pins,
            partitioner="expert",
            target=target,
            grad_clip_norm=1.0,
        )
    assert f"for target '{target}'" in str(caught.value)
    assert caught.value.remedies


@pytest.mark.parametrize(
    ("target", "algorithm"),
    [("deepspeed", "all_to_all"), ("torchtitan", "ring")],
)
@pytest.mark.parametrize("name", ["exhaustive", "expert", "evolutionary"])
def test_sequences_are_divided_as_the_launcher_can(
    name: str, target: str, algorithm: str
) -> None:
    made = plan(
        real_graph("llama3-8b"),
        "dgx-a100:1",
        global_batch=8,
        pin={"cp": 2, "zero_stage": 2},
        partitioner=name,
        target=target,
        evaluation_budget=6,
    )
    assert made.strategy.mesh.cp == 2
    assert made.strategy.context_algorithm == algorithm
    require_expressible(get_target(target), made)


def test_a_launcher_that_is_not_known_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'torchrun'"):
        plan(tiny_graph(), "dgx-a100", global_batch=8, target="torch-run")


def _plan(target: str) -> Plan:
    return plan(gpt2_graph(), "dgx-a100:1", global_batch=64, target=target)


def test_a_launcher_that_says_everything_gets_the_best_of_all() -> None:
    assert _plan("json").strategy == _plan("any").strategy
    assert _plan("torchrun").strategy == _plan("meshwright").strategy
