"""A TOML file of torchtitan 0.2.2, the last release that reads TOML."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from planner.export.torchrun_script import about, sequence_length, torchrun_script
from planner.export.torchtitan import batch_sizes, left_to_torchtitan, reshard
from planner.targets.torchtitan import torchtitan_parts

if TYPE_CHECKING:
    from planner.schema import Plan, Strategy

__all__ = ["export_torchtitan_toml"]

#: Names and flavors of torchtitan 0.2.2, by names of Meshwright's models.
_MODELS = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
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


def _training(plan: Plan) -> dict[str, Any]:
    strategy = plan.strategy
    mesh = strategy.mesh
    local, batch = batch_sizes(strategy)
    divisor = mesh.tp * (2 * mesh.cp if mesh.cp > 1 else 1)
    clip = strategy.grad_clip_norm
    return {
        "local_batch_size": local,
        "global_batch_size": batch,
        "seq_len": sequence_length(plan, "torchtitan 0.2.2", divisor),
        # No clipping is a norm that no gradient has.
        "max_norm": float("inf") if clip is None else clip,
        "dtype": strategy.precision.parameter,
        "mixed_precision_param": strategy.precision.compute,
        "mixed_precision_reduce": strategy.precision.reduce,
        "enable_cpu_offload": False,
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
        "expert_tensor_parallel_degree": 1,
        "fsdp_reshard_after_forward": reshard(strategy),
        "disable_loss_parallel": not strategy.sharding.loss_parallel,
    }
    if mesh.pp > 1:
        parts = torchtitan_parts(strategy, head="output") or ()
        values |= {
            "pipeline_parallel_schedule": strategy.schedule,
            "pipeline_parallel_microbatch_size": strategy.microbatch_size,
            "module_fqns_per_model_part": [list(part) for part in parts],
        }
    return values


def _toml(plan: Plan) -> str:
    strategy = plan.strategy
    known = _MODELS.get(plan.model.ref or "")
    # Without a model of this name torchtitan would train its smallest one.
    name, flavor = known or ("set --model.name", "set --model.flavor")
    recompute = strategy.stages[0].recompute if strategy.stages else "none"
    comments = (
        "Written by Meshwright for torchtitan 0.2.2. run.sh starts it.",
        *about(plan),
        *left_to_torchtitan(strategy),
        "Data, tokenizer, learning-rate schedule and checkpoints: add them here or as",
        "arguments of run.sh.",
    )
    lines = [f"# {line}" for line in comments]
    lines += _section("model", {"name": name, "flavor": flavor})
    lines += _section("training", _training(plan))
    lines += _section("parallelism", _parallelism(strategy))
    checkpointing: dict[str, Any] = {"mode": recompute}
    if recompute == "selective":
        checkpointing["selective_ac_option"] = "op"
    lines += _section("activation_checkpoint", checkpointing)
    compiled = {"enable": strategy.compile, "components": ["model"]}
    lines += _section("compile", compiled)
    optimizer = strategy.optimizer
    lines += _section(
        "optimizer",
        {
            "name": optimizer.name,
            "lr": optimizer.learning_rate,
            # torch's own, which Meshwright's executors leave as they are.
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay": optimizer.weight_decay,
        },
    )
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
    if (plan.model.ref or "") not in _MODELS:
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
