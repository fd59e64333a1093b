"""Layers of measured pipelines."""

from __future__ import annotations

import pytest

from planner.errors import CalibrationError
from planner.graph import ModelGraph
from planner.measurements.catalogues import frameworks
from planner.measurements.model_configs import graph_of
from planner.measurements.model_shapes import shape_of
from planner.measurements.stage_assignment import assign_stages
from tests.measurements.rows import small


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    """Layer sizes of nanotron's sweep; the head has two layers' weights."""
    row = small(layers=24, hidden=2048, heads=32, seq=64, vocab=50257)
    return graph_of(shape_of(row))


def _layers(graph: ModelGraph, name: str, pp: int, virtual: int = 1) -> list[int]:
    stages = assign_stages(graph, frameworks()[name], pp, virtual, "1F1B", "none")
    held = [module for stage in stages for module in stage.modules]
    assert held == list(graph.unit_names)
    return [
        sum(name.rpartition(".")[2].isdigit() for name in stage.modules)
        for stage in stages
    ]


def test_megatron_deals_layers_evenly(graph: ModelGraph) -> None:
    assert _layers(graph, "megatron", 8) == [3] * 8
    assert _layers(graph, "megatron", 4, virtual=2) == [3] * 8


def test_what_is_left_over_goes_behind_the_first(graph: ModelGraph) -> None:
    assert _layers(graph, "torchtitan", 5) == [4, 5, 5, 5, 5]


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_nanotron_deals_weights_evenly_the_head_s_too(
    graph: ModelGraph, pp: int
) -> None:
    layers = _layers(graph, "nanotron", pp)
    assert sum(layers) == 24
    # All but the last go on until they have more than their share.
    head = 50304 * 2048 / (12 * 2048**2)
    assert layers[0] == int((24 + head) / pp) + 1
    assert layers[-1] < 24 / pp


def test_every_stage_has_something(graph: ModelGraph) -> None:
    for pp in range(1, len(graph.unit_names) + 1):
        stages = assign_stages(graph, frameworks()["nanotron"], pp, 1, "1F1B", "none")
        assert len(stages) == pp
        assert all(stage.modules for stage in stages)
    with pytest.raises(CalibrationError, match="99 stages for layers=24"):
        assign_stages(graph, frameworks()["nanotron"], 99, 1, "1F1B", "none")
