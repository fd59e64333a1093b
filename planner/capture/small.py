"""Small models: every kind of layer, few of each.

Configurations of transformers are made small, and modules lose layers. Numbers that
only say how much of a thing there is (layers, heads, features, experts, words) are made
small together, so that what they share (features = heads x features of a head) still
holds. Everything else stays as it is.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

__all__ = ["small_config", "small_module"]

#: What a field counts, by its name.
_COUNTS = {
    "layers": r"(num_)?(encoder_|decoder_)?(hidden_)?(num_)?n?_?layers?",
    "heads": r"((encoder_|decoder_|n_|num_)(attention_)?|num_(en|de)coder_attention_"
    r"|attention_|mamba_n(um)?_|index_n_|linear_num_(key_|value_)?)heads?",
    "kv_heads": r"(num_key_value_heads|num_kv_heads|n_head_kv|num_query_groups)",
    "head_size": r"(\w*head_dim|attention_head_size|d_kv|kv_channels|d_head"
    r"|mamba_d_head|rotary_dim)",
    "width": r"(hidden_size|d_model|n_embd|embedding_size|dim|hidden_dim"
    r"|word_embed_proj_dim|emb_dim|entity_emb_size|hidden_size_per_layer_input)",
    "inner": r"(\w*intermediate_size\w*|\w*ffn_dim|n_inner|d_ff|d_inner|mamba_d_ssm"
    r"|attention_hidden_size|\w*ffn_hidden_size|\w*lora_rank|laurel_rank)",
    "experts": r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts"
    r"|zero_expert_num)",
    "chosen": r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k"
    r"|top_k_experts)",
    "groups": r"(n_group|topk_group|num_expert_group)",
    "state_groups": r"(mamba_)?n_groups",
    "state": r"(ssm_|mamba_d_|d_)?state(_size)?",
    "chunk": r"(mamba_)?chunk_size",
    "words": r"\w*vocab_size\w*|encoder_hash_byte_group_vocab",
    "positions": r"(max_position_embeddings|n_positions|max_seq_len)",
    "dropout": r"\w*(dropout|drop|pdrop|layerdrop|drop_path|jitter_noise)"
    r"(_rate|_prob)?",
    "word": r"\w*_token_id",
}
_EXPRESSIONS = {role: re.compile(text) for role, text in _COUNTS.items()}
_HEADS, _WORDS, _POSITIONS, _EXPERTS, _STATE, _CHUNK = 4, 96, 128, 4, 16, 8
#: Features of a model without heads.
_WIDTH = 64
#: Names and places of a backbone's layers, which follow from their number.
_OF_STAGES = frozenset({"stage_names", "out_features", "out_indices"})
#: Features come in eights, which rotary pairs and grouped norms divide.
_STEP = 8


def _role(name: str) -> str | None:
    return next((r for r, e in _EXPRESSIONS.items() if e.fullmatch(name)), None)


def small_config(config: Any, *, layers: int = 4, head_size: int | None = None) -> Any:
    """A config of the same class with small numbers.

    Args:
        config: Of transformers.
        layers: Most layers; where layers are of several kinds, at least one of each.
        head_size: Features of a head; None to keep them.

    Returns:
        A new config. It may be one that no model can be built from: try it.
    """
    data = config.to_dict()
    made = type(config).from_dict(_small(data, layers, head_size))
    if hasattr(made, "use_cache"):
        made.use_cache = False
    return made


def _small(
    data: Mapping[str, Any], layers: int, head_size: int | None
) -> dict[str, Any]:
    kept = _kept(data, layers)
    scale = _scales(data, layers if kept is None else len(kept), head_size)
    small: dict[str, Any] = {}
    for key, value in data.items():
        role = _role(key) or ""
        if isinstance(value, Mapping) and "model_type" in value:
            small[key] = _small(value, layers, head_size)
        elif kept is not None and key in _OF_STAGES:
            continue
        elif role == "dropout" and isinstance(value, float):
            small[key] = 0.0
        else:
            value = _of_layers(key, value, data, kept, layers)
            small[key] = _scaled(value, scale.get(role), scale)
    parts = [small.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if small.get("qk_head_dim") and all(parts):
        small["qk_head_dim"] = sum(parts)
    return small


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _scaled(
    value: Any,
    made: Callable[[int], int] | None,
    scale: Mapping[str, Callable[[int], int]],
) -> Any:
    """A field with its counts made small, in lists and tables by layer too."""
    if isinstance(value, Mapping):
        return {
            key: _scaled(one, scale.get(_role(str(key)) or ""), scale)
            for key, one in value.items()
        }
    if made is None:
        return value
    if isinstance(value, list):
        return [made(n) if _is_count(n) else n for n in value]
    return made(value) if _is_count(value) else value


def _scales(
    data: Mapping[str, Any], layers: int, head_size: int | None
) -> dict[str, Callable[[int], int]]:
    """Map each role to the function that makes its counts small."""

    def first(role: str) -> Any:
        return next((v for k, v in data.items() if _role(k) == role and v), None)

    heads, width = first("heads"), first("width")
    known = _is_count(heads) and _is_count(width)
    size = data.get("head_dim") or (width // heads if known else None)
    fewer = min(1.0, _HEADS / heads) if _is_count(heads) else 1.0
    if not _is_count(heads) and _is_count(width):
        fewer = min(1.0, _WIDTH / width)
    narrower = min(1.0, head_size / size) if head_size and size else 1.0

    def features(n: int, share: float) -> int:
        return max(_STEP, round(n * share / _STEP) * _STEP) if share < 1 else n

    return {
        "layers": lambda n: min(n, layers),
        "heads": lambda n: max(1, round(n * fewer)),
        "kv_heads": lambda n: max(min(n, 2), round(n * fewer)),
        "head_size": lambda n: features(n, narrower),
        "width": lambda n: features(n, fewer * narrower),
        "inner": lambda n: features(n, fewer * narrower),
        "experts": lambda n: min(n, _EXPERTS),
        "chosen": lambda n: min(n, _EXPERTS // 2),
        "groups": lambda _: 1,
        "state_groups": lambda n: min(n, 2),
        "state": lambda n: min(n, _STATE),
        "chunk": lambda n: min(n, _CHUNK),
        "words": lambda n: min(n, _WORDS),
        "positions": lambda n: min(n, _POSITIONS),
        "word": lambda n: n % _WORDS,
    }


# -- Which layers are kept -------------------------------------------------------


def _depth(data: Mapping[str, Any]) -> int | None:
    """Layers, where a config says how many."""
    kinds = data.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return len(kinds)
    counts = (n for k, n in data.items() if _role(k) == "layers")
    return next((n for n in counts if _is_count(n) and n), None)


def _shares(data: Mapping[str, Any], index: int) -> bool:
    """True if a layer reads the keys and values of an earlier one."""
    return index >= (_depth(data) or 0) - (data.get("num_kv_shared_layers") or 0)


def _kept(data: Mapping[str, Any], layers: int) -> list[int] | None:
    """Return the layers to keep, the first of each kind among them, or None.

    A layer's kind is what the lists of the config with one word for each layer say of
    it, with whether it has a config of its own and shares keys and values.
    """
    depth = _depth(data)
    if depth is None:
        return None
    lists = [
        value
        for value in data.values()
        if isinstance(value, list)
        and len(value) == depth
        and all(isinstance(one, str | bool) for one in value)
    ]
    own = {int(key) for key in data.get("per_layer_config") or {}}
    kinds = [
        (*words, index in own, _shares(data, index))
        for index, words in enumerate(zip(*lists, strict=True))
    ]
    first = {kind: kinds.index(kind) for kind in kinds}.values()
    others = [index for index in range(depth) if index not in first]
    return sorted({*first, *others[: max(0, layers - len(first))]})


def _of_layers(
    key: str,
    value: Any,
    data: Mapping[str, Any],
    kept: Sequence[int] | None,
    layers: int,
) -> Any:
    """A field without what it says of layers that are not kept."""
    if key == "attention_types" and isinstance(value, list):
        return [[kinds, max(1, layers // len(kinds))] for kinds, _ in value]
    if kept is None:
        return value
    if key == "num_kv_shared_layers" and _is_count(value):
        return sum(_shares(data, index) for index in kept)
    if key == "per_layer_config" and isinstance(value, Mapping):
        return {
            kept.index(int(at)): one for at, one in value.items() if int(at) in kept
        }
    if isinstance(value, list) and len(value) == _depth(data):
        return [value[index] for index in kept]
    return value


def small_module(module: nn.Module, *, layers: int) -> nn.Module:
    """Return a copy with the first layers of each kind of every stack.

    Stacks are ``ModuleList`` and ``Sequential``; layers of one class whose parameters
    have the same shapes are of one kind, and those without parameters stay. Forwards
    that go through fewer layers run, those that count them elsewhere do not.

    Args:
        module: Any module; it stays as it is, and the copy shares its parameters.
        layers: Layers of each kind that are kept.
    """
    shared = {id(one): one for one in chain(module.parameters(), module.buffers())}
    small = copy.deepcopy(module, shared)
    for stack in list(small.modules()):
        if not isinstance(stack, nn.ModuleList | nn.Sequential):
            continue
        of_kind, kept = Counter[object](), dict[str, nn.Module]()
        for name, layer in stack._modules.items():
            shapes = _shapes(layer)
            of_kind[type(layer), shapes] += 1
            if not shapes or of_kind[type(layer), shapes] <= layers:
                kept[str(len(kept)) if name.isdigit() else name] = layer
        stack._modules = kept
    return small


def _shapes(layer: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(one.shape)) for name, one in layer.named_parameters())
