"""Sizes and plans of shards that a model's config gives."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from planner.adapters import add_adapter_styles
from planner.capture.private_apis import names_of_modules

__all__ = ["ConfigFacts", "config_facts", "expert_patterns"]

#: Fact to the names that transformers configs give it, best first.
_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers"),
    "vocab_size": ("vocab_size",),
    "intermediate_size": (
        "intermediate_size",
        "n_inner",
        "d_ff",
        "encoder_ffn_dim",
    ),
    "num_heads": (
        "num_attention_heads",
        "n_head",
        "num_heads",
        "encoder_attention_heads",
    ),
    "num_key_value_heads": ("num_key_value_heads",),
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """Sizes and plan that a model's config gives; empty for a module without one.

    Attributes:
        config: Facts worth showing, by name.
        dims: The integers among them.
        vocab_size: Bound of token ids.
        max_length: Longest sequence that the config names.
        has_cache: True if forward takes ``use_cache``.
        tp_plan: Pattern of module names to Hugging Face style.
    """

    config: Mapping[str, int | float | str] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    vocab_size: int | None = None
    max_length: int | None = None
    has_cache: bool = False
    tp_plan: Mapping[str, str] = field(default_factory=dict)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = None
        # Configs of unlike layers refuse to say what differs among them.
        with contextlib.suppress(Exception):
            value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _tp_plan(module: torch.nn.Module, config: Any) -> dict[str, str]:
    """Hugging Face's plan, its patterns with the prefix of the base model."""
    found: dict[str, str] = {}
    prefix = getattr(module, "base_model_prefix", "")
    inner = bool(prefix) and isinstance(getattr(module, prefix, None), torch.nn.Module)
    base = getattr(config, "base_model_tp_plan", None)
    if isinstance(base, Mapping):
        lead = f"{prefix}." if inner else ""
        found.update({f"{lead}{key}": str(style) for key, style in base.items()})
    own = getattr(type(module), "_tp_plan", None)
    if isinstance(own, Mapping):
        found.update({str(key): str(style) for key, style in own.items()})
    return add_adapter_styles(module, found)


def expert_patterns(module: torch.nn.Module) -> dict[str, Literal["experts"]]:
    """Patterns of the modules whose experts ep can divide.

    Such a module is called as ``experts(tokens, chosen, weights)``, has ``num_experts``
    and parameters of that first dimension, as those of transformers 5.
    """
    found: dict[str, Literal["experts"]] = {}
    for part, name in names_of_modules(module).items():
        count = getattr(part, "num_experts", None)
        if not isinstance(count, int):
            continue
        shapes = [parameter.shape for parameter in part.parameters()]
        stacked = all(len(shape) > 1 and shape[0] == count for shape in shapes)
        if shapes and stacked and _takes_routing(part):
            pattern = ".".join("*" if p.isdigit() else p for p in name.split("."))
            found[pattern] = "experts"
    return found


def _takes_routing(part: torch.nn.Module) -> bool:
    needed = [
        parameter
        for parameter in inspect.signature(part.forward).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in needed)
    return variadic or len(needed) == 3


def config_facts(module: torch.nn.Module) -> ConfigFacts:
    """Read the config of a transformers model, or of one that keeps its own alike."""
    config = getattr(module, "config", None)
    if config is None or isinstance(config, Mapping):
        return ConfigFacts()
    nested = getattr(config, "text_config", None)
    source = nested if nested is not None else config
    dims = {
        fact: value
        for fact, names in _NAMES.items()
        if (value := _first(source, names)) is not None
    }
    shown: dict[str, int | float | str] = dict(dims)
    kind = getattr(config, "model_type", None)
    if isinstance(kind, str):
        shown["model_type"] = kind
    lengths = ("max_position_embeddings", "n_positions", "max_source_positions")
    return ConfigFacts(
        config=shown,
        dims=dims,
        vocab_size=dims.get("vocab_size"),
        max_length=_first(source, lengths),
        has_cache=hasattr(source, "use_cache"),
        tp_plan=_tp_plan(module, config),
    )
