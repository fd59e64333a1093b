"""A recipe of torchtitan 0.3.0: a Python function that returns a Trainer.Config.

Model, data, tokenizer, learning-rate schedule and checkpoints are those of one of
torchtitan's own recipes; the plan sets the rest.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from planner.export.torchrun_script import about, sequence_length, torchrun_script
from planner.targets.layers import layers_of_stages
from planner.targets.torchtitan import torchtitan_parts

if TYPE_CHECKING:
    from planner.schema import Plan, Strategy

__all__ = ["batch_sizes", "export_torchtitan", "left_to_torchtitan", "reshard"]

#: Recipes of torchtitan 0.3.0 without quantization, by names of Meshwright's models.
_RECIPES = {
    "llama3-8b": "torchtitan.models.llama3.config_registry:llama3_8b",
    "llama3-70b": "torchtitan.models.llama3.config_registry:llama3_70b",
    "qwen3-30b-a3b": "torchtitan.models.qwen3.config_registry:qwen3_30b_a3b",
    "deepseek-v3": "torchtitan.models.deepseek_v3.config_registry:deepseek_v3_671b",
}

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
{optimizer_kwargs}
                    }},
                )
            ],
            implementation={implementation},
        ),
    )
'''


def batch_sizes(strategy: Strategy) -> tuple[int, int]:
    """Samples per data-parallel rank and pass, and per step, as torchtitan counts.

    A pass goes through the whole pipeline; without one it is a microbatch.
    """
    local = strategy.microbatch_size
    if strategy.mesh.pp > 1:
        local *= strategy.num_microbatches
    return local, strategy.global_batch


def reshard(strategy: Strategy) -> str:
    """``fsdp_reshard_after_forward``: ZeRO 3 gathers again in backward."""
    return "always" if strategy.zero_stage == 3 else "never"


def left_to_torchtitan(strategy: Strategy) -> tuple[str, ...]:
    """What torchtitan's models decide, a line each."""
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


def _training(plan: Plan) -> dict[str, Any]:
    strategy = plan.strategy
    mesh = strategy.mesh
    local, batch = batch_sizes(strategy)
    clip = strategy.grad_clip_norm
    streams = mesh.tp if strategy.sharding.sequence_parallel else 1
    divisor = streams * (2 * mesh.cp if mesh.cp > 1 else 1)
    return {
        "local_batch_size": local,
        "global_batch_size": batch,
        "seq_len": sequence_length(plan, "torchtitan 0.3.0", divisor),
        # No clipping is a norm that no gradient has.
        "max_norm": math.inf if clip is None else clip,
        "dtype": strategy.precision.parameter,
        "mixed_precision_param": strategy.precision.compute,
        "mixed_precision_reduce": strategy.precision.reduce,
        "enable_cpu_offload": False,
        "disable_cuda_graphs": True,
    }


def _parallelism(strategy: Strategy) -> dict[str, Any]:
    mesh = strategy.mesh
    values: dict[str, Any] = {
        "pipeline_parallel_degree": mesh.pp,
        "data_parallel_replicate_degree": mesh.dp_replicate,
        "data_parallel_shard_degree": mesh.dp_shard,
        "context_parallel_degree": mesh.cp,
        "tensor_parallel_degree": mesh.tp,
        "expert_parallel_degree": mesh.ep,
        "fsdp_reshard_after_forward": reshard(strategy),
        "enable_sequence_parallel": strategy.sharding.sequence_parallel,
    }
    if mesh.pp > 1:
        parts = torchtitan_parts(strategy) or ()
        values |= {
            "pipeline_parallel_schedule": strategy.schedule,
            "pipeline_parallel_microbatch_size": strategy.microbatch_size,
            "module_fqns_per_model_part": [list(part) for part in parts],
        }
    return values


def _optimizer(strategy: Strategy) -> dict[str, Any]:
    """What torch's optimizer is called with; Meshwright leaves its other defaults."""
    return {
        "lr": strategy.optimizer.learning_rate,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": strategy.optimizer.weight_decay,
    }


def _recipe(plan: Plan) -> str:
    strategy = plan.strategy
    stages = layers_of_stages(strategy)
    layers = sum(len(stage.layers) for stage in stages) if stages else None
    kwargs = _optimizer(strategy)
    low = strategy.optimizer.state_dtype != strategy.precision.parameter
    comments = (*about(plan), *left_to_torchtitan(strategy))
    policy = _RECOMPUTE[strategy.stages[0].recompute if strategy.stages else "none"]
    module = "torchtitan.distributed.activation_checkpoint"
    return _RECIPE.format(
        comments="\n".join(f"# {line}" for line in comments),
        imports=f"from {module} import {policy}\n" if policy else "",
        base=_literal(_RECIPES.get(plan.model.ref or "", "")),
        layers=layers,
        training=_fields(_training(plan), 12),
        parallelism=_fields(_parallelism(strategy), 12),
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
    if (plan.model.ref or "") not in _RECIPES:
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
