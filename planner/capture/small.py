"""Small configurations of a transformers model: every kind of layer, few of each.

Numbers that only say how much of a thing there is (layers, heads, features, experts,
words) are made small together, so that what they share (features = heads x features of
a head) still holds. Everything else stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["small_config"]

#: What a field counts, by its name.
_COUNTS = {
    "layers": r"(num_)?(encoder_|decoder_)?(hidden_)?(num_)?n?_?layers?",
    "heads": r"(encoder_|decoder_|n_|num_)(attention_)?heads?|num_attention_heads",
    "kv_heads": r"(num_key_value_heads|num_kv_heads|n_head_kv|num_query_groups)",
    "head_size": r"(head_dim|attention_head_size|d_kv|kv_channels|d_head)",
    "width": r"(hidden_size|d_model|n_embd|embedding_size|dim|hidden_dim)",
    "inner": r"(\w*intermediate_size\w*|\w*ffn_dim|n_inner|d_ff|d_inner"
    r"|\w*ffn_hidden_size)",
    "experts": r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)",
    "chosen": r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k"
    r"|top_k_experts)",
    "groups": r"(n_group|topk_group|num_expert_group)",
    "words": r"vocab_size",
    "positions": r"(max_position_embeddings|n_positions|max_seq_len)",
    "dropout": r"\w*(dropout|drop|pdrop|layerdrop|drop_path|jitter_noise)"
    r"(_rate|_prob)?",
    "word": r"\w*_token_id",
}
_EXPRESSIONS = {role: re.compile(text) for role, text in _COUNTS.items()}
_HEADS, _HEAD_SIZE, _WORDS, _POSITIONS, _EXPERTS = 4, 16, 96, 128, 4


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
    heads = next((v for k, v in data.items() if _role(k) == "heads" and v), None)
    width = next((v for k, v in data.items() if _role(k) == "width" and v), None)
    fewer = _HEADS / heads if isinstance(heads, int) else 1.0
    size = width // heads if isinstance(heads, int) and width else None
    narrower = head_size / size if head_size and size else 1.0
    kinds = _kinds(data, layers)
    scale: dict[str, Callable[[int], int]] = {
        "layers": lambda n: len(kinds[1]) if kinds else min(n, layers),
        "heads": lambda n: max(1, round(n * fewer)),
        "kv_heads": lambda n: max(min(n, 2), round(n * fewer)),
        "head_size": lambda n: max(1, round(n * narrower)),
        "width": lambda n: max(8, round(n * fewer * narrower) // 8 * 8),
        "inner": lambda n: max(8, round(n * fewer * narrower) // 8 * 8),
        "experts": lambda n: min(n, _EXPERTS),
        "chosen": lambda n: min(n, _EXPERTS // 2),
        "groups": lambda _: 1,
        "words": lambda n: min(n, _WORDS),
        "positions": lambda n: min(n, _POSITIONS),
        "word": lambda n: n % _WORDS,
    }
    small: dict[str, Any] = {}
    for key, value in data.items():
        role = _role(key) or ""
        small[key] = value
        if isinstance(value, Mapping) and key.endswith("_config"):
            small[key] = _small(value, layers, head_size)
        elif isinstance(value, list) and kinds and len(value) == kinds[0]:
            small[key] = [value[index] for index in kinds[1]]
        elif role == "dropout" and isinstance(value, float):
            small[key] = 0.0
        elif role in scale and isinstance(value, int) and not isinstance(value, bool):
            small[key] = scale[role](value)
    return small


def _kinds(data: Mapping[str, Any], layers: int) -> tuple[int, list[int]] | None:
    """Layers to keep where a list names the kind of each: their number, and indices."""
    kinds = data.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return None
    first = sorted({kind: at for at, kind in reversed(list(enumerate(kinds)))}.values())
    kept = sorted(
        {*first, *range(min(len(kinds), layers))} if len(first) < layers else first
    )
    while len(kept) > max(layers, len(first)):
        kept.remove(next(i for i in reversed(kept) if i not in first))
    return len(kinds), kept
