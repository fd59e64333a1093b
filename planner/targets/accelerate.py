"""Hugging Face accelerate: FSDP2 with a mesh, or DistributedDataParallel.

Source: accelerate 1.15.0, ``parallelism_config.py``, ``state.py``,
``utils/fsdp_utils.py``, ``utils/dataclasses.py``, ``commands/launch.py``.
"""

from __future__ import annotations

from planner.schema import Strategy
from planner.schema.optimizers import OPTIMIZERS
from planner.targets.base import Case, Target, Violation
from planner.targets.rules import offloads_parameters, on_cpu, ranks_in_order

__all__ = ["TARGETS", "by_fsdp"]


def by_fsdp(strategy: Strategy) -> bool:
    """Return True if accelerate would train by FSDP2, not DistributedDataParallel."""
    mesh = strategy.mesh
    return mesh.dp_shard > 1 or mesh.cp > 1 or mesh.tp > 1


def _shards_on_accelerators(case: Case) -> Violation | None:
    if not (by_fsdp(case.strategy) and on_cpu(case)):
        return None
    return Violation(
        field="mesh",
        value=case.strategy.label(),
        why="accelerate turns FSDP on for accelerators alone, and on CPUs it would "
        "train plain replicas without a word",
        remedy="use dp_replicate, or torchrun, by which Meshwright trains on CPUs",
    )


def _something_to_shard(case: Case) -> Violation | None:
    mesh = case.strategy.mesh
    if mesh.dp_shard > 1 or (mesh.tp == 1 and mesh.cp == 1):
        return None
    if mesh.dp_replicate > 1:
        return Violation(
            field="mesh.dp_shard",
            value="1",
            why=f"accelerate refuses tp={mesh.tp} or cp={mesh.cp} beside replicas "
            f"(dp_replicate={mesh.dp_replicate}) that are not sharded",
            remedy="use dp_shard in place of dp_replicate",
        )
    if mesh.cp > 1:
        return None
    return Violation(
        field="mesh.tp",
        value=str(mesh.tp),
        why="accelerate takes a mesh with FSDP2 alone, which needs dp_shard or cp to "
        "shard over",
        remedy="use dp_shard > 1 beside tp",
    )


def _zero(case: Case) -> Violation | None:
    strategy = case.strategy
    if strategy.mesh.shards == 1 or strategy.zero_stage >= 2:
        return None
    return Violation(
        field="zero_stage",
        value=str(strategy.zero_stage),
        why="FSDP2 shards parameters, gradients and optimizer states over dp_shard and "
        "cp; all that can be chosen is whether forward frees what it gathered",
        remedy="use zero_stage 2 or 3, or dp_replicate for plain replicas",
    )


def _ring(case: Case) -> Violation | None:
    strategy = case.strategy
    if strategy.mesh.cp == 1:
        return None
    if strategy.context_algorithm != "ring":
        return Violation(
            field="context_algorithm",
            value=strategy.context_algorithm,
            why="with FSDP2 keys and values travel around; trading the sequence for "
            "heads (sp) is there with DeepSpeed alone",
            remedy="use context_algorithm=ring, or the target deepspeed",
        )
    if case.attention != "causal":
        return Violation(
            field="mesh.cp",
            value=str(strategy.mesh.cp),
            why=f"accelerate makes every attention causal when it divides sequences, "
            f"and the model's is {case.attention or 'of several kinds, or unknown'}",
            remedy="use cp=1",
        )
    return None


def _recompute(case: Case) -> Violation | None:
    kinds = {stage.recompute for stage in case.strategy.stages} - {"none"}
    if "selective" in kinds:
        return Violation(
            field="stages.recompute",
            value="selective",
            why="fsdp_activation_checkpointing is for whole layers",
            remedy="use full or none",
        )
    if kinds and not by_fsdp(case.strategy):
        return Violation(
            field="stages.recompute",
            value="full",
            why="accelerate checkpoints activations with FSDP alone",
            remedy="use none, or dp_shard in place of dp_replicate",
        )
    return None


def _precision(case: Case) -> Violation | None:
    precision, optimizer = case.strategy.precision, case.strategy.optimizer
    if precision.compute == "float8":
        return Violation(
            field="precision.compute",
            value="float8",
            why="accelerate leaves the arithmetic to one of three other packages, and "
            "the plan does not say which",
            remedy="use bfloat16",
        )
    if precision.parameter == "bfloat16" and precision.compute != "bfloat16":
        return Violation(
            field="precision.parameter",
            value="bfloat16",
            why=f"accelerate keeps weights in float32 where products are in "
            f"{precision.compute}",
            remedy="use bfloat16 for both, or float32 weights",
        )
    if optimizer.state_dtype != precision.parameter:
        return Violation(
            field="optimizer.state_dtype",
            value=optimizer.state_dtype,
            why=f"torch's optimizers keep states as they keep parameters, in "
            f"{precision.parameter}",
            remedy=f"use {precision.parameter} for both",
        )
    if not by_fsdp(case.strategy) and precision.reduce != precision.parameter:
        return Violation(
            field="precision.reduce",
            value=precision.reduce,
            why=f"DistributedDataParallel reduces gradients as they are, in "
            f"{precision.parameter}",
            remedy=f"use {precision.parameter}, or dp_shard in place of dp_replicate",
        )
    return None


TARGETS = (
    Target(
        name="accelerate",
        title="accelerate",
        version="1.15.0",
        runs="itself",
        says=frozenset(
            {
                "mesh.dp_replicate",
                "mesh.dp_shard",
                "mesh.cp",
                "mesh.tp",
                "zero_stage",
                "microbatch_size",
                "num_microbatches",
                "stages.recompute",
                "precision.parameter",
                "precision.compute",
                "precision.reduce",
                "optimizer",
                "context_algorithm",
                "grad_clip_norm",
                "compile",
                "offload.states",
                "device_ranges",
            }
        ),
        leaves=frozenset({"sharding.patterns"}),
        optimizers=frozenset(n for n, kind in OPTIMIZERS.items() if kind.elementwise),
        reasons={
            "mesh.pp": "accelerate's mesh has no pipeline axis",
            "mesh.ep": "accelerate's mesh has no expert axis",
            "sharding.sequence_parallel": "transformers reserves sequence parallelism "
            "beside tp, but does not run it yet",
            "sharding.loss_parallel": "a transformers model gathers its logits",
            "overlap.forward_prefetch": "accelerate refuses it with FSDP2",
            "overlap.backward_prefetch": "accelerate ignores it with FSDP2",
        },
        rules=(
            ranks_in_order,
            offloads_parameters,
            _shards_on_accelerators,
            _something_to_shard,
            _zero,
            _ring,
            _recompute,
            _precision,
        ),
        limits=(
            "pipelines and expert parallelism",
            "ZeRO 1",
            "tp without dp_shard or cp, and plain replicas beside tp or cp",
            "sequences divided by all_to_all",
            "selective recomputation; any with plain replicas",
            "sequence and loss parallelism beside tp",
            "prefetching, gradient buckets and compressed gradients",
            "sharding on CPUs",
        ),
        check="accelerate's own parser; run on 2 gloo processes (replicas)",
    ),
)
