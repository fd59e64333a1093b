"""Files for DeepSpeed: its JSON, and how to start a training script with it.

Written for DeepSpeed 0.19.6.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from planner.export.torchrun import HERE, placed, require_address
from planner.schema.strategy_parts import matches_pattern

if TYPE_CHECKING:
    from planner.schema import Plan, Strategy

__all__ = ["deepspeed_config", "export_deepspeed"]

_SHORT = {"float32": "fp32", "bfloat16": "bf16"}

_SCRIPT = """#!/bin/sh
# Trains by ds_config.json with DeepSpeed 0.19.6. TRAIN names your training script,
# which takes --deepspeed_config (deepspeed.add_config_arguments); arguments go to it.
#
# The plan: {label}
# What the script decides, and has to do as planned:
{todo}{once}
set -eu
: "${{TRAIN:?set TRAIN, your training script}}"
{address}{here}
exec deepspeed {where} \\
    "$TRAIN" --deepspeed --deepspeed_config "$here/ds_config.json" "$@"
"""

_ONCE = """
#
# Run it once on each of {hosts} hosts: NODE_RANK counts them from 0, MASTER_ADDR
# names the first. hostfile counts devices; its names are not looked up."""


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """Return the contents of the JSON file."""
    strategy = plan.strategy
    mesh = strategy.mesh
    config: dict[str, Any] = {
        "train_batch_size": strategy.global_batch,
        "train_micro_batch_size_per_gpu": strategy.microbatch_size,
        "gradient_accumulation_steps": strategy.num_microbatches,
        "zero_optimization": _zero(strategy),
        **_precision(strategy),
        **_optimizer(strategy),
    }
    if strategy.grad_clip_norm is not None:
        config["gradient_clipping"] = strategy.grad_clip_norm
    if mesh.tp > 1:
        config["tensor_parallel"] = {
            "autotp_size": mesh.tp,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": _layer_specs(strategy),
            },
        }
    if mesh.cp > 1:
        # DeepSpeed makes its mesh of data and sequence when both keys are there.
        config["data_parallel_size"] = mesh.data_parallel
        config["sequence_parallel_size"] = mesh.cp
    return config


def _stage(strategy: Strategy) -> int:
    """ZeRO where there is anything to shard over."""
    mesh = strategy.mesh
    return strategy.zero_stage if mesh.shards > 1 else 0


def _zero(strategy: Strategy) -> dict[str, Any]:
    mesh, stage = strategy.mesh, _stage(strategy)
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3 and mesh.dp_replicate > 1:
        zero["mics_shard_size"] = mesh.dp_shard
    shards = strategy.communication.shards
    if shards.second_copy > 1:
        zero["zero_hpz_partition_size"] = shards.second_copy
    if shards.weight_bits is not None:
        zero["zero_quantized_weights"] = True
    if shards.gradient_bits is not None:
        zero["zero_quantized_gradients"] = True
    there = {"device": "cpu", "pin_memory": True}
    if strategy.offload.states != "none":
        zero["offload_optimizer"] = there
    if strategy.offload.states == "parameters":
        zero["offload_param"] = there
    return zero


def _precision(strategy: Strategy) -> dict[str, Any]:
    precision, stage = strategy.precision, _stage(strategy)
    words: dict[str, Any] = {"communication_data_type": _SHORT[precision.reduce]}
    if strategy.mesh.cp > 1:
        words["seq_parallel_communication_data_type"] = _SHORT[precision.reduce]
    if precision.parameter == "bfloat16":
        words["bf16"] = {
            "enabled": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
        }
    elif precision.compute == "bfloat16":
        words["bf16"] = {"enabled": True}
        if stage > 0:
            # Microbatches are summed as they are reduced; by default in bfloat16.
            words["data_types"] = {"grad_accum_dtype": _SHORT[precision.reduce]}
    elif precision.compute == "float16":
        words["fp16"] = {"enabled": True}
    return words


