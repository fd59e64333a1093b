"""Bytes and FLOPs against what torch measures on small real models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from planner.capture import capture
from planner.capture.private_apis import fused_dropout, quiet_forward
from planner.graph import ModelGraph
from tests.capture import oracle
from tests.marked import cases
from tests.models.convolutional import ResNet, UNet3d
from tests.models.other import Recommender, Recurrent, Stack

transformers = pytest.importorskip("transformers")

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def _tokens(rows: int = 2, length: int = 32, high: int = 64) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length) % high


def _llama(**more: Any) -> torch.nn.Module:
    config = transformers.LlamaConfig(**{**_SMALL, **more})
    return transformers.LlamaForCausalLM(config)


def _gpt2(**more: Any) -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=4, n_head=4, vocab_size=128, n_positions=64, **more
    )
    return transformers.GPT2LMHeadModel(config)


def _bert(**more: Any) -> torch.nn.Module:
    config = transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=128,
        **more,
    )
    return transformers.BertForMaskedLM(config)


def _t5() -> torch.nn.Module:
    config = transformers.T5Config(
        d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=4, vocab_size=128
    )
    return transformers.T5ForConditionalGeneration(config)


_TEXT = {"input_ids": _tokens(), "use_cache": False}
_CASES: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "llama": (_llama, _TEXT),
    "llama, tied": (lambda: _llama(tie_word_embeddings=True), _TEXT),
    "llama, dropout": (lambda: _llama(attention_dropout=0.0), _TEXT),
    "gpt2, eager": (lambda: _gpt2(attn_implementation="eager"), _TEXT),
    "bert, eager": (
        lambda: _bert(attn_implementation="eager"),
        {"input_ids": _tokens()},
    ),
    "t5": (_t5, {**_TEXT, "decoder_input_ids": _tokens(2, 16)}),
    "stack": (Stack, {"tokens": _tokens()}),
    "resnet": (lambda: ResNet((1, 3, 1), 16), {"x": torch.rand(2, 3, 64, 64)}),
    "u-net": (lambda: UNet3d(4, 2), {"x": torch.rand(1, 1, 16, 16, 16)}),
    "recommender": (
        lambda: Recommender(100),
        {"dense": torch.rand(8, 13), "sparse": _tokens(8, 32).reshape(8, 8, 4)},
    ),
}
#: Their blocks are those of others.
_ALIKE = ("llama, tied", "llama, dropout")


@cache
def _captured(case: str, repeat: bool) -> ModelGraph:
    build, inputs = _CASES[case]
    return capture(build(), inputs, dtype=None, repeat=repeat)


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("case", cases(_CASES, further=_ALIKE))
def test_saved_bytes_are_those_of_a_real_run(case: str, repeat: bool) -> None:
    build, inputs = _CASES[case]
    with fused_dropout():
        want = oracle.saved_bytes(build(), inputs)
    assert _captured(case, repeat).saved_bytes == pytest.approx(want, rel=0.1)


def test_bytes_of_a_recurrent_layer_are_those_of_a_real_run() -> None:
    inputs = {"tokens": _tokens(2, 16)}
    graph = capture(Recurrent(), inputs, dtype=None)
    with quiet_forward():
        want = oracle.saved_bytes(Recurrent(), inputs)
        forward, backward = oracle.flops(Recurrent(), inputs)
    assert graph.saved_bytes == pytest.approx(want, rel=0.1)
    assert (graph.forward_flops, graph.backward_flops) == (forward, backward)


@pytest.mark.parametrize("case", [c for c in _CASES if not c.startswith("llama")])
def test_flops_equal_flop_counter_mode(case: str) -> None:
    build, inputs = _CASES[case]
    graph = _captured(case, True)
    assert (graph.forward_flops, graph.backward_flops) == oracle.flops(build(), inputs)


def test_eager_llama_flops_equal_flop_counter_mode() -> None:
    build = lambda: _llama(attn_implementation="eager")  # noqa: E731
    graph = capture(build(), _TEXT, dtype=None)
    assert (graph.forward_flops, graph.backward_flops) == oracle.flops(build(), _TEXT)


@pytest.mark.parametrize("case", cases(_CASES, further=_ALIKE))
def test_repeats_traced_once_change_nothing(case: str) -> None:
    once, full = _captured(case, True), _captured(case, False)
    assert len(once.blocks) == len(full.blocks)
    assert once.unit_names == full.unit_names
    assert once.forward_flops == pytest.approx(full.forward_flops, rel=1e-3)
    assert once.backward_flops == pytest.approx(full.backward_flops, rel=1e-3)
    assert once.saved_bytes == pytest.approx(full.saved_bytes, rel=1e-3)
    assert list(once.cut_bytes) == pytest.approx(list(full.cut_bytes))
    assert once.parameters == full.parameters
    assert once.sharding == full.sharding


def test_tied_weights_are_one_parameter() -> None:
    graph = capture(Stack(), {"tokens": _tokens()})
    tied = next(p for p in graph.parameters if p.name == "embed.weight")
    assert tied.aliases == ("head.weight",)
    assert sum(p.numel for p in graph.parameters) == sum(
        p.numel() for p in Stack().parameters()
    )


def test_bytes_grow_with_the_batch_and_parameters_do_not() -> None:
    one = capture(_llama, {"input_ids": ((1, 32), "int64"), "use_cache": False})
    two = capture(_llama, {"input_ids": ((2, 32), "int64"), "use_cache": False})
    assert two.forward_flops == 2 * one.forward_flops
    assert two.saved_bytes == pytest.approx(2 * one.saved_bytes, rel=0.01)
    assert two.num_parameters == one.num_parameters


def test_a_selective_policy_keeps_less_than_none_and_more_than_full() -> None:
    graph = capture(_llama, {"input_ids": ((2, 64), "int64"), "use_cache": False})
    for start, stop in graph.units[1:-2]:
        unit = graph.blocks[start:stop]
        kept = sum(block.saved_selective_bytes for block in unit)
        assert unit[0].boundary_bytes < kept < sum(b.saved_bytes for b in unit)


def test_tp_divides_what_a_llama_layer_saves() -> None:
    tokens, hidden, inner, kv = 2 * 64, 64, 128, 32
    graph = capture(_llama, {"input_ids": ((2, 64), "int64"), "use_cache": False})
    unit = {b.name.rpartition(".")[2]: b for b in graph.blocks if "layers.2." in b.name}
    # gate, up, silu(gate) and their product; of attention q, k, v, output and one fp32
    # log-sum-exp a row.
    assert unit["mlp"].saved_tensor_bytes == 4 * tokens * inner * 2
    attention = (2 * hidden + 2 * kv) * tokens * 2 + 4 * tokens * 4
    assert unit["self_attn"].saved_tensor_bytes == attention
    for name in ("self_attn", "mlp"):
        assert unit[name].tp_collectives == 1
        assert unit[name].tp_collective_bytes == tokens * hidden * 2
