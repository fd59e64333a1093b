"""Layers are split only if no op between them counts, orders or mixes features."""

from __future__ import annotations

import pytest

from benchmarks.harmful_modules import build_module
from planner.capture import capture
from planner.graph import ModelGraph

_MLP = {"layers.*.mlp.up", "layers.*.mlp.down"}
_HEADS = {f"layers.*.attention.{leaf}" for leaf in "qkvo"}


def _read(name: str) -> ModelGraph:
    module, inputs = build_module(name)
    return capture(module, inputs, dtype="float32")


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("flip features", "flip"),
        ("roll features", "roll"),
        ("fft features", "_fft_r2c"),
        ("sort features", "sort"),
        ("count of features", "div"),
        ("place of features", "linspace"),
        ("shuffle features", "view"),
    ],
)
def test_an_op_that_does_more_than_one_feature_at_a_time_is_named(
    name: str, op: str
) -> None:
    graph = _read(name)
    assert not _MLP & graph.sharding.keys()
    assert f"({op})" in graph.whole["layers.*.mlp.up"]
    assert graph.sharding.keys() >= _HEADS


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("flip heads", "flip"),
        ("roll heads", "roll"),
        ("count of heads", "div"),
        ("place of heads", "linspace"),
        ("alibi", "arange"),
    ],
)
def test_an_op_that_does_more_than_one_head_at_a_time_is_named(
    name: str, op: str
) -> None:
    graph = _read(name)
    assert not _HEADS & graph.sharding.keys()
    assert f"({op})" in graph.whole["layers.*.attention.q"]
    assert graph.sharding.keys() >= _MLP


@pytest.mark.parametrize("name", ["maxout", "fused qkv by head", "own rotary"])
def test_ops_that_keep_features_in_equal_runs_are_divided(name: str) -> None:
    graph = _read(name)
    assert graph.sharding.keys() >= _MLP
    assert "layers.*.attention.o" in graph.sharding
