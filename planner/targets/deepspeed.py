"""DeepSpeed: ZeRO, AutoTP and Ulysses by its JSON.

Source: DeepSpeed 0.19.6, ``runtime/config.py``, ``runtime/engine.py``,
``runtime/zero/config.py``, ``module_inject/autotp_config.py``, ``utils/groups.py``.
"""

from __future__ import annotations

from planner.targets.base import Case, Target, Violation
from planner.targets.rules import ranks_in_order

__all__ = ["TARGETS"]


def _autotp(case: Case) -> Violation | None:
    strategy = case.strategy
    mesh = strategy.mesh
    if mesh.tp == 1:
        return None
    if strategy.zero_stage == 3 and mesh.shards > 1:
        return Violation(
            field="zero_stage",
            value="3",
            why=f"AutoTP (tp={mesh.tp}) goes with ZeRO 0 to 2",
            remedy="use zero_stage 2 or less, or tp=1",
        )
    if mesh.cp > 1:
        return Violation(
            field="mesh.cp",
            value=str(mesh.cp),
            why=f"its device mesh has data and tensor, or data and sequence, not all "
            f"three (tp={mesh.tp})",
            remedy="use cp=1 or tp=1",
        )
    odd = [n for n, s in strategy.sharding.patterns.items() if s == "vocab"]
    if odd:
        return Violation(
            field="sharding.patterns",
            value=f"{odd[0]}: vocab",
            why="AutoTP splits embeddings by features, not by rows",
            remedy="leave the embedding whole: take the pattern out",
        )
    return None


def _shards_over_all(case: Case) -> Violation | None:
    strategy = case.strategy
    mesh = strategy.mesh
    shards = mesh.shards
    if mesh.dp_replicate == 1 or shards == 1 or strategy.zero_stage == 0:
        return None
    if strategy.zero_stage == 3 and mesh.tp == mesh.cp == 1:
        return None
    return Violation(
        field="mesh.dp_replicate",
        value=str(mesh.dp_replicate),
        why="ZeRO shards over all data parallel ranks; groups of them (MiCS) are for "
        "ZeRO 3 without tp or cp",
        remedy="use dp_shard in place of dp_replicate, or zero_stage=3 without tp and "
        "cp",
    )


def _ulysses(case: Case) -> Violation | None:
    strategy = case.strategy
    if strategy.mesh.cp == 1 or strategy.context_algorithm == "all_to_all":
        return None
    return Violation(
        field="context_algorithm",
        value=strategy.context_algorithm,
        why="DeepSpeed's sequence parallelism (Ulysses) trades the sequence for heads",
        remedy="use context_algorithm=all_to_all, or the target accelerate",
    )


#: (parameter, compute): weights kept in float32 beside a copy for products, or in
#: bfloat16 alone.
_PAIRS = frozenset(
    {
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("bfloat16", "bfloat16"),
    }
)


def _precision(case: Case) -> Violation | None:
    precision, optimizer = case.strategy.precision, case.strategy.optimizer
    if (precision.parameter, precision.compute) not in _PAIRS:
        return Violation(
            field="precision.compute",
            value=precision.compute,
            why=f"DeepSpeed has no word for it beside {precision.parameter} weights",
            remedy="use bfloat16",
        )
    if optimizer.state_dtype != precision.parameter:
        return Violation(
            field="optimizer.state_dtype",
            value=optimizer.state_dtype,
            why=f"states are kept as the weights that are updated, in "
            f"{precision.parameter}",
            remedy=f"use {precision.parameter} for both",
        )
    mesh, zero = case.strategy.mesh, case.strategy.zero_stage
    shards = zero > 0 and mesh.shards > 1
    if precision.parameter == "bfloat16" and not shards:
        return Violation(
            field="precision.parameter",
            value="bfloat16",
            why="weights without a float32 copy are for ZeRO 1 to 3 "
            "(bf16_master_weights_and_grads)",
            remedy="use float32 weights, or ZeRO",
        )
    return None


def _offload(case: Case) -> Violation | None:
    states, mesh = case.strategy.offload.states, case.strategy.mesh
    stage = case.strategy.zero_stage if mesh.shards > 1 else 0
    needs = {"none": 0, "optimizer": 1, "parameters": 3}[states]
    if stage >= needs:
        return None
    return Violation(
        field="offload.states",
        value=states,
        why=f"DeepSpeed offloads them from ZeRO {needs} on, and this is ZeRO {stage}",
        remedy=f"use zero_stage={needs}, or none",
    )


TARGETS = (
    Target(
        name="deepspeed",
        title="DeepSpeed",
        recipe="deepspeed",
        version="0.19.6",
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
                "sharding.patterns",
                "precision.parameter",
                "precision.compute",
                "precision.reduce",
                "optimizer",
                "context_algorithm",
                "grad_clip_norm",
                "offload.states",
                "communication.shards.second_copy",
                "communication.shards.weight_bits",
                "communication.shards.gradient_bits",
                # Consent to fewer bits: other methods have fields of their own.
                "semantics",
                "device_ranges",
            }
        ),
        leaves=frozenset({"stages.recompute", "compile"}),
        reasons={
            "mesh.pp": "the degree and the stages of a pipeline belong to the "
            "PipelineModule of a training script, not to the JSON",
            "mesh.ep": "experts are dealt out by modules of the training script",
            "sharding.sequence_parallel": "AutoTP keeps whole sequences between layers",
            "sharding.loss_parallel": "AutoTP gathers logits",
            "offload.activations": "deepspeed.checkpointing, which a training script "
            "calls, decides it",
            "overlap.forward_prefetch": "it counts parameters, not units",
            "overlap.backward_prefetch": "it counts parameters, not units",
        },
        rules=(
            ranks_in_order,
            _autotp,
            _shards_over_all,
            _ulysses,
            _precision,
            _offload,
        ),
        limits=(
            "pipelines (its script decides them) and expert parallelism",
            "ZeRO 3 beside tp; cp beside tp; vocabulary-parallel embeddings",
            "replicas of sharded groups, but for ZeRO 3 alone (MiCS)",
            "sequences divided in a ring",
            "sequence and loss parallelism beside tp",
            "prefetching by units, gradient buckets and compressed gradients",
        ),
        check="DeepSpeedConfig on a process group of the plan's size",
    ),
)
