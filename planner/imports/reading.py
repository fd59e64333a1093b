"""Configs recognised by their content, and read."""

from __future__ import annotations

import shlex
from typing import Any

from pydantic import ValidationError

from planner.errors import PlanFileError, StrategyError, UnknownNameError
from planner.imports.accelerate import accelerate_strategy
from planner.imports.base import Imported, Wanted
from planner.imports.deepspeed import deepspeed_strategy
from planner.imports.megatron import megatron_strategy
from planner.reading import parse_json
from planner.schema.base import first_problem
from planner.yaml_reading import parse_yaml

__all__ = ["SOURCES", "detect_source", "import_text"]

#: Launchers whose configs are read.
SOURCES = ("megatron", "accelerate", "deepspeed")

_ACCELERATE = {"distributed_type", "compute_environment", "fsdp_config", "num_machines"}
_DEEPSPEED = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"),
    *("gradient_accumulation_steps", "bf16", "fp16", "zero_allow_untested_optimizer"),
}
_STRATEGY = {"mesh", "zero_stage", "num_microbatches", "microbatch_size", "stages"}


def detect_source(text: str, where: str) -> str:
    """``megatron``, ``accelerate``, ``deepspeed``, ``plan`` or ``strategy``.

    Args:
        text: The whole file.
        where: Its name, for messages.

    Raises:
        PlanFileError: If it is none of them.
    """
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and line[0] != "#"), "")
    if first.startswith("--") and not first.startswith("---"):
        return "megatron"
    data = _mapping(text, where)
    if "strategy" in data and ("schema_version" in data or "prediction" in data):
        return "plan"
    found = {
        "accelerate": len(_ACCELERATE & set(data)),
        "deepspeed": len(_DEEPSPEED & set(data)),
        "strategy": len(_STRATEGY & set(data)),
    }
    best = max(found, key=lambda name: found[name])
    if not found[best]:
        raise PlanFileError(
            f"{where} is not a known config: a plan, a strategy, accelerate's "
            f"YAML, DeepSpeed's JSON or Megatron's arguments; name it with --format"
        )
    return best


def import_text(
    source: str, text: str, wanted: Wanted, where: str, *, recompute: Any = "none"
) -> Imported:
    """A config as a strategy.

    Args:
        source: One of :data:`SOURCES`.
        text: The file, or Megatron's arguments as in a shell.
        wanted: Values that it lacks.
        where: Its name, for messages.
        recompute: Activations that a training script for DeepSpeed recomputes.

    Raises:
        PlanFileError: If it is not YAML, JSON or words of a shell.
        StrategyError: If it contradicts itself.
        UnknownNameError: If there is no such source, or a key is not known.
    """
    try:
        return _imported(source, text, wanted, where, recompute)
    except ValidationError as error:
        # A value that the config's own rules let pass, and a strategy's do not.
        problem = first_problem(error, "strategy")
        raise StrategyError(f"{where} as a strategy: {problem}; correct it") from error


def _imported(
    source: str, text: str, wanted: Wanted, where: str, recompute: Any
) -> Imported:
    if source == "megatron":
        try:
            words = shlex.split(text, comments=True)
        except ValueError as error:
            raise PlanFileError(f"{where}: not words of a shell: {error}") from error
        return megatron_strategy(words, wanted)
    if source not in SOURCES:
        raise UnknownNameError("config format", source, SOURCES)
    data = _mapping(text, where)
    if source == "accelerate":
        return accelerate_strategy(data, wanted)
    return deepspeed_strategy(data, wanted, recompute=recompute)


def _mapping(text: str, where: str) -> dict[str, Any]:
    """JSON or YAML; JSON first, whose errors say more."""
    as_json = text.lstrip()[:1] == "{"
    parse = parse_json if as_json else parse_yaml
    data = parse(text, where, "config")
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise PlanFileError(f"{where}: not a mapping of keys to values")
    return data