def _optimizer(strategy: Strategy) -> dict[str, Any]:
    spec = strategy.optimizer
    settings: dict[str, Any] = {"lr": spec.learning_rate}
    if spec.weight_decay is not None:
        settings["weight_decay"] = spec.weight_decay
    words: dict[str, Any] = {"optimizer": {"type": spec.name, "params": settings}}
    if spec.name == "Adam":
        # DeepSpeed's Adam is AdamW unless told otherwise.
        settings["adam_w_mode"] = False
    if spec.betas is not None:
        settings["betas"] = list(spec.betas)
    if spec.name == "SGD":
        settings["momentum"] = spec.momentum
        words["zero_allow_untested_optimizer"] = True
    return words


def _layer_specs(strategy: Strategy) -> list[dict[str, Any]]:
    """Patterns of modules as regular expressions of their weights' names."""
    modules = [name for stage in strategy.stages for name in stage.modules]
    specs = []
    for pattern, style in strategy.sharding.patterns.items():
        parts = ["[^.]+" if p == "*" else re.escape(p) for p in pattern.split(".")]
        spec: dict[str, Any] = {
            "patterns": [r"^(.*\.)?" + r"\.".join(parts) + r"\.weight$"],
            "partition_type": "column" if style == "colwise" else "row",
        }
        if style == "colwise" and modules and matches_pattern(pattern, modules[-1]):
            # What comes out of the last module goes into the loss whole.
            spec["gather_output"] = True
        specs.append(spec)
    return specs


def _todo(strategy: Strategy) -> str:
    """Lines for what the JSON cannot make a training script do."""
    mesh = strategy.mesh
    kinds = sorted({stage.recompute for stage in strategy.stages}) or ["none"]
    lines = [f"recompute activations: {', '.join(kinds)}"]
    lines.append("engine.compile()" if strategy.compile else "no engine.compile()")
    if mesh.cp > 1:
        lines.append(
            f"sequences divided over {mesh.cp} ranks: attention by "
            f"DistributedAttention\n#     or UlyssesSPAttentionHF"
        )
    if _zero(strategy).get("mics_shard_size"):
        lines.append("the model made under deepspeed.zero.MiCS_Init")
    elif _stage(strategy) == 3:
        lines.append("a model too large for one device made under deepspeed.zero.Init")
    return "\n".join(f"#   {line}" for line in lines)


def export_deepspeed(plan: Plan) -> dict[str, str]:
    """``plan.json``, ``ds_config.json``, ``run.sh``; ``hostfile`` for many hosts.

    Names of models and clusters are in ``plan.json`` alone.

    Raises:
        ExportError: If ranks are not numbered host by host.
    """
    placement = placed(plan)
    hosts, each = len(placement.hosts), len(placement.local)
    names = ["localhost"] if hosts == 1 else [f"host-{i}" for i in range(hosts)]
    where = f"--num_gpus={each}"
    if not placement.whole or hosts > 1:
        devices = ",".join(map(str, placement.local))
        where = f'--include="{"@".join(f"{name}:{devices}" for name in names)}"'
    files = {
        "plan.json": plan.to_json(),
        "ds_config.json": json.dumps(deepspeed_config(plan), indent=2) + "\n",
    }
    if hosts > 1:
        where = (
            '--hostfile="$here/hostfile" --no_ssh --node_rank="$NODE_RANK" \\\n'
            '    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT"'
        ) + ("" if placement.whole else f" \\\n    {where}")
        slots = max(placement.local) + 1
        files["hostfile"] = "".join(f"{name} slots={slots}\n" for name in names)
    files["run.sh"] = _SCRIPT.format(
        label=plan.strategy.label(),
        todo=_todo(plan.strategy),
        once=_ONCE.format(hosts=hosts) if hosts > 1 else "",
        address=require_address(hosts),
        here=HERE,
        where=where,
    )
    return files
