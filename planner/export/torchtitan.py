"""Configs of torchtitan: a Python recipe for 0.3.0, a TOML file for 0.2.2.

A recipe is a function that returns a Trainer.Config; 0.2.2 is the last release that
reads TOML. Model, data, tokenizer, learning-rate schedule and checkpoints are those of
torchtitan's own recipe, or of your arguments; the plan sets the rest.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from planner.export.torchrun import about, sequence_length, torchrun_script
from planner.targets.layers import layers_of_stages
from planner.targets.torchtitan import torchtitan_parts

if TYPE_CHECKING:
    from planner.schema import Plan, Strategy

__all__ = ["export_torchtitan", "export_torchtitan_toml"]

_RECOMPUTE = {"none": None, "selective": "SelectiveAC", "full": "FullAC"}

_RECIPE = '''"""Recipe for torchtitan 0.3.0, written by Meshwright; run.sh starts it."""

{comments}

import dataclasses
import importlib
import os

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config import CompileConfig, ParallelismConfig
{imports}from torchtitan.trainer import Trainer

# Where model, data, tokenizer, learning-rate schedule and checkpoints are from: a
# recipe, module:function.
BASE = os.environ.get(
    "TORCHTITAN_BASE", {base}
)
# Layers of the model that was planned; None if they have no numbers.
LAYERS = {layers}


def _base() -> Trainer.Config:
    module, _, function = BASE.partition(":")
    if not function:
        raise ValueError(
            f"TORCHTITAN_BASE={{BASE!r}} must name a recipe of the planned model, "
            f"module:function"
        )
    base = getattr(importlib.import_module(module), function)()
    model = base.model_spec.model
    if LAYERS is not None and len(model.layers) != LAYERS:
        raise ValueError(
            f"TORCHTITAN_BASE={{BASE!r}} has {{len(model.layers)}} layers, the plan is "
            f"for {{LAYERS}}; choose the recipe of the planned model"
        )
    if has_quantization(model):
        raise ValueError(
            f"TORCHTITAN_BASE={{BASE!r}} is quantized, the plan is not; choose one "
            f"that is not"
        )
    return base


def meshwright() -> Trainer.Config:
    base = _base()
    return dataclasses.replace(
        base,
        training=dataclasses.replace(
            base.training,
{training}
        ),
        parallelism=ParallelismConfig(
{parallelism}
        ),
        activation_checkpoint={recompute},
        compile=CompileConfig(enable={compile}, components=["model"]),
        optimizer=OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=r".*",
                    optimizer_name={optimizer},
                    optimizer_kwargs={{
                        # What nobody gave stays the recipe's.
                        **base.optimizer.param_groups[-1].optimizer_kwargs,
{optimizer_kwargs}
                    }},
                )
            ],
            implementation={implementation},
        ),
    )
'''


@cache
def _models() -> Mapping[str, Mapping[str, str]]:
    """Names of Meshwright's models in torchtitan, by Meshwright's name.

    ``recipe`` of 0.3.0, without quantization; ``name`` and ``flavor`` of 0.2.2.
    """
    text = files("planner.export").joinpath("torchtitan_models.csv")
    rows = csv.DictReader(text.read_text(encoding="utf-8").splitlines())
    return {row["model"]: row for row in rows}


def _model(plan: Plan, column: str) -> str:
    """A column of the plan's model; empty if torchtitan does not have it."""
    return _models().get(plan.model.ref or "", {}).get(column, "")


def _left_to_torchtitan(strategy: Strategy) -> tuple[str, ...]:
    """Lines for what torchtitan's models decide."""
    lines = []
    if strategy.mesh.tp > 1:
        lines.append(
            "Left to torchtitan: tp splits what its model says, embedding and head too."
        )
    if strategy.mesh.cp > 1:
        lines.append(
            "Left to torchtitan: cp gathers keys and values; the plan sends them round."
        )
    if any(stage.recompute == "selective" for stage in strategy.stages):
        lines.append("Left to torchtitan: which ops selective recomputation keeps.")
    return tuple(lines)


