"""Configs recognised by their content, and read."""

from __future__ import annotations

import re
from collections.abc import Callable

from pydantic import ValidationError

from planner.errors import PlanFileError, StrategyError, UnknownNameError
from planner.imports.accelerate import accelerate_strategy
from planner.imports.base import Imported, Wanted
from planner.imports.deepspeed import deepspeed_strategy
from planner.imports.files import read_mapping
from planner.imports.megatron import megatron_text
from planner.imports.nanotron import nanotron_strategy
from planner.imports.shell import is_script
from planner.imports.torchtitan import is_recipe, torchtitan_text
from planner.imports.trainers import axolotl_strategy, llamafactory_strategy
from planner.schema.base import first_problem

__all__ = ["SOURCES", "detect_source", "import_text"]

#: Launchers whose configs are read.
SOURCES = (
    *("megatron", "accelerate", "deepspeed", "nanotron", "torchtitan"),
    *("axolotl", "llamafactory"),
)

#: Keys by which each format is recognised.
_KEYS: dict[str, frozenset[str]] = {
    "accelerate": frozenset(
        {"distributed_type", "compute_environment", "num_machines", "mixed_precision"}
    ),
    "deepspeed": frozenset(
        {
            *("train_batch_size", "train_micro_batch_size_per_gpu", "fp16"),
            *("zero_optimization", "gradient_accumulation_steps", "bf16"),
            *("zero_allow_untested_optimizer", "gradient_clipping"),
        }
    ),
    "nanotron": frozenset({"parallelism", "tokens", "data_stages", "optimizer"}),
    "axolotl": frozenset(
        {
            *("base_model", "micro_batch_size", "sequence_len", "datasets"),
            *("gradient_accumulation_steps", "fsdp_version", "val_set_size"),
        }
    ),
    "llamafactory": frozenset(
        {
            *("model_name_or_path", "finetuning_type", "per_device_train_batch_size"),
            *("stage", "cutoff_len", "template", "gradient_accumulation_steps"),
        }
    ),
    "strategy": frozenset(
        {"mesh", "zero_stage", "num_microbatches", "microbatch_size", "stages"}
    ),
}


def detect_source(text: str, where: str) -> str:
    """One of :data:`SOURCES`, ``plan`` or ``strategy``.

    Args:
        text: The whole file.
        where: Its name, for messages.

    Raises:
        PlanFileError: If it is none of them.
    """
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and line[0] not in "#;"), "")
    if (first.startswith("--") and not first.startswith("---")) or text[:2] == "#!":
        return "megatron"
    if is_recipe(text) or _is_toml(text):
        return "torchtitan"
    try:
        data = read_mapping(text, where)
    except PlanFileError:
        if is_script(text):
            return "megatron"
        raise
    if "strategy" in data and ("schema_version" in data or "prediction" in data):
        return "plan"
    found = {name: len(keys & set(data)) for name, keys in _KEYS.items()}
    best = max(found, key=lambda name: found[name])
    if not found[best]:
        raise PlanFileError(
            f"{where} is not a known config: a plan, a strategy, accelerate's YAML, "
            f"DeepSpeed's JSON, Megatron's arguments or script, nanotron's YAML, a "
            f"recipe or TOML of torchtitan, axolotl's or LlamaFactory's YAML; name it "
            f"with --format"
        )
    return best


def _is_toml(text: str) -> bool:
    first = next(
        (line for line in text.splitlines() if line.strip() and line[0] != "#"), ""
    )
    return bool(re.fullmatch(r"\[[a-z_.]+\]\s*(#.*)?", first))


def import_text(
    source: str,
    text: str,
    wanted: Wanted,
    where: str,
) -> Imported:
    """A config as a strategy.

    Args:
        source: One of :data:`SOURCES`.
        text: The file, or Megatron's arguments as in a shell.
        wanted: Values that it lacks.
        where: Its path, for messages and for files that it names.

    Raises:
        PlanFileError: If it is not YAML, JSON, TOML, Python or words of a shell.
        StrategyError: If it contradicts itself, or keys that may change the strategy
            are not known.
        UnknownNameError: If there is no such source.
    """
    if source not in _READERS:
        raise UnknownNameError("config format", source, SOURCES)
    if wanted.recipe and source != "torchtitan":
        raise StrategyError(
            f"--recipe {wanted.recipe} names a function of a Python file of "
            f"torchtitan, and this is a config of {source}; leave it out"
        )
    if wanted.script_words and source != "megatron":
        raise StrategyError(
            f"--args gives words of a script that starts Megatron-LM, and this is a "
            f"config of {source}; leave it out"
        )
    try:
        return _READERS[source](text, wanted, where)
    except ValidationError as error:
        # A value that the config's own rules let pass, and a strategy's do not.
        problem = first_problem(error, "strategy")
        raise StrategyError(f"{where} as a strategy: {problem}; correct it") from error


def _deepspeed(text: str, wanted: Wanted, where: str) -> Imported:
    return deepspeed_strategy(read_mapping(text, where), wanted)


def _accelerate(text: str, wanted: Wanted, where: str) -> Imported:
    return accelerate_strategy(read_mapping(text, where), wanted, where)


def _nanotron(text: str, wanted: Wanted, where: str) -> Imported:
    return nanotron_strategy(read_mapping(text, where), wanted)


def _axolotl(text: str, wanted: Wanted, where: str) -> Imported:
    return axolotl_strategy(read_mapping(text, where), wanted, where)


def _llamafactory(text: str, wanted: Wanted, where: str) -> Imported:
    return llamafactory_strategy(read_mapping(text, where), wanted, where)


_READERS: dict[str, Callable[[str, Wanted, str], Imported]] = {
    "megatron": megatron_text,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "nanotron": _nanotron,
    "torchtitan": torchtitan_text,
    "axolotl": _axolotl,
    "llamafactory": _llamafactory,
}
