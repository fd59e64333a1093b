"""Configs of transformers for the shapes that measurements name.

What is priced for a measurement is what ``plan`` prices for a user's model: the graph
of a class of transformers, captured. A shape that no class has takes the nearest: GPTs
without biases have some, experts without a gate have one and two thirds of the width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from planner.graph import ModelGraph
from planner.measurements.known_models import ModelShape

if TYPE_CHECKING:
    from torch import nn

    from planner.capture import LoadedModel

__all__ = ["config_of", "graph_of", "model_of"]

#: Names that most configs share.
_COMMON = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "vocab_size": "vocab",
    "max_position_embeddings": "seq",
    "tie_word_embeddings": "tied",
}


def config_of(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a config: ``model_type`` and what describes the shape.

    Args:
        shape: Figures of a model.
    """
    made = {"gpt": _gpt, "bert": _bert, "llama": _llama, "moe": _moe}
    made |= {"deepseek": _deepseek, "hybrid": _hybrid}
    return made[shape.family](shape)


def _common(shape: ModelShape, **more: Any) -> dict[str, Any]:
    return {key: getattr(shape, name) for key, name in _COMMON.items()} | more


def _grouped(shape: ModelShape, **more: Any) -> dict[str, Any]:
    """Fields of models with grouped queries and heads of any size."""
    return _common(
        shape,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        intermediate_size=shape.inner,
        **more,
    )


