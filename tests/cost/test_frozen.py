"""Frozen parameters: read from a real module, priced as what they are."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost import CostModel
from planner.cost.kernels.blocks import count_parameters
from planner.graph import ModelGraph
from planner.schema import Precision
from planner.space import build_strategy
from tests.cost.adapters import RANK, WIDTH, adapted_graph
from tests.cost.made import device, hosts, row, setting_for, table_of

FULL = Precision(compute="float32")
LEARNED = 2 * RANK * WIDTH


def model_of(graph: ModelGraph, devices: int = 1, **changes: Any) -> CostModel:
    cluster = hosts((1, devices, device(**changes)))
    return CostModel(setting_for(graph, cluster, precision=FULL))


def test_units_know_which_of_their_scalars_are_trained() -> None:
    counts = count_parameters(adapted_graph(3))
    assert counts.scalars.sum(axis=(0, 1)).tolist() == [WIDTH**2 + LEARNED] * 3
    assert counts.trained.sum(axis=(0, 1)).tolist() == [LEARNED] * 3
    assert counts.tensors.tolist() == [2.0] * 3


def test_frozen_products_have_no_weight_gradient() -> None:
    wide = {"memory_bandwidth_bytes_per_s": 1e18}
    frozen, trained = (
        model_of(adapted_graph(frozen=f), **wide).unit_costs(
            tp=1, cp=1, ep=1, microbatch=64, sequence_parallel=False
        )
        for f in (True, False)
    )
    assert frozen.forward_s == pytest.approx(trained.forward_s)
    # One product less in each layer; in the first, whose input needs no gradient, the
    # only one.
    product = pytest.approx([2.0 * 64 * WIDTH**2 / 5e13] * 4, rel=1e-6)
    assert (trained.weight_s - frozen.weight_s)[0, 0] == product
    assert (trained.backward_s - frozen.backward_s)[0, 0] == product
    # Between the halves of a split backward the base's output has no gradient to keep.
    kept = trained.weight_grad_bytes - frozen.weight_grad_bytes
    assert kept[0] == pytest.approx([4.0 * 64 * WIDTH] * 4)
    assert frozen.weight_grad_bytes[0] == pytest.approx([4.0 * 64 * (WIDTH + RANK)] * 4)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_table_and_strategy_hold_gradients_of_what_is_trained(zero: int) -> None:
    graph = adapted_graph()
    model = model_of(graph, 2, backend="gloo")
    values = row(
        dp_shard=2 if zero else 1, dp_replicate=1 if zero else 2, zero_stage=zero
    )
    strategy = build_strategy(
        values,
        unit_names=graph.unit_names,
        bounds=[0, 4],
        sharding={},
        precision=FULL,
    )
    cost = model.cost(strategy)
    owned = 4 * LEARNED / (2 if zero else 1)
    assert cost.memory.optimizer.tolist() == [8 * owned]
    assert float(cost.memory.gradients[0]) <= 4 * (owned + 4 * LEARNED)
    # One replica's gradients alone are exchanged.
    moved = cost.collective_bytes
    payload = moved.get("all_reduce", 0.0) + moved.get("reduce_scatter", 0.0)
    assert payload == 4 * 4 * LEARNED
    table = model.table(table_of(values))
    assert table.memory_bytes[0] == pytest.approx(cost.peak_memory_bytes)
    assert table.step_time_s[0] == pytest.approx(cost.step_time_s)
