"""Arguments of Megatron-LM core 0.19.2, and a script that starts its GPT trainer."""

from __future__ import annotations

import shlex
from itertools import groupby
from typing import TYPE_CHECKING

from planner.export.torchrun import about, sequence_length, torchrun_script
from planner.targets.layers import layers_of_stages
from planner.targets.megatron import megatron_stages

if TYPE_CHECKING:
    from planner.schema import Plan, Strategy
    from planner.targets.layers import StageLayers

__all__ = ["export_megatron", "megatron_arguments", "megatron_layout"]

_COMMUNICATION = {"ring": "p2p", "all_to_all": "a2a"}
_GRADIENT_BYTES = {"float32": 4, "bfloat16": 2}


def megatron_layout(stages: tuple[StageLayers, ...]) -> str:
    """``--pipeline-model-parallel-layout``: E, t and L are embedding, layer and loss.

    Args:
        stages: In order of execution, with the embedding in the first and the head in
            the last.
    """
    last = len(stages) - 1
    parts = []
    for index, stage in enumerate(stages):
        letters = "E" * (index == 0) + "t" * len(stage.layers) + "L" * (index == last)
        runs = ((letter, len(list(run))) for letter, run in groupby(letters))
        parts.append("".join(a if n == 1 else f"{a}*{n}" for a, n in runs))
    return "|".join(parts)


def _mesh(plan: Plan) -> list[list[str]]:
    strategy, mesh = plan.strategy, plan.strategy.mesh
    lines = [
        ["--tensor-model-parallel-size", str(mesh.tp)],
        ["--pipeline-model-parallel-size", str(mesh.pp)],
        ["--context-parallel-size", str(mesh.cp)],
    ]
    if mesh.cp > 1:
        lines.append(["--cp-comm-type", _COMMUNICATION[strategy.context_algorithm]])
    if mesh.ep > 1:
        lines.append(["--expert-model-parallel-size", str(mesh.ep)])
    if mesh.ep > 1 or (mesh.tp > 1 and _whole_experts(plan)):
        # Left out it is tp, and splits each expert.
        lines.append(["--expert-tensor-parallel-size", "1"])
    if mesh.tp > 1 and strategy.sharding.sequence_parallel:
        lines.append(["--sequence-parallel"])
    return lines


def _whole_experts(plan: Plan) -> bool:
    """True if a model has experts that tp does not split."""
    split = plan.strategy.sharding.patterns.items()
    return plan.model.experts > 0 and not any(
        "experts" in name.split(".") and style in ("colwise", "rowwise")
        for name, style in split
    )


def _pipeline(strategy: Strategy) -> list[list[str]]:
    """Flags that cut the layers; Megatron takes at most one of three."""
    if strategy.mesh.pp == 1:
        return []
    stages = megatron_stages(strategy) or ()
    counts = {len(stage.layers) for stage in stages}
    if len(counts) > 1:
        return [["--pipeline-model-parallel-layout", megatron_layout(stages)]]
    if strategy.virtual_stages > 1:
        return [["--num-layers-per-virtual-pipeline-stage", str(counts.pop())]]
    return []