def _gpt(shape: ModelShape) -> dict[str, Any]:
    """GPT-2 where positions are learned; Nemotron where queries are grouped.

    Nemotron has rotary positions, norms with biases and an MLP without a gate.
    """
    if shape.experts:
        return _gpt_with_experts(shape)
    even = shape.heads * shape.head_size == shape.hidden
    if shape.positions and even and shape.kv_heads == shape.heads:
        return {
            "model_type": "gpt2",
            "n_embd": shape.hidden,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_inner": shape.inner,
            "n_positions": shape.seq,
            "vocab_size": shape.vocab,
            "activation_function": shape.activation,
            "tie_word_embeddings": shape.tied,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    return _grouped(
        shape,
        model_type="nemotron",
        hidden_act=shape.activation,
        attention_bias=shape.bias,
        mlp_bias=shape.bias,
    )


def _gpt_with_experts(shape: ModelShape) -> dict[str, Any]:
    """Gated MLPs of two thirds of the width: of as many weights and FLOPs."""
    narrow = {
        name: 64 * max(1, round(getattr(shape, name) / 96))
        for name in ("inner", "expert_inner")
    }
    return _moe(replace(shape, **narrow)) | {"hidden_act": "gelu"}


def _bert(shape: ModelShape) -> dict[str, Any]:
    return _common(
        shape,
        model_type="bert",
        architectures=["BertForMaskedLM"],
        intermediate_size=shape.inner,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _llama(shape: ModelShape) -> dict[str, Any]:
    kind = "qwen3" if shape.qk_norm else "llama"
    return _grouped(shape, model_type=kind)


def _moe(shape: ModelShape) -> dict[str, Any]:
    """Mixtral, or where only some layers have experts or all tokens see one, Qwen's.

    Qwen3 normalises queries and keys, which is little beside the rest.
    """
    plain = shape.expert_every == 1 and not (shape.qk_norm or shape.shared_inner)
    if plain:
        return _grouped(
            shape,
            model_type="mixtral",
            num_local_experts=shape.experts,
            num_experts_per_tok=shape.experts_per_token,
        ) | {"intermediate_size": shape.expert_inner}
    shared = {"shared_expert_intermediate_size": shape.shared_inner}
    return _grouped(
        shape,
        model_type="qwen2_moe" if shape.shared_inner else "qwen3_moe",
        moe_intermediate_size=shape.expert_inner,
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        decoder_sparse_step=shape.expert_every,
        **(shared if shape.shared_inner else {}),
    )


def _deepseek(shape: ModelShape) -> dict[str, Any]:
    # DeepSeek-AI 2024 (arXiv:2412.19437), section 4.2: eight groups of experts.
    groups = 8 if shape.experts >= 64 and shape.experts % 8 == 0 else 1
    return _common(
        shape,
        model_type="deepseek_v3",
        n_group=groups,
        topk_group=max(1, groups // 2),
        num_key_value_heads=shape.heads,
        intermediate_size=shape.inner,
        moe_intermediate_size=shape.expert_inner,
        n_routed_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        n_shared_experts=shape.shared_inner // shape.expert_inner,
        first_k_dense_replace=shape.dense_first,
        q_lora_rank=shape.query_rank or None,
        kv_lora_rank=shape.key_rank,
        qk_nope_head_dim=shape.head_size,
        v_head_dim=shape.head_size,
        qk_rope_head_dim=shape.rotary_size,
    )


#: Layers of Nemotron-H by letter.
_LAYERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _hybrid(shape: ModelShape) -> dict[str, Any]:
    return _grouped(
        shape,
        model_type="nemotron_h",
        layers_block_type=[_LAYERS[letter] for letter in shape.pattern],
        mamba_num_heads=shape.scan_heads,
        mamba_head_dim=shape.scan_head_size,
        n_groups=shape.scan_groups,
        ssm_state_size=shape.scan_state,
        n_routed_experts=shape.experts or 1,
        num_experts_per_tok=shape.experts_per_token or 1,
        moe_intermediate_size=shape.expert_inner or shape.inner,
        moe_latent_size=shape.latent or None,
        moe_shared_expert_intermediate_size=shape.shared_inner or shape.inner,
    )


def model_of(shape: ModelShape) -> LoadedModel:
    """Return the model of a shape, to be built.

    Args:
        shape: Figures of a model.
    """
    from planner.capture import load_config

    name = f"{shape.family} of {shape.layers} x {shape.hidden}"
    return load_config(config_of(shape), name=name, seq_len=shape.seq)


@cache
def graph_of(shape: ModelShape, *, frozen: bool = False) -> ModelGraph:
    """Return the captured graph of a shape, for one sample in bfloat16.

    Graphs are kept in memory, one for each shape.

    Args:
        shape: Figures of a model.
        frozen: True if its matrices are not trained; gradients pass all layers.
    """
    from planner.capture import capture

    model = model_of(shape)
    if frozen:
        model = replace(model, build=lambda: _without_matrices(model_of(shape)))
    return capture(model, splits=_splits())


def _without_matrices(model: LoadedModel) -> nn.Module:
    module = model.build()
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.dim() < 2)
    return module


#: Layers by the way in which Megatron-LM's tp divides them (Shoeybi et al. 2019,
#: arXiv:1909.08053), whichever class holds them.
_SPLITS = {
    "embedding_rowwise": """
        model.embed_tokens model.embeddings transformer.wte
        bert.embeddings.word_embeddings
    """,
    "colwise": """
        lm_head cls.predictions.decoder
        transformer.h.*.attn.c_attn transformer.h.*.mlp.c_fc
        bert.encoder.layer.*.attention.self.query
        bert.encoder.layer.*.attention.self.key
        bert.encoder.layer.*.attention.self.value
        bert.encoder.layer.*.intermediate.dense
        model.layers.*.self_attn.q_proj model.layers.*.self_attn.k_proj
        model.layers.*.self_attn.v_proj model.layers.*.self_attn.q_b_proj
        model.layers.*.self_attn.kv_b_proj
        model.layers.*.mlp.gate_proj model.layers.*.mlp.up_proj
        model.layers.*.mlp.shared_expert.gate_proj
        model.layers.*.mlp.shared_expert.up_proj
        model.layers.*.mlp.shared_experts.gate_proj
        model.layers.*.mlp.shared_experts.up_proj
        model.layers.*.mixer.q_proj model.layers.*.mixer.k_proj
        model.layers.*.mixer.v_proj model.layers.*.mixer.up_proj
        model.layers.*.mixer.in_proj model.layers.*.mixer.shared_experts.up_proj
    """,
    "rowwise": """
        transformer.h.*.attn.c_proj transformer.h.*.mlp.c_proj
        bert.encoder.layer.*.attention.output.dense bert.encoder.layer.*.output.dense
        model.layers.*.self_attn.o_proj model.layers.*.mlp.down_proj
        model.layers.*.mlp.shared_expert.down_proj
        model.layers.*.mlp.shared_experts.down_proj
        model.layers.*.mixer.o_proj model.layers.*.mixer.out_proj
        model.layers.*.mixer.down_proj model.layers.*.mixer.shared_experts.down_proj
    """,
}


@cache
def _splits() -> dict[str, str]:
    """Pattern of module names to style."""
    return {name: style for style, names in _SPLITS.items() for name in names.split()}
