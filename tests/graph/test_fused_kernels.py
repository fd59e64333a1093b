"""Fused kernels that stand in for captured code have the price of captured kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from planner import predict
from planner.capture import capture
from planner.errors import UnknownNameError
from planner.graph import Block, ModelGraph
from planner.graph.fused_kernels import PATTERNS, with_fused_kernels
from planner.request import PlanOptions
from planner.schema import Plan, Strategy
from planner.schema.fused_kernels import FUSED_KERNELS

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
_BATCH, _TOKENS = 2, 128


def _llama(**how: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        **_SIZES, intermediate_size=96, num_key_value_heads=2, **how
    )
    return transformers.LlamaForCausalLM(config)


def _gpt2(dropout: float = 0.0, **how: Any) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=64,
        n_layer=3,
        n_head=4,
        vocab_size=128,
        n_positions=128,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=1,
        **how,
    )
    return transformers.GPT2LMHeadModel(config)


def _mixtral(**how: Any) -> nn.Module:
    config = transformers.MixtralConfig(
        **_SIZES,
        intermediate_size=96,
        num_key_value_heads=2,
        num_local_experts=8,
        attn_implementation="sdpa",
        **how,
    )
    return transformers.MixtralForCausalLM(config)


def _qwen(**how: Any) -> nn.Module:
    config = transformers.Qwen2MoeConfig(
        **_SIZES,
        intermediate_size=96,
        num_key_value_heads=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        attn_implementation="sdpa",
        **how,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def _mamba() -> nn.Module:
    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=3, state_size=16, vocab_size=128
    )
    return transformers.MambaForCausalLM(config)


@cache
def _read(build: Callable[..., nn.Module], tokens: int = _TOKENS, **how: Any) -> Any:
    return capture(partial(build, **how), seq_len=tokens, batch=_BATCH)


def _figures(block: Block) -> dict[str, Any]:
    """Return what prices a block; divisions stay those of the captured code."""
    divided = {"index", "repeat", "kernels", "modules", "tp_again_bytes"}
    found = {
        field.name: getattr(block, field.name)
        for field in dataclasses.fields(block)
        if field.name not in divided and "tp_" not in field.name
    }
    styled = {"saved_tensor_bytes", "saved_selective_tensor_bytes"}
    kernels = sorted(
        repr(dataclasses.replace(kernel, style="none", count=1))
        for kernel in block.kernels
        for _ in range(kernel.count)
    )
    whole = {n: value for n, value in found.items() if n not in styled}
    return {**whole, "saved_gathered_bytes": None, "kernels": kernels}


_STRATEGY = Strategy(microbatch_size=2, num_microbatches=2)


def _price(graph: ModelGraph, kernels: str = "as-is") -> Plan:
    return predict(graph, "dgx-h100:1", _STRATEGY, kernels=kernels)  # type: ignore[arg-type]


def _bytes(plan: Plan) -> float:
    return max(entry.total_bytes for entry in plan.prediction.memory)


@pytest.mark.parametrize("build", [_llama, _gpt2], ids=["llama", "gpt2"])
def test_eager_attention_is_priced_as_a_capture_of_fused_attention(
    build: Callable[..., nn.Module],
) -> None:
    eager = _read(build, attn_implementation="eager")
    captured = _read(build, attn_implementation="sdpa")
    fused = with_fused_kernels(eager)
    assert fused.fused == {"attention": 3}
    assert fused.captured is eager
    assert list(map(_figures, fused.blocks)) == list(map(_figures, captured.blocks))
    assert fused.unit_names == captured.unit_names
    assert list(fused.cut_bytes) == list(captured.cut_bytes)
    assert fused.parameters != ()
    assert not any(text.startswith("fallback") for text in fused.assumptions)
    ours, theirs = _price(eager, "fused"), _price(captured)
    assert ours.prediction.step_time_s == pytest.approx(
        theirs.prediction.step_time_s, rel=1e-9
    )
    assert _bytes(ours) == pytest.approx(_bytes(theirs), rel=1e-9)
    scores = 3 * _BATCH * 4 * _TOKENS**2
    assert _bytes(_price(eager)) > _bytes(ours) + 2 * scores


def test_kernels_that_drop_scores_are_not_priced_as_causal_ones() -> None:
    eager = _read(_gpt2, dropout=0.1, attn_implementation="eager")
    captured = _read(_gpt2, dropout=0.1, attn_implementation="sdpa")
    fused = with_fused_kernels(eager)
    assert fused.fused == {"attention": 3}
    assert not fused.causal
    assert captured.attention is None
    ours, theirs = _price(fused), _price(captured)
    assert ours.prediction.step_time_s == pytest.approx(
        theirs.prediction.step_time_s, rel=1e-9
    )


@pytest.mark.parametrize("build", [_mixtral, _qwen], ids=["mixtral", "qwen2"])
def test_a_loop_over_experts_is_priced_as_grouped_products(
    build: Callable[..., nn.Module],
) -> None:
    loop = _read(build, experts_implementation="eager")
    captured = _read(build, experts_implementation="grouped_mm")
    fused = with_fused_kernels(loop)
    assert fused.fused == {"experts": 3}
    for ours, theirs in zip(fused.blocks, captured.blocks, strict=True):
        names = ("saved_bytes", "saved_selective_bytes", "expert_bytes")
        sizes = ("forward_flops", "backward_flops", "parameter_count", "kind")
        for name in (*names, *sizes):
            assert getattr(ours, name) == getattr(theirs, name), (ours.name, name)
        launched = [
            sum(kernel.count for kernel in block.kernels) for block in (ours, theirs)
        ]
        assert launched[0] == launched[1]
        moved = [
            sum(kernel.count * kernel.forward_bytes for kernel in block.kernels)
            for block in (ours, theirs)
        ]
        assert moved[0] == moved[1]
    priced, given = _price(loop, "fused"), _price(captured)
    assert priced.prediction.step_time_s == pytest.approx(
        given.prediction.step_time_s, rel=1e-3
    )
    assert _bytes(priced) == pytest.approx(_bytes(given), rel=1e-3)
    assert _price(loop).prediction.step_time_s > 1.3 * given.prediction.step_time_s


def test_a_selective_scan_moves_what_its_kernel_reads_and_writes() -> None:
    loop = _read(_mamba, 64)
    fused = with_fused_kernels(loop)
    assert fused.fused == {"scan": 3}
    tokens, width, state, element = 64, 64, 16, 2
    # x, dt and z are read as they are, B and C for all channels at once.
    wide = 3 * _BATCH * tokens * width * element
    shared = 2 * _BATCH * tokens * state
    constants = 4 * width * state + 4 * width + 2 * width  # A, D, and dt's bias.
    out = _BATCH * tokens * width * element
    states = 4 * _BATCH * width * 2 * state  # One chunk's, and the products of A.
    read = wide + element * shared + constants
    # With a gate, y is written before and after it.
    forward = read + 2 * out + states
    # States between chunks are made again; gradients of B and C are in 32 bits.
    gradients = wide + 4 * shared + constants
    backward = read + 2 * out + states + gradients
    block = next(b for b in fused.blocks if b.name == "backbone.layers.1.mixer")
    kernels = {(k.forward_bytes, k.backward_bytes): k for k in block.kernels}
    assert (forward, backward) in kernels
    assert kernels[forward, backward].count == 1
    before = next(b for b in loop.blocks if b.name == block.name)
    assert block.forward_flops == before.forward_flops
    assert sum(k.count for k in block.kernels) < 30 < 4 * tokens
    # Every state of every token, twice, is what the loop keeps beside its inputs.
    every = 4 * _BATCH * tokens * width * state
    assert before.saved_bytes - block.saved_bytes > 2 * every
    assert block.saved_bytes < every
    assert not any(text.startswith("fallback") for text in fused.assumptions)


def test_a_model_without_such_code_stays_as_it_is() -> None:
    graph = _read(_llama, attn_implementation="sdpa")
    found = with_fused_kernels(graph)
    assert found.fused == {}
    assert found.blocks == graph.blocks
    assert with_fused_kernels(found) is found
    assert _price(graph, "fused").prediction == _price(graph).prediction


def _gpt_oss(kind: str) -> nn.Module:
    sizes = {**_SIZES, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    config = transformers.GptOssConfig(
        **sizes,
        head_dim=16,
        intermediate_size=32,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
    )
    model = transformers.GptOssForCausalLM(config)
    # torch's kernel knows no sinks: what it moves and keeps is the same without.
    model.config._attn_implementation = kind
    return model


def test_attention_with_sinks_has_the_price_of_a_kernel() -> None:
    graphs = [
        capture(_gpt_oss(kind), seq_len=_TOKENS, batch=_BATCH, dtype="bfloat16")
        for kind in ("eager", "sdpa")
    ]
    fused, captured = with_fused_kernels(graphs[0]), graphs[1]
    assert fused.fused == {"attention": 2}
    assert fused.causal
    for ours, theirs in zip(fused.blocks, captured.blocks, strict=True):
        if "self_attn" not in ours.name:
            continue
        sizes = ("forward_flops", "backward_flops", "saved_bytes")
        for name in (*sizes, "saved_selective_bytes"):
            assert getattr(ours, name) == getattr(theirs, name), name
        moved = [
            [
                sum(kernel.count * getattr(kernel, name) for kernel in block.kernels)
                for name in ("forward_bytes", "backward_bytes")
            ]
            for block in (ours, theirs)
        ]
        assert moved[0] == moved[1]
        # The sinks stay weights of the block, and are read by its kernel.
        assert ours.parameter_count == theirs.parameter_count + 4
        assert sum(kernel.weight_bytes for kernel in ours.kernels) == 8 + sum(
            kernel.weight_bytes for kernel in theirs.kernels
        )


class _Sinking(nn.Module):
    """Attention with a sink a head, or one that each token computes for itself."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.qkv, self.own = nn.Linear(16, 48), own
        self.sinks, self.sink = nn.Parameter(torch.zeros(2)), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        sinks = self.sinks.view(1, 2, 1, 1).expand(len(x), -1, x.shape[1], -1)
        if self.own:
            sinks = self.sink(x).transpose(1, 2).unsqueeze(-1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return (shares @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("own", "found"), [(False, {"attention": 1}), (True, {})])
def test_sinks_are_weights(own: bool, found: dict[str, int]) -> None:
    graph = capture(lambda: _Sinking(own), {"x": ((2, 64, 16), "float32")})
    assert with_fused_kernels(graph).fused == found


class _Biased(nn.Module):
    """Attention whose scores have a learned bias, which no kernel takes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(16, 48), nn.Parameter(torch.zeros(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2) + self.bias).softmax(-1) @ v


def test_scores_with_a_gradient_of_their_own_are_not_fused() -> None:
    graph = capture(_Biased, {"x": ((2, 64, 16), "float32")})
    assert with_fused_kernels(graph).fused == {}


def test_every_kernel_has_a_pattern() -> None:
    assert PATTERNS.keys() == FUSED_KERNELS.keys()


def test_a_unit_order_is_that_of_both_models() -> None:
    fused = with_fused_kernels(_read(_llama, attn_implementation="eager"))
    moved = fused.reordered(fused.unit_names)
    assert moved.captured is not None
    assert moved.captured.unit_names == moved.unit_names


def test_an_unknown_choice_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"'fuse'.*fused"):
        PlanOptions(global_batch=8, kernels="fuse")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="as-is"):
        _price(_read(_llama, attn_implementation="sdpa"), "as-it-is")


def test_attention_that_nothing_trains_has_no_backward() -> None:
    frozen = []
    for kind in ("eager", "sdpa"):
        model = _llama(attn_implementation=kind)
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.requires_grad_(False)
        model.model.embed_tokens.requires_grad_(False)  # type: ignore[union-attr]
        frozen.append(capture(model, seq_len=_TOKENS, batch=_BATCH))
    fused, captured = with_fused_kernels(frozen[0]), frozen[1]
    assert fused.fused == {"attention": 3}
    assert fused.backward_flops == captured.backward_flops
    assert fused.saved_bytes == captured.saved_bytes