def _literal(value: Any) -> str:
    """A Python literal; strings here are names of torchtitan's own."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return 'float("inf")' if value == math.inf else repr(value)


def _fields(values: dict[str, Any], indent: int) -> str:
    lines = []
    for name, value in values.items():
        if isinstance(value, list):
            lines.append(f"{name}=[")
            lines += [f"    {_literal(part)}," for part in value]
            lines.append("],")
        else:
            lines.append(f"{name}={_literal(value)},")
    return "\n".join(" " * indent + line for line in lines)


def _training(plan: Plan, version: str, divisor: int) -> dict[str, Any]:
    """Batch, sequence, clipping and precision, which both releases call the same.

    Samples are counted per data-parallel rank and pass, and per step; a pass goes
    through the whole pipeline, without one it is a microbatch.
    """
    strategy = plan.strategy
    local = strategy.microbatch_size
    if strategy.mesh.pp > 1:
        local *= strategy.num_microbatches
    if strategy.mesh.cp > 1:
        divisor *= 2 * strategy.mesh.cp
    clip = strategy.grad_clip_norm
    return {
        "local_batch_size": local,
        "global_batch_size": strategy.global_batch,
        "seq_len": sequence_length(plan, f"torchtitan {version}", divisor),
        **({} if clip is None else {"max_norm": clip}),
        "dtype": strategy.precision.parameter,
        "mixed_precision_param": strategy.precision.compute,
        "mixed_precision_reduce": strategy.precision.reduce,
        "enable_cpu_offload": strategy.offload.states == "parameters",
    }


def _parallelism(
    strategy: Strategy, more: dict[str, Any], own: dict[str, Any], head: str
) -> dict[str, Any]:
    """Degrees and pipeline.

    Args:
        strategy: The plan's strategy.
        more: Degrees that only one of the releases has.
        own: Settings that only one of the releases has.
        head: Name of the module after the last layer.
    """
    mesh = strategy.mesh
    values: dict[str, Any] = {
        "pipeline_parallel_degree": mesh.pp,
        "data_parallel_replicate_degree": mesh.dp_replicate,
        "data_parallel_shard_degree": mesh.dp_shard,
        "context_parallel_degree": mesh.cp,
        "tensor_parallel_degree": mesh.tp,
        "expert_parallel_degree": mesh.ep,
        **more,
        # ZeRO 3 gathers again in backward.
        "fsdp_reshard_after_forward": "always" if strategy.zero_stage == 3 else "never",
        **own,
    }
    if mesh.pp > 1:
        parts = torchtitan_parts(strategy, head=head) or ()
        values |= {
            # torch's class, which knows the order by its own name.
            "pipeline_parallel_schedule": (strategy.schedule_spec.runs or "")[
                len("Schedule") :
            ],
            "pipeline_parallel_microbatch_size": strategy.microbatch_size,
            "module_fqns_per_model_part": [list(part) for part in parts],
        }
    return values


def _recipe(plan: Plan) -> str:
    strategy = plan.strategy
    stages = layers_of_stages(strategy)
    layers = sum(len(stage.layers) for stage in stages) if stages else None
    spec = strategy.optimizer
    kwargs = {
        "lr": spec.learning_rate,
        "betas": spec.betas,
        "weight_decay": spec.weight_decay,
    }
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    streams = strategy.mesh.tp if strategy.sharding.sequence_parallel else 1
    training = _training(plan, "0.3.0", streams) | {"disable_cuda_graphs": True}
    own = {"enable_sequence_parallel": strategy.sharding.sequence_parallel}
    low = strategy.optimizer.state_dtype != strategy.precision.parameter
    comments = (*about(plan), *_left_to_torchtitan(strategy))
    policy = _RECOMPUTE[strategy.stages[0].recompute if strategy.stages else "none"]
    module = "torchtitan.distributed.activation_checkpoint"
    return _RECIPE.format(
        comments="\n".join(f"# {line}" for line in comments),
        imports=f"from {module} import {policy}\n" if policy else "",
        base=_literal(_model(plan, "recipe")),
        layers=layers,
        training=_fields(training, 12),
        parallelism=_fields(_parallelism(strategy, {}, own, "lm_head"), 12),
        recompute=f"{policy}.Config()" if policy else None,
        compile=strategy.compile,
        optimizer=_literal(strategy.optimizer.name),
        optimizer_kwargs="\n".join(
            " " * 24 + f"{_literal(name)}: {value!r}," for name, value in kwargs.items()
        ),
        implementation=_literal("fused_opt_states_bf16" if low else "fused"),
    )


def export_torchtitan(plan: Plan) -> dict[str, str]:
    """``meshwright_recipe.py``, ``run.sh`` and ``plan.json``.

    Raises:
        ExportError: If torchtitan cannot divide the sequence.
    """
    notes = [
        "Starts meshwright_recipe.py in torchtitan 0.3.0. Arguments go on to it.",
        *about(plan),
    ]
    if not _model(plan, "recipe"):
        notes.append(
            "Set TORCHTITAN_BASE to a recipe of the planned model, module:function."
        )
    script = torchrun_script(
        plan,
        notes=notes,
        setup=('export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"',),
        program="-m torchtitan.train --module meshwright_recipe --config meshwright "
        '"$@"',
    )
    return {
        "meshwright_recipe.py": _recipe(plan),
        "run.sh": script,
        "plan.json": plan.to_json(),
    }


def _value(value: Any) -> str:
    """A TOML value; strings here are names of torchtitan's own."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value)
    return repr(value)


