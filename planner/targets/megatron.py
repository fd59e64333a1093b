"""Megatron-LM: its own models and trainer, set by command-line arguments."""

from __future__ import annotations

from planner.schema import Strategy
from planner.targets.base import Case, Target, Violation
from planner.targets.layers import StageLayers, layers_of_stages
from planner.targets.rules import (
    experts_of_own_tokens,
    no_float8,
    one_recompute,
    ranks_in_order,
)

__all__ = ["TARGETS", "megatron_stages"]

_SCHEDULES = ("1F1B", "Interleaved1F1B")


def megatron_stages(strategy: Strategy) -> tuple[StageLayers, ...] | None:
    """Return the layers of every virtual stage, in order of execution.

    None if a cut goes through a layer, the embedding is not in the first stage, or
    modules that follow the layers are not in the last.
    """
    stages = layers_of_stages(strategy)
    if stages is None:
        return None
    early = any(stage.after for stage in stages[:-1])
    late = any(stage.before for stage in stages[1:])
    return None if early or late else stages


def _whole_layers(case: Case) -> Violation | None:
    strategy = case.strategy
    if not case.layers or strategy.mesh.pp == 1:
        return None
    stages = megatron_stages(strategy)
    if stages is not None and stages[0].before and stages[-1].after:
        return None
    return Violation(
        field="stages.modules",
        value=str([len(stage.modules) for stage in strategy.stages]),
        why="stages are whole layers, with the embedding in the first and norm and "
        "head in the last, and these stages are cut elsewhere",
        remedy="use a decoder-only language model that is cut between layers, or pp=1",
    )


def _schedule(case: Case) -> Violation | None:
    strategy = case.strategy
    if strategy.mesh.pp == 1 or strategy.schedule in _SCHEDULES:
        return None
    return Violation(
        field="schedule",
        value=strategy.schedule,
        why="it has 1F1B and interleaved 1F1B",
        remedy="use 1F1B or Interleaved1F1B",
    )


def _virtual_stages(case: Case) -> Violation | None:
    strategy = case.strategy
    if strategy.mesh.pp == 1 or strategy.schedule not in _SCHEDULES:
        return None
    interleaved = strategy.schedule == "Interleaved1F1B"
    if interleaved == (strategy.virtual_stages > 1):
        return None
    return Violation(
        field="virtual_stages",
        value=str(strategy.virtual_stages),
        why=f"virtual stages choose the schedule there, and that would not be "
        f"{strategy.schedule}",
        remedy="use 1F1B with 1 stage a rank, Interleaved1F1B with 2 or more",
    )


def _rounds(case: Case) -> Violation | None:
    strategy = case.strategy
    pp, count = strategy.mesh.pp, strategy.num_microbatches
    if pp == 1 or strategy.schedule != "Interleaved1F1B" or count % pp == 0:
        return None
    return Violation(
        field="num_microbatches",
        value=str(count),
        why=f"interleaved 1F1B takes microbatches in rounds of pp={pp}",
        remedy=f"use a multiple of {pp}",
    )


def _optimizer_states(case: Case) -> Violation | None:
    strategy = case.strategy
    mesh = strategy.mesh
    if mesh.shards == 1 or strategy.zero_stage <= 1:
        return None
    return Violation(
        field="zero_stage",
        value=str(strategy.zero_stage),
        why="its distributed optimizer is ZeRO 1; Megatron-FSDP, which shards more, "
        "has flags, checkpoints and memory of its own, and is not written",
        remedy="use zero_stage=1, or another target for ZeRO 2 and 3",
    )


def _streams(case: Case) -> Violation | None:
    mesh = case.strategy.mesh
    divided = case.strategy.sharding.sequence_parallel
    if not case.num_experts or mesh.tp == 1 or divided:
        return None
    return Violation(
        field="sharding.sequence_parallel",
        value="false",
        why=f"its arguments want sequence parallelism beside tp={mesh.tp} where a "
        f"model has experts (here {case.num_experts} a layer)",
        remedy="use sequence_parallel=true or tp=1",
    )


def _dtypes(case: Case) -> Violation | None:
    precision = case.strategy.precision
    if precision.parameter != "float32":
        return Violation(
            field="precision.parameter",
            value=precision.parameter,
            why="its optimizer updates weights in float32",
            remedy="use parameter=float32",
        )
    if precision.reduce == "bfloat16" and precision.compute != "bfloat16":
        return Violation(
            field="precision.reduce",
            value="bfloat16",
            why=f"gradients of {precision.compute} products are not reduced in "
            f"bfloat16 there",
            remedy="use reduce=float32 or compute=bfloat16",
        )
    return None


def _states(case: Case) -> Violation | None:
    if case.strategy.optimizer.state_dtype == "float32":
        return None
    return Violation(
        field="optimizer.state_dtype",
        value=case.strategy.optimizer.state_dtype,
        why="states in bfloat16 need its precision-aware optimizer of Transformer "
        "Engine, which is not written",
        remedy="use state_dtype=float32",
    )


def _decay(case: Case) -> Violation | None:
    optimizer = case.strategy.optimizer
    if optimizer.name != "Adam" or optimizer.weight_decay == 0.0:
        return None
    return Violation(
        field="optimizer.name",
        value="Adam",
        why="its adam decays weights as AdamW does, and no argument changes that",
        remedy="use AdamW, or weight_decay=0, where both are the same",
    )


TARGETS = (
    Target(
        name="megatron",
        title="Megatron-LM",
        recipe="megatron-2025",
        version="core 0.19.2",
        runs="itself",
        says=frozenset(
            {
                "mesh.pp",
                "mesh.dp_replicate",
                "mesh.dp_shard",
                "mesh.cp",
                "mesh.tp",
                "mesh.ep",
                "zero_stage",
                "schedule",
                "virtual_stages",
                "microbatch_size",
                "num_microbatches",
                "stages.modules",
                "stages.recompute",
                "sharding.sequence_parallel",
                "precision.parameter",
                "precision.compute",
                "precision.reduce",
                "optimizer",
                "context_algorithm",
                "grad_clip_norm",
                "overlap.bucket_bytes",
                "device_ranges",
            }
        ),
        leaves=frozenset({"sharding.patterns", "sharding.loss_parallel"}),
        reasons={
            "communication.boundary": "its core sends tensors as tp ranks hold them "
            "(p2p_communication.py), with sequence parallelism in shards",
        },
        sizes=frozenset({"mesh.pp", "num_microbatches"}),
        rules=(
            _whole_layers,
            one_recompute,
            experts_of_own_tokens,
            _schedule,
            _virtual_stages,
            _rounds,
            _optimizer_states,
            _streams,
            no_float8,
            _dtypes,
            _states,
            _decay,
            ranks_in_order,
        ),
        limits=(
            "ZeRO 2 and 3 (Megatron-FSDP is not written)",
            "schedules other than 1F1B and interleaved 1F1B",
            "interleaved 1F1B of microbatches that pp does not divide",
            "recomputation that differs by stage",
            "stages cut inside a layer",
            "experts together with tp, but without sequence parallelism",
            "weights kept in bfloat16, products in float8, states in bfloat16",
            "Adam with weight decay (AdamW has it)",
            "torch.compile, compressed gradients, prefetch depths",
            "ranks out of the order of devices",
        ),
        check="arguments parsed and validated by Megatron core 0.19.2, its layouts and "
        "rank groups compared with the plan's",
    ),
)
