"""Files for Hugging Face accelerate: a config, a train script, how to start them.

Written for accelerate 1.15.0 with torch 2.11 to 2.13.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from planner.export.texts import yaml_text
from planner.export.torchrun import HERE, case_of, placed, require_address
from planner.targets.accelerate import by_fsdp
from planner.targets.rules import on_cpu

if TYPE_CHECKING:
    from planner.schema import Plan, Strategy
    from planner.targets import Placement

__all__ = ["accelerate_config", "export_accelerate"]

_HEAD = """For accelerate launch, written for accelerate 1.15.0; see run.sh.

The plan: {label}
What this file has no words for is done by train.py, which reads plan.json; a script of
your own has to do it:
  microbatches of {size}, {count} a step: gradient_accumulation_steps of Accelerator
  optimizer: {optimizer}, learning rate {rate:g}, weight decay {decay:g}
  gradients clipped to a norm of: {clip}
  gradients reduced in {reduce}: with FSDP, mixed_precision_policy of its plugin"""

_TENSOR = """
  tp={tp}: the model comes in sharded, by sharding.patterns of plan.json"""

_CONTEXT = """
  cp={cp}: each forward and backward under Accelerator.maybe_context_parallel"""

_SCRIPT = """#!/bin/sh
# Trains by plan.json with accelerate. Arguments go on to train.py, or to the script
# that TRAIN names.{once}
set -eu
{address}{here}
exec {command} \\
    "${{TRAIN:-$here/train.py}}" "$@"
"""

_ONCE = """
# Run it once on each of {hosts} hosts: NODE_RANK counts them from 0, MASTER_ADDR names
# the first."""

_NEXT = " \\\n    "

#: ``mixed_precision`` by what products see.
_WORDS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """Return the YAML file's contents: the fields of accelerate's ``ClusterConfig``.

    Raises:
        ExportError: If ranks are not numbered host by host.
    """
    strategy, placement = plan.strategy, placed(plan)
    cpu = on_cpu(case_of(plan))
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": _distributed_type(strategy, cpu),
        "use_cpu": cpu,
        "num_machines": len(placement.hosts),
        "num_processes": strategy.mesh.num_devices,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "mixed_precision": _mixed_precision(strategy),
    }
    if not cpu:
        config["gpu_ids"] = _device_ids(placement)
    if strategy.compile:
        config["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_use_regional_compilation": True,
        }
    if by_fsdp(strategy):
        config["fsdp_config"] = _fsdp(strategy)
        config["parallelism_config"] = _mesh(strategy)
    return config


def _distributed_type(strategy: Strategy, cpu: bool) -> str:
    if strategy.mesh.num_devices == 1:
        return "NO"
    if by_fsdp(strategy):
        return "FSDP"
    return "MULTI_CPU" if cpu else "MULTI_GPU"


def _mixed_precision(strategy: Strategy) -> str:
    """Low-precision weights are not mixed: accelerate would make them float32."""
    precision = strategy.precision
    return "no" if precision.parameter == "bfloat16" else _WORDS[precision.compute]


def _device_ids(placement: Placement) -> str:
    return "all" if placement.whole else ",".join(map(str, placement.local))


def _fsdp(strategy: Strategy) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": strategy.zero_stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": any(
            stage.recompute == "full" for stage in strategy.stages
        ),
        "fsdp_offload_params": strategy.offload.states == "parameters",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _mesh(strategy: Strategy) -> dict[str, Any]:
    mesh = strategy.mesh
    sizes: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": mesh.dp_replicate,
        "parallelism_config_dp_shard_size": mesh.dp_shard,
        "parallelism_config_tp_size": mesh.tp,
        "parallelism_config_cp_size": mesh.cp,
    }
    if mesh.cp > 1:
        sizes["parallelism_config_cp_backend"] = "torch"
        # torch's name for keys and values that travel; allgather has all at once.
        sizes["parallelism_config_cp_comm_strategy"] = "alltoall"
    return sizes


def _head(strategy: Strategy) -> str:
    optimizer = strategy.optimizer
    head = _HEAD.format(
        label=strategy.label(),
        size=strategy.microbatch_size,
        count=strategy.num_microbatches,
        optimizer=optimizer.name,
        rate=optimizer.learning_rate,
        decay=optimizer.used_weight_decay,
        clip=strategy.grad_clip_norm or "not clipped",
        reduce=strategy.precision.reduce,
    )
    if strategy.mesh.tp > 1:
        head += _TENSOR.format(tp=strategy.mesh.tp)
    if strategy.mesh.cp > 1:
        head += _CONTEXT.format(cp=strategy.mesh.cp)
    return head


def _script(plan: Plan) -> str:
    placement = placed(plan)
    hosts, each = len(placement.hosts), len(placement.local)
    launch = 'accelerate launch --config_file "$here/accelerate.yaml"'
    by_torchrun = on_cpu(case_of(plan)) and plan.strategy.mesh.num_devices > 1
    address = require_address(hosts)
    if by_torchrun and hosts == 1:
        address = ': "${MASTER_ADDR:=127.0.0.1}"\n: "${MASTER_PORT:=29500}"\n'
    if hosts > 1:
        launch += f'{_NEXT}--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR"'
    if address:
        launch += f'{_NEXT}--main_process_port "$MASTER_PORT"'
    if by_torchrun:
        # accelerate starts several processes on CPUs by MPI alone; torchrun does too,
        # and each of its processes is one that accelerate sets up.
        rank = ' --node-rank="$NODE_RANK"' if hosts > 1 else ""
        launch = (
            f"torchrun --nnodes={hosts}{rank} --nproc-per-node={each}{_NEXT}"
            f'--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"{_NEXT}'
            f"--no-python {launch}"
        )
    once = _ONCE.format(hosts=hosts) if hosts > 1 else ""
    return _SCRIPT.format(once=once, address=address, here=HERE, command=launch)


def export_accelerate(plan: Plan) -> dict[str, str]:
    """``plan.json``, ``accelerate.yaml``, ``train.py`` and ``run.sh``.

    Names of models and clusters are in ``plan.json`` alone.

    Raises:
        ExportError: If ranks are not numbered host by host.
    """
    script = files("planner.export").joinpath("accelerate_train.py")
    return {
        "plan.json": plan.to_json(),
        "accelerate.yaml": yaml_text(
            accelerate_config(plan), header=_head(plan.strategy)
        ),
        "train.py": script.read_text(encoding="utf-8"),
        "run.sh": _script(plan),
    }
