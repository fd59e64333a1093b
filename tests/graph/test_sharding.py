"""Tensor-parallel roles, given by a config and inferred from the dataflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from planner.capture import capture
from planner.graph import ModelGraph
from tests.models.other import Stack

transformers = pytest.importorskip("transformers")

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
_IDS = {"input_ids": ((2, 16), "int64")}
_LLAMA = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def _llama(**more: Any) -> nn.Module:
    config = transformers.LlamaConfig(**_SMALL, **more)
    return transformers.LlamaForCausalLM(config)


def _styles(graph: ModelGraph) -> set[tuple[str, str]]:
    return {(k.kind, k.style) for b in graph.blocks for k in b.kernels}


def test_the_plan_of_a_config_is_taken() -> None:
    graph = capture(_llama, {**_IDS, "use_cache": False})
    assert graph.sharding == {**_LLAMA, "lm_head": "colwise"}
    assert ("attention", "local") in _styles(graph)
    norms = [b for b in graph.blocks if b.kind == "norm"]
    assert {k.style for b in norms for k in b.kernels} == {"stream"}


def test_a_tied_head_is_left_whole() -> None:
    graph = capture(lambda: _llama(tie_word_embeddings=True), _IDS)
    assert graph.sharding == _LLAMA
    assert "vocab_size" not in graph.tp_dims


def test_inference_finds_what_the_config_of_llama_says() -> None:
    def build() -> nn.Module:
        module = _llama()
        module.config.base_model_tp_plan = None
        type(module)._tp_plan, kept = {}, type(module)._tp_plan
        monkey.append((type(module), kept))
        return module

    monkey: list[tuple[Any, Any]] = []
    try:
        graph = capture(build, {**_IDS, "use_cache": False})
    finally:
        for owner, kept in monkey[:1]:
            owner._tp_plan = kept
    assert graph.sharding == _LLAMA


def test_inference_on_bert() -> None:
    config = transformers.BertConfig(**_SMALL)
    graph = capture(lambda: transformers.BertForMaskedLM(config), _IDS)
    layer = "bert.encoder.layer.*."
    assert graph.sharding == {
        f"{layer}attention.self.query": "colwise",
        f"{layer}attention.self.key": "colwise",
        f"{layer}attention.self.value": "colwise",
        f"{layer}attention.output.dense": "rowwise",
        f"{layer}intermediate.dense": "colwise",
        f"{layer}output.dense": "rowwise",
    }
    biases = {p.name: p.style for p in graph.parameters if p.name.endswith("bias")}
    assert biases["bert.encoder.layer.1.intermediate.dense.bias"] == "colwise"
    assert biases["bert.encoder.layer.1.output.dense.bias"] == "none"


def test_a_transposed_layer_is_split_and_a_fused_one_left_whole() -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=128)
    graph = capture(lambda: transformers.GPT2LMHeadModel(config), _IDS)
    block = "transformer.h.*."
    assert graph.sharding == {
        f"{block}mlp.c_fc": "colwise",
        f"{block}mlp.c_proj": "rowwise",
    }
    assert set(graph.whole) == {f"{block}attn.c_attn", f"{block}attn.c_proj"}
    # Weights are [in, out]: what tp divides is the second dimension of c_fc.
    assert graph.tp_dims == {"intermediate_size": 256}


def test_attention_with_a_learned_bias_a_head_is_left_whole() -> None:
    config = transformers.T5Config(
        d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=3, vocab_size=128
    )
    inputs = {**_IDS, "decoder_input_ids": ((2, 8), "int64"), "use_cache": False}
    graph = capture(lambda: transformers.T5ForConditionalGeneration(config), inputs)
    assert not any("SelfAttention" in pattern for pattern in graph.sharding)
    assert any(pattern.endswith("wi") for pattern in graph.sharding)


def test_a_pair_in_every_block() -> None:
    graph = capture(Stack, {"tokens": ((2, 16), "int64")})
    assert graph.sharding == {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    assert graph.tp_dims == {"intermediate_size": 128}
    block = next(b for b in graph.blocks if b.layer == "blocks.2")
    assert block.tp_collectives == 1
    assert block.tp_collective_bytes == 2 * 16 * 32 * 2


def test_experts_that_tp_leaves_whole_do_not_limit_it() -> None:
    config = transformers.MixtralConfig(
        **{**_SMALL, "intermediate_size": 136},
        num_key_value_heads=4,
        num_local_experts=4,
    )
    graph = capture(
        lambda: transformers.MixtralForCausalLM(config), {**_IDS, "use_cache": False}
    )
    experts = [p for p in graph.parameters if p.expert]
    assert experts
    assert {p.style for p in experts} == {"none"}
    assert graph.num_experts == 4
    assert graph.tp_dims == {
        "num_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
    }


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(16, 3), nn.LayerNorm(16)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, x = self.gate(x).softmax(-1), self.norm(x)
        return sum(shares[..., i, None] * e(x) for i, e in enumerate(self.experts))


def test_experts_that_tp_splits_limit_it() -> None:
    graph = capture(
        lambda: nn.Sequential(*(Mixture() for _ in range(3))),
        {"input": ((4, 8, 16), "float32")},
    )
    assert graph.num_experts == 3
    assert "*.experts.*.up" in graph.sharding
    assert graph.tp_dims == {"moe_intermediate_size": 24}


class Chain(nn.Module):
    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.norm(self.b(self.a(x).relu())).relu())


class Nested(nn.Module):
    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Chain(norm=norm) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("norm", [True, False])
def test_layers_pair_up_in_order_and_never_across_a_norm(norm: bool) -> None:
    graph = capture(lambda: Nested(norm=norm), {"x": ((4, 8), "float32")})
    assert graph.sharding == {"blocks.*.a": "colwise", "blocks.*.b": "rowwise"}


class Parts(nn.Module):
    """A pair of layers, and something between them."""

    def __init__(self, between: str) -> None:
        super().__init__()
        wide = {"halves": 2, "gate": 2, "fused": 3, "heads-of-fused": 3}.get(between, 1)
        self.between = between
        self.up, self.down = nn.Linear(16, 16 * wide), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(getattr(self, f"_{self.between.replace('-', '_')}")(x))

    def _free_heads(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).view(*x.shape[:-1], -1, 4).transpose(1, 2)
        mixed = (heads @ heads.transpose(2, 3)).softmax(-1) @ heads
        return mixed.transpose(1, 2).reshape(*x.shape[:-1], -1)

    def _fixed_heads(self, x: torch.Tensor) -> torch.Tensor:
        # The features that are missing are taken from among the tokens.
        return self.up(x).view(x.shape[0], -1, 4, 4).relu().flatten(2)

    def _one_head(self, x: torch.Tensor) -> torch.Tensor:
        features = self.up(x)
        return (features @ features.transpose(1, 2)).softmax(-1) @ features

    def _halves(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return gate.sigmoid() * value

    def _gate(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.glu(self.up(x))

    def _fused(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.up(x).tensor_split(3, -1)
        return one * two + three

    def _heads_of_fused(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.up(x).view(*x.shape[:-1], 3, -1, 4).unbind(2)
        return (one * two + three).flatten(2)

    def _order(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).unflatten(-1, (-1, 4)).transpose(2, 3).flatten(2)

    def _shares(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).softmax(-1)

    def _relu(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).relu()


class Blocks(nn.Module):
    def __init__(self, between: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Parts(between) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _between(kind: str) -> ModelGraph:
    return capture(lambda: Blocks(kind), {"x": ((2, 8, 16), "float32")})


@pytest.mark.parametrize("kind", ["relu", "free-heads"])
def test_code_for_any_number_of_features_is_split(kind: str) -> None:
    graph = _between(kind)
    assert graph.sharding == {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    assert graph.whole == {}
    assert graph.whole_stream is None
    # Between them tokens see each other by attention, or not at all.
    assert graph.mixing == (tuple(graph.sharding) if kind == "free-heads" else ())


@pytest.mark.parametrize(
    "kind",
    [
        "fixed-heads",
        "one-head",
        "halves",
        "gate",
        "fused",
        "heads-of-fused",
        "order",
        "shares",
    ],
)
def test_code_that_needs_all_features_at_once_is_left_whole(kind: str) -> None:
    graph = _between(kind)
    assert graph.sharding == {}
    assert set(graph.whole) == {"blocks.*.up", "blocks.*.down"}