def _data_parallel(strategy: Strategy) -> list[list[str]]:
    mesh = strategy.mesh
    if mesh.data_parallel * mesh.cp == 1:
        return []
    lines = [["--overlap-grad-reduce"]]
    if strategy.zero_stage == 1 and mesh.shards > 1:
        lines += [["--use-distributed-optimizer"], ["--overlap-param-gather"]]
        if mesh.dp_replicate > 1:
            lines.append(
                ["--num-distributed-optimizer-instances", str(mesh.dp_replicate)]
            )
    size = strategy.overlap.bucket_bytes
    if size is not None:
        # Megatron counts elements, a plan bytes.
        elements = max(1, size // _GRADIENT_BYTES[strategy.precision.reduce])
        lines.append(["--ddp-bucket-size", str(elements)])
    return lines


def _recompute(strategy: Strategy) -> list[list[str]]:
    kind = strategy.stages[0].recompute if strategy.stages else "none"
    if kind == "full":
        return [
            ["--recompute-granularity", "full"],
            ["--recompute-method", "uniform"],
            ["--recompute-num-layers", "1"],
        ]
    return [["--recompute-granularity", "selective"]] if kind == "selective" else []


def _precision(strategy: Strategy) -> list[list[str]]:
    compute, reduce = strategy.precision.compute, strategy.precision.reduce
    if compute == "float32":
        return []
    lines = [["--bf16" if compute == "bfloat16" else "--fp16"]]
    if reduce == "bfloat16":
        lines.append(["--grad-reduce-in-bf16"])
    else:
        lines.append(["--accumulate-allreduce-grads-in-fp32"])
    return lines


def _optimizer(strategy: Strategy) -> list[list[str]]:
    optimizer = strategy.optimizer
    clip = strategy.grad_clip_norm
    lines = [
        ["--optimizer", "sgd" if optimizer.name == "SGD" else "adam"],
        ["--lr", repr(optimizer.learning_rate)],
    ]
    if optimizer.weight_decay is not None:
        lines.append(["--weight-decay", repr(optimizer.weight_decay)])
    if clip is not None:
        lines.append(["--clip-grad", repr(clip)])
    if optimizer.name == "SGD":
        lines.append(["--sgd-momentum", repr(optimizer.momentum)])
    elif optimizer.betas is not None:
        first, second = optimizer.betas
        lines += [["--adam-beta1", repr(first)], ["--adam-beta2", repr(second)]]
    return lines


def megatron_arguments(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Every flag with its values, in order.

    Raises:
        ExportError: If Megatron-LM cannot divide the sequence.
    """
    strategy = plan.strategy
    mesh = strategy.mesh
    streams = mesh.tp if strategy.sharding.sequence_parallel else 1
    divisor = streams * (2 * mesh.cp if mesh.cp > 1 else 1)
    tokens = sequence_length(plan, "Megatron-LM", divisor)
    lines = [*_mesh(plan), *_pipeline(strategy), *_data_parallel(strategy)]
    stages = layers_of_stages(strategy)
    if stages:
        layers = sum(len(stage.layers) for stage in stages)
        lines.append(["--num-layers", str(layers)])
    if not plan.model.tied:
        lines.append(["--untie-embeddings-and-output-weights"])
    lines += [
        ["--seq-length", str(tokens)],
        ["--micro-batch-size", str(strategy.microbatch_size)],
        ["--global-batch-size", str(strategy.global_batch)],
    ]
    lines += [*_recompute(strategy), *_precision(strategy), *_optimizer(strategy)]
    return tuple(tuple(line) for line in lines)


def _notes(plan: Plan) -> list[str]:
    strategy = plan.strategy
    notes = [
        "Starts pretrain_gpt.py of Megatron-LM core 0.19.2 with megatron.args.",
        *about(plan),
        "Ranks: tp-cp-ep-dp-pp, Megatron's own order, innermost first, as in the plan.",
        "Give what the plan does not say as arguments of this script, where they win:",
        "sizes of the model, tokenizer, data, --train-iters, checkpoints.",
    ]
    if strategy.mesh.tp > 1:
        notes.append("Left to Megatron-LM: tp splits embedding, head and loss, too.")
    if any(stage.recompute == "selective" for stage in strategy.stages):
        notes.append(
            "Left to Megatron-LM: selective recomputes attention cores (see "
            "--recompute-modules)."
        )
    return notes


def export_megatron(plan: Plan) -> dict[str, str]:
    """``megatron.args`` (a flag a line, quoted for a shell), ``run.sh``, ``plan.json``.

    Raises:
        ExportError: If Megatron-LM cannot divide the sequence.
    """
    mesh = plan.strategy.mesh
    setup = [': "${MEGATRON:?set MEGATRON, the folder of a Megatron-LM checkout}"']
    if mesh.tp > 1 or mesh.cp > 1:
        # Megatron asks for it on Hopper and before, so that calls keep their order.
        setup.append("export CUDA_DEVICE_MAX_CONNECTIONS=1")
    setup += [
        """args=$(tr '\\n' ' ' <"$here/megatron.args")""",
        'eval "set -- $args \\"\\$@\\""',
    ]
    script = torchrun_script(
        plan,
        notes=_notes(plan),
        setup=setup,
        program='"$MEGATRON/pretrain_gpt.py" "$@"',
    )
    lines = (shlex.join(line) for line in megatron_arguments(plan))
    return {
        "megatron.args": "\n".join(lines) + "\n",
        "run.sh": script,
        "plan.json": plan.to_json(),
    }
