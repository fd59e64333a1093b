"""Graphs of the models that measurements name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.measurements.known_models import ModelShape
from planner.measurements.model_configs import graph_of, model_of
from planner.measurements.model_shapes import expected_parameters, shape_of
from tests.measurements.rows import small


def _tiny(**more: Any) -> ModelShape:
    figures: dict[str, Any] = {
        "family": "gpt",
        "layers": 3,
        "hidden": 512,
        "heads": 16,
        "kv_heads": 16,
        "head_size": 32,
        "inner": 2048,
        "vocab": 1024,
        "seq": 256,
    }
    return ModelShape(**{**figures, **more})


_ROTARY = {"gated": True, "tied": False, "bias": False, "positions": False}
_EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_inner": 512}
_SHAPES = {
    "gpt": _tiny(),
    "mpt": _tiny(bias=False),
    "nemotron": _tiny(activation="relu2", positions=False, tied=False, kv_heads=8),
    "bert": _tiny(family="bert"),
    "llama": _tiny(family="llama", kv_heads=8, **_ROTARY),
    "qwen": _tiny(family="llama", qk_norm=True, **_ROTARY),
    "moe": _tiny(family="moe", kv_heads=8, **_ROTARY, **_EXPERTS),
    "every second": _tiny(expert_every=2, **_EXPERTS),
    "deepseek": _tiny(
        family="deepseek",
        query_rank=192,
        key_rank=64,
        rotary_size=16,
        dense_first=1,
        shared_inner=512,
        **_ROTARY,
        **_EXPERTS,
    ),
    "deepseek lite": _tiny(
        family="deepseek",
        key_rank=64,
        rotary_size=16,
        shared_inner=512,
        **_ROTARY,
        **_EXPERTS,
    ),
    "hybrid": _tiny(
        family="hybrid",
        layers=4,
        pattern="ME*-",
        positions=False,
        tied=False,
        bias=False,
        kv_heads=8,
        scan_heads=16,
        latent=256,
        shared_inner=512,
        **_EXPERTS,
    ),
}


def _parameters(shape: ModelShape) -> int:
    """Scalars, counted on tensors without memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in model_of(shape).build().parameters())


@pytest.mark.parametrize("name", _SHAPES)
def test_every_family_can_be_split_along_every_axis(name: str) -> None:
    shape = _SHAPES[name]
    graph = graph_of(shape)
    layers = [unit for unit in graph.unit_names if unit.rpartition(".")[2].isdigit()]
    assert len(layers) == shape.layers
    assert {graph.blocks[0].kind, graph.blocks[-1].kind} >= {"head"}
    assert graph.tp_dims["vocab_size"] == 1024
    assert {size % 8 for size in graph.tp_dims.values()} == {0}
    assert not graph.whole
    assert graph.whole_stream is None
    assert graph.num_experts == shape.experts
    assert ("experts" in graph.sharding.values()) == bool(shape.experts)
    assert graph.attention == ("full" if name == "bert" else "causal")
    assert graph.num_parameters == _parameters(shape)
    assert not graph.assumptions
    kinds = {kernel.kind for block in graph.blocks for kernel in block.kernels}
    assert "attention" in kinds
    assert graph.batch == 1
    assert graph.dtype == "bfloat16"


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_parameters_of_dense_models_follow_the_formula(name: str) -> None:
    assert expected_parameters(_SHAPES[name]) == _parameters(_SHAPES[name])


def test_flops_of_a_gpt_follow_the_formula() -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), section 5, without recomputation."""
    layers, hidden, seq, vocab = 96, 12288, 2048, 51200
    point = small(layers=layers, hidden=hidden, heads=96, seq=seq, vocab=vocab)
    graph = graph_of(shape_of(point))
    share = 1 + seq / (6 * hidden) + vocab / (12 * layers * hidden)
    expected = 72 * seq * layers * hidden**2 * share
    assert graph.forward_flops + graph.backward_flops == pytest.approx(expected)


def test_flops_of_experts_are_those_of_the_chosen() -> None:
    shape = _SHAPES["moe"]
    products = sum(
        kernel.forward_flops * kernel.count
        for block in graph_of(shape).blocks
        for kernel in block.kernels
        if block.kind == "expert" and kernel.kind == "matmul"
    )
    each = 2 * 3 * shape.hidden * shape.expert_inner * shape.experts_per_token
    router = 2 * shape.hidden * shape.experts
    assert products == pytest.approx(shape.layers * shape.seq * (each + router))


def test_a_million_tokens_can_be_read() -> None:
    graph = graph_of(_tiny(family="llama", seq=2**20, **_ROTARY))
    assert graph.seq_len == 2**20
    assert graph.forward_flops == pytest.approx(
        2**20 * 2 * (3 * 512 * (4 * 512 + 3 * 2048) + 1024 * 512)
        + 3 * 4 * 2.0**40 * 512
    )


def test_equal_shapes_share_a_graph_whatever_was_assumed() -> None:
    one = shape_of(small(vocab=None))
    two = shape_of(small())
    assert one.assumed != two.assumed
    assert graph_of(one) is graph_of(two)
