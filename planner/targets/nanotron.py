"""nanotron: its own Llama and StarCoder2, data, tensor and pipeline parallel.

Source: nanotron 0.4 as on PyPI, ``config/``, ``parallel/context.py``,
``models/base.py``, ``helpers.py``. Its repository has gone on since (context
parallelism, recomputation), without a release.
"""

from __future__ import annotations

from planner.schema import Precision
from planner.targets.base import Case, Target, Violation
from planner.targets.layers import may_be_even
from planner.targets.rules import accelerators_alone, ranks_in_order

__all__ = ["PRECISIONS", "TARGETS"]

#: (parameter, compute, reduce) to ``model.dtype`` and ``accumulate_grad_in_fp32``.
PRECISIONS = {
    ("float32", "bfloat16", "float32"): ("bfloat16", True),
    ("bfloat16", "bfloat16", "bfloat16"): ("bfloat16", False),
    ("float32", "float32", "float32"): ("float32", False),
}


def _engine(case: Case) -> Violation | None:
    strategy = case.strategy
    if strategy.mesh.pp == 1 or strategy.schedule in ("GPipe", "1F1B"):
        return None
    return Violation(
        field="schedule",
        value=strategy.schedule,
        why="nanotron has the engines afab (GPipe) and 1f1b (1F1B)",
        remedy="use GPipe or 1F1B",
    )


def _filled(case: Case) -> Violation | None:
    strategy = case.strategy
    pp, count = strategy.mesh.pp, strategy.num_microbatches
    if strategy.schedule != "1F1B" or count >= pp - 1:
        return None
    return Violation(
        field="num_microbatches",
        value=str(count),
        why=f"the engine 1f1b wants at least {pp - 1} with pp={pp}",
        remedy=f"use {pp - 1} or more, or GPipe",
    )


def _even(case: Case) -> Violation | None:
    strategy = case.strategy
    if strategy.mesh.pp == 1 or not case.layers or may_be_even(strategy):
        return None
    return Violation(
        field="stages.modules",
        value=str([len(stage.modules) for stage in strategy.stages]),
        why="nanotron cuts the model itself, into stages of equal work",
        remedy="give every stage equally many layers, what comes before them to the "
        "first and what comes after to the last",
    )


def _zero(case: Case) -> Violation | None:
    strategy = case.strategy
    mesh = strategy.mesh
    if mesh.shards == 1 or strategy.zero_stage == 0:
        return None
    if strategy.zero_stage > 1:
        return Violation(
            field="zero_stage",
            value=str(strategy.zero_stage),
            why="nanotron shards optimizer states alone",
            remedy="use zero_stage 0 or 1",
        )
    if mesh.dp_replicate == 1:
        return None
    return Violation(
        field="mesh.dp_replicate",
        value=str(mesh.dp_replicate),
        why="zero_stage 1 shards over all data parallel ranks",
        remedy="use dp_shard in place of dp_replicate, or zero_stage=0",
    )


def _precision(case: Case) -> Violation | None:
    precision, optimizer = case.strategy.precision, case.strategy.optimizer
    if _three(precision) not in PRECISIONS:
        return Violation(
            field="precision",
            value="/".join(_three(precision)),
            why="nanotron has float32 throughout, bfloat16 throughout, or bfloat16 "
            "products with float32 weights and gradients beside them",
            remedy="use one of these three",
        )
    if optimizer.state_dtype != precision.parameter:
        return Violation(
            field="optimizer.state_dtype",
            value=optimizer.state_dtype,
            why=f"states are kept as the weights that are updated, in "
            f"{precision.parameter}",
            remedy=f"use {precision.parameter} for both",
        )
    return None


def _three(precision: Precision) -> tuple[str, str, str]:
    return (precision.parameter, precision.compute, precision.reduce)


TARGETS = (
    Target(
        name="nanotron",
        title="nanotron",
        recipe="nanotron",
        version="0.4",
        runs="itself",
        says=frozenset(
            {
                "mesh.pp",
                "mesh.dp_replicate",
                "mesh.dp_shard",
                "mesh.tp",
                "zero_stage",
                "schedule",
                "microbatch_size",
                "num_microbatches",
                "stages.modules",
                "sharding.sequence_parallel",
                "precision.parameter",
                "precision.compute",
                "precision.reduce",
                "optimizer",
                "grad_clip_norm",
                "device_ranges",
            }
        ),
        leaves=frozenset({"sharding.patterns", "sharding.loss_parallel"}),
        reasons={
            "mesh.cp": "nanotron 0.4 has no context parallelism (its unreleased main "
            "branch has)",
            "mesh.ep": "its expert axis multiplies the devices, the plan's does not",
            "virtual_stages": "its engines hold one stage a rank",
            "stages.recompute": "nanotron 0.4 has no word for recomputation (its "
            "unreleased main branch has)",
        },
        rules=(
            ranks_in_order,
            accelerators_alone,
            _engine,
            _filled,
            _even,
            _zero,
            _precision,
        ),
        even_layers=True,
        sizes=frozenset({"mesh.pp", "num_microbatches"}),
        optimizers=frozenset({"AdamW"}),
        limits=(
            "context and expert parallelism, recomputation",
            "ZeRO 2 and 3, and replicas of sharded groups",
            "interleaved and zero-bubble schedules, uneven stages",
            "optimizers but AdamW",
            "prefetching, gradient buckets, compressed gradients, torch.compile",
            "CPUs",
        ),
        check="nanotron's own parser",
    ),
)
