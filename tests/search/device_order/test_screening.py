"""Rows that stand for meshes: no mesh that has a legal row may be left without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.search.device_order.screening import few_rows
from planner.search.device_order.subsets import mesh_of_row
from planner.search.expert import ladder
from planner.space import enumerate_meshes, expand_meshes
from tests.cost.made import device, hosts, request_for, uniform_graph

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention": {"attention": "causal"},
    "odd sequence": {"attention": "causal", "seq_len": 1001},
    "no sequence": {"seq_len": None},
    "batch norms": {"batch_norm_values": 64},
    "coupled samples": {"config": {"own_loss": "coupled"}},
    "experts": {"num_experts": 4},
}


@pytest.mark.parametrize("target", ["meshwright", "torchtitan", "megatron", "nanotron"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("batch", [24, 26])
def test_every_mesh_with_a_legal_row_has_one(
    model: str, target: str, batch: int
) -> None:
    graph = replace(uniform_graph(4), **MODELS[model])
    request = request_for(graph, hosts((3, 4, device())), batch, target=target)
    for count in (2, 8, 12):
        mesh = enumerate_meshes(request.facts, count, request.pins)
        if not len(mesh):
            continue
        every = expand_meshes(mesh, request.facts, request.pins)
        few = few_rows(request, mesh)
        with_rows = np.unique(mesh_of_row(every, mesh)).tolist()
        assert np.unique(mesh_of_row(few, mesh)).tolist() == with_rows


@pytest.mark.parametrize(
    ("model", "mesh", "size"),
    [
        ("batch norms", (1, 1, 2, 1, 1, 1), 13),
        ("coupled samples", (1, 1, 1, 1, 2, 1), 26),
    ],
)
def test_models_of_whole_batches_have_rows(
    model: str, mesh: tuple[int, ...], size: int
) -> None:
    """26 samples on two devices are no 1 or 4 samples a microbatch."""
    graph = replace(uniform_graph(4), **MODELS[model])
    request = request_for(graph, hosts((1, 2, device())), 26)
    rows = few_rows(request, np.array([mesh]))
    assert set(zip(rows.microbatch_size, rows.num_microbatches, strict=True)) == {
        (size, 1)
    }
    rungs = ladder(request, 2)
    assert rungs is not None
    replicas = rungs.dp_replicate * rungs.dp_shard
    samples = rungs.microbatch_size * replicas
    assert (26, 1) in set(zip(samples, rungs.num_microbatches, strict=True))