def _section(name: str, values: dict[str, Any]) -> list[str]:
    lines = ["", f"[{name}]"]
    for key, value in values.items():
        if value and isinstance(value, list) and isinstance(value[0], list):
            lines.append(f"{key} = [")
            lines += [f"    {_value(part)}," for part in value]
            lines.append("]")
        else:
            lines.append(f"{key} = {_value(value)}")
    return lines


def _toml(plan: Plan) -> str:
    strategy = plan.strategy
    # Without a model of this name torchtitan would train its smallest one.
    name = _model(plan, "name") or "set --model.name"
    flavor = _model(plan, "flavor") or "set --model.flavor"
    recompute = strategy.stages[0].recompute if strategy.stages else "none"
    comments = (
        "Written by Meshwright for torchtitan 0.2.2. run.sh starts it.",
        *about(plan),
        *_left_to_torchtitan(strategy),
        "Data, tokenizer, learning-rate schedule and checkpoints: add them here or as",
        "arguments of run.sh.",
    )
    lines = [f"# {line}" for line in comments]
    lines += _section("model", {"name": name, "flavor": flavor})
    lines += _section("training", _training(plan, "0.2.2", strategy.mesh.tp))
    more = {"expert_tensor_parallel_degree": 1}
    own = {"disable_loss_parallel": not strategy.sharding.loss_parallel}
    lines += _section("parallelism", _parallelism(strategy, more, own, "output"))
    checkpointing: dict[str, Any] = {"mode": recompute}
    if recompute == "selective":
        checkpointing["selective_ac_option"] = "op"
    lines += _section("activation_checkpoint", checkpointing)
    compiled = {"enable": strategy.compile, "components": ["model"]}
    lines += _section("compile", compiled)
    optimizer = strategy.optimizer
    settings: dict[str, Any] = {"name": optimizer.name, "lr": optimizer.learning_rate}
    if optimizer.betas is not None:
        settings["beta1"], settings["beta2"] = optimizer.betas
    if optimizer.weight_decay is not None:
        settings["weight_decay"] = optimizer.weight_decay
    lines += _section("optimizer", settings)
    return "\n".join(lines) + "\n"


def export_torchtitan_toml(plan: Plan) -> dict[str, str]:
    """``torchtitan.toml``, ``run.sh`` and ``plan.json``.

    Raises:
        ExportError: If torchtitan cannot divide the sequence.
    """
    notes = [
        "Starts torchtitan.toml in torchtitan 0.2.2. Arguments go on to it.",
        *about(plan),
    ]
    if not _model(plan, "name"):
        notes.append("Give --model.name and --model.flavor of the planned model.")
    script = torchrun_script(
        plan,
        notes=notes,
        setup=(),
        program='-m torchtitan.train --job.config_file "$here/torchtitan.toml" "$@"',
    )
    return {
        "torchtitan.toml": _toml(plan),
        "run.sh": script,
        "plan.json": plan.to_json(),
    }
