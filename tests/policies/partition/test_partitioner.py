"""The learned partitioner where there is next to nothing to decide, or nothing fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from planner.api import plan
from planner.capture import capture
from planner.cluster import Cluster
from planner.cost import CostModel
from planner.errors import ClusterError, NoFeasiblePlanError, StrategyError
from planner.graph import ModelGraph
from planner.request import PlanOptions, make_request
from planner.search import Request, SearchResult
from planner.search.base import score
from planner.search.device_order.screening import screen
from planner.space import check
from policies.partition.network import NetworkConfig, PartitionNetwork, save_network
from policies.partition.partitioner import LearnedPartitioner, SearchConfig
from tests.cost.made import device, hosts
from tests.plans import TINY, tiny_graph
from tests.search.device_order.made import prepared

LAB = str(TINY.parent / "cluster.yaml")


@pytest.fixture(scope="module")
def one_block() -> ModelGraph:
    return capture(nn.Linear(64, 64), {"input": ((16, 64), "float32")})


def _both(
    graph: ModelGraph, cluster: Cluster | str, **more: object
) -> tuple[float, float]:
    """Step times that the learned partitioner and exhaustive search come to."""
    learned, exact = (
        plan(graph, cluster, global_batch=16, partitioner=name, **more)  # type: ignore[arg-type]
        for name in ("learned", "exhaustive")
    )
    return learned.prediction.step_time_s, exact.prediction.step_time_s


@pytest.mark.parametrize("cluster", ["dgx-a100:1", LAB])
def test_a_model_of_one_block(one_block: ModelGraph, cluster: str) -> None:
    learned, exact = _both(one_block, cluster, devices="any")
    assert learned <= exact * (1 + 1e-6)


@pytest.mark.parametrize("budget", [None, 0, 0.2])
def test_one_device(budget: float | None) -> None:
    alone = Cluster.parse("dgx-a100:1").with_occupied(range(1, 8))
    made = plan(
        tiny_graph(),
        alone,
        global_batch=16,
        partitioner="learned",
        time_budget_s=budget,
    )
    assert made.strategy.mesh.num_devices == 1
    assert made.strategy.device_ids() == (0,)
    if budget is None:
        learned, exact = _both(tiny_graph(), alone)
        assert learned <= exact * (1 + 1e-6)


@pytest.mark.parametrize("partitioner", ["learned", "auto"])
def test_more_stages_than_blocks(partitioner: str, one_block: ModelGraph) -> None:
    with pytest.raises(NoFeasiblePlanError, match="pp"):
        plan(
            one_block,
            "dgx-a100:1",
            global_batch=16,
            partitioner=partitioner,
            pin={"pp": 8},
        )


@pytest.mark.parametrize("partitioner", ["learned", "auto"])
def test_a_batch_of_one(partitioner: str) -> None:
    made = plan(tiny_graph(), LAB, global_batch=1, partitioner=partitioner)
    assert made.strategy.mesh.dp_replicate * made.strategy.mesh.dp_shard == 1


def test_no_device_is_free() -> None:
    full = Cluster.parse("dgx-a100:1").with_occupied(range(8))
    with pytest.raises(NoFeasiblePlanError, match=r"all 8 devices .* are occupied"):
        plan(tiny_graph(), full, global_batch=16, partitioner="learned")


def test_devices_without_memory(tmp_path: Path) -> None:
    text = Path(LAB).read_text().replace("memory_bytes: 24.0e+9", "memory_bytes: 0")
    file = tmp_path / "empty.yaml"
    file.write_text(text)
    with pytest.raises((ClusterError, StrategyError, ValueError), match="memory_bytes"):
        plan(tiny_graph(), str(file), global_batch=16, partitioner="learned")


def test_what_is_too_large_says_what_lacks() -> None:
    with pytest.raises(NoFeasiblePlanError, match="GB"):
        plan(
            "llama3-405b",
            "dgx-a100:1",
            global_batch=8,
            seq_len=512,
            partitioner="learned",
        )


def test_weights_of_another_feature_version(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_network(PartitionNetwork(NetworkConfig(width=8, hidden=8)), {}, tmp_path)
    file = tmp_path / "config.json"
    described = json.loads(file.read_text())
    described["feature_version"] = 0
    file.write_text(json.dumps(described))
    request = make_request(
        tiny_graph(), Cluster.parse("dgx-a100:1"), PlanOptions(global_batch=16)
    )
    with pytest.raises(StrategyError, match="train the policy again"):
        LearnedPartitioner(tmp_path).search(request)


#: A host short of memory and one that has a little more.
CLUSTER = hosts(
    (1, 4, device(memory_bytes=1.72e9)), (1, 4, device("big", memory_bytes=2.5e9))
)


def _found(request: Request, config: SearchConfig | None = None) -> SearchResult:
    found = LearnedPartitioner(config=config).search(request)
    assert found.candidates
    return found


def test_what_fits_once_it_is_cut_is_found_without_evolution() -> None:
    request, groups, choices = prepared(CLUSTER, units=12, global_batch=48)
    every = np.arange(len(choices))
    seen = screen(request, CostModel(request.context), groups, choices, every)
    best = _found(request, SearchConfig(generations=0)).candidates[0]
    assert best.cost.fits
    proposed = score(best.cost, best.strategy.mesh.num_devices, request.objective)
    assert proposed < 0.9 * seen.score.min()


@pytest.mark.parametrize("budget", [1, 3, 9])
def test_few_simulations_are_kept_for_what_fits(budget: int) -> None:
    request, _, _ = prepared(CLUSTER, units=12, global_batch=48)
    found = _found(replace(request, evaluation_budget=budget))
    assert found.candidates[0].cost.fits
    assert found.evaluations["simulated"] <= budget


def test_a_fleet_of_many_hosts_is_planned_in_groups_of_them() -> None:
    quick = device("quick", memory_bytes=20e9)
    slow = device("slow", memory_bytes=16e9, peak_flops_per_s={"bfloat16": 3e13})
    cluster = hosts((90, 1, quick), (70, 1, slow))
    request = replace(
        prepared(cluster, units=8, global_batch=160)[0], evaluation_budget=6
    )
    found = LearnedPartitioner(config=SearchConfig(generations=0)).search(request)
    for one in found.candidates:
        check(one.strategy, request.facts)
        used = one.strategy.device_ids()
        assert len(set(used)) == len(used) == one.strategy.mesh.num_devices
    assert any(len(one.strategy.device_ids()) == 160 for one in found.candidates)
