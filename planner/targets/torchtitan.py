"""torchtitan: its models, trainer and parallelism, set by a recipe or a TOML file."""

from __future__ import annotations

from planner.schema import Strategy
from planner.targets.base import Case, Target, Violation
from planner.targets.layers import layers_of_stages
from planner.targets.rules import (
    experts_of_own_tokens,
    no_float8,
    offloads_parameters,
    one_recompute,
    ranks_in_order,
)

__all__ = ["TARGETS", "torchtitan_parts"]

#: Last components of module names to torchtitan's; None where it has no module.
_NAMES = {
    "embed_tokens": "tok_embeddings",
    "embed_in": "tok_embeddings",
    "tok_embeddings": "tok_embeddings",
    "norm": "norm",
    "final_layer_norm": "norm",
    "lm_head": "lm_head",
    "embed_out": "lm_head",
    "output": "lm_head",
    "rotary_emb": None,
}

_SAID = frozenset(
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
        "optimizer",
        "grad_clip_norm",
        "compile",
        "offload.states",
        "device_ranges",
    }
)


def torchtitan_parts(
    strategy: Strategy, head: str = "lm_head"
) -> tuple[tuple[str, ...], ...] | None:
    """Return the modules of every virtual stage under torchtitan's names, in order.

    None if a cut goes through a layer, or a module has no name there.

    Args:
        strategy: With named stages.
        head: The last projection: ``lm_head`` in 0.3, ``output`` in 0.2.
    """
    stages = layers_of_stages(strategy)
    if stages is None:
        return None
    parts: list[tuple[str, ...]] = []
    for stage in stages:
        ends = []
        for names in (stage.before, stage.after):
            known = [_NAMES.get(name.rpartition(".")[2], "") for name in names]
            if "" in known:
                return None
            ends.append([head if n == "lm_head" else n for n in known if n])
        layers = [f"layers.{index}" for index in stage.layers]
        parts.append((*ends[0], *layers, *ends[1]))
    return tuple(parts)


def _whole_layers(case: Case) -> Violation | None:
    strategy = case.strategy
    if not case.layers or strategy.mesh.pp == 1 or torchtitan_parts(strategy):
        return None
    return Violation(
        field="stages.modules",
        value=str([len(stage.modules) for stage in strategy.stages]),
        why="stages are lists of whole layers between tok_embeddings, norm and the "
        "head, and these stages are cut elsewhere or hold modules that torchtitan's "
        "models do not have",
        remedy="use a decoder-only language model that is cut between layers, or pp=1",
    )


def _sharded_weights(case: Case) -> Violation | None:
    strategy = case.strategy
    mesh = strategy.mesh
    if mesh.shards == 1 or strategy.zero_stage >= 2:
        return None
    return Violation(
        field="zero_stage",
        value=str(strategy.zero_stage),
        why="dp_shard and cp go through fully_shard, which shards gradients, too",
        remedy="use zero_stage 2 or 3, or dp_replicate for plain replicas",
    )


def _schedule(case: Case) -> Violation | None:
    strategy = case.strategy
    if strategy.mesh.pp == 1 or strategy.schedule_spec.runs is not None:
        return None
    return Violation(
        field="schedule",
        value=strategy.schedule,
        why="it takes the names of torch's schedules alone",
        remedy="use 1F1B or another schedule of torch",
    )


def _split_backward(case: Case) -> Violation | None:
    strategy = case.strategy
    mesh = strategy.mesh
    sharded = mesh.shards > 1 and strategy.zero_stage == 3
    if not sharded or mesh.pp == 1:
        return None
    if not strategy.schedule_spec.splits_backward:
        return None
    return Violation(
        field="zero_stage",
        value="3",
        why=f"{strategy.schedule} computes weight gradients after FSDP has freed the "
        f"weights, and torch gets them wrong without an error",
        remedy="use zero_stage=2 or the schedule 1F1B or Interleaved1F1B",
    )


def _gathered_keys(case: Case) -> Violation | None:
    strategy = case.strategy
    if strategy.mesh.cp == 1 or strategy.context_algorithm == "ring":
        return None
    return Violation(
        field="context_algorithm",
        value=strategy.context_algorithm,
        why="its cp ranks gather keys and values and never trade sequence for heads",
        remedy="use ring, which moves as many bytes",
    )


def _tied_pipeline(case: Case) -> Violation | None:
    if not case.tied or case.strategy.mesh.pp == 1:
        return None
    return Violation(
        field="mesh.pp",
        value=str(case.strategy.mesh.pp),
        why="it refuses tied weights in a pipeline",
        remedy="use pp=1",
    )


def _dtypes(case: Case) -> Violation | None:
    if case.strategy.precision.compute != "float16":
        return None
    return Violation(
        field="precision.compute",
        value="float16",
        why="mixed_precision_param is bfloat16 or float32",
        remedy="use bfloat16",
    )


def _states(case: Case) -> Violation | None:
    states = case.strategy.optimizer.state_dtype
    parameter = case.strategy.precision.parameter
    if parameter in ("float32", states):
        return None
    return Violation(
        field="optimizer.state_dtype",
        value=states,
        why="optimizer states have the dtype of the weights, bfloat16",
        remedy="use state_dtype=bfloat16 or parameter=float32",
    )


def _states_as_weights(case: Case) -> Violation | None:
    states = case.strategy.optimizer.state_dtype
    parameter = case.strategy.precision.parameter
    if states == parameter:
        return None
    return Violation(
        field="optimizer.state_dtype",
        value=states,
        why=f"optimizer states have the dtype of the weights, {parameter}",
        remedy=f"use state_dtype={parameter}",
    )


def _replicas_alone(case: Case) -> Violation | None:
    mesh = case.strategy.mesh
    plain = mesh.dp_replicate > 1 and mesh.shards == 1
    if not plain or mesh.pp * mesh.tp == 1:
        return None
    return Violation(
        field="mesh.dp_replicate",
        value=str(mesh.dp_replicate),
        why="plain replicas do not go with another axis there",
        remedy="use dp_shard with zero_stage 2, or the target torchtitan (0.3)",
    )


def _sequence_parallel(case: Case) -> Violation | None:
    strategy = case.strategy
    if strategy.mesh.tp == 1 or strategy.sharding.sequence_parallel:
        return None
    return Violation(
        field="sharding.sequence_parallel",
        value="False",
        why="its tp always divides the sequence between layers",
        remedy="use sequence_parallel=true, or the target torchtitan (0.3)",
    )


def _mixed_precision(case: Case) -> Violation | None:
    strategy = case.strategy
    mesh, precision = strategy.mesh, strategy.precision
    if precision.parameter == precision.compute or mesh.shards > 1:
        return None
    if mesh.pp * mesh.tp == 1:
        return None
    return Violation(
        field="precision.compute",
        value=precision.compute,
        why="without FSDP it computes tp and pp in the dtype of the weights, "
        f"{precision.parameter}",
        remedy="use dp_shard above 1, equal dtypes, or the target torchtitan (0.3)",
    )


_RULES = (
    offloads_parameters,
    _whole_layers,
    one_recompute,
    experts_of_own_tokens,
    _sharded_weights,
    _schedule,
    _split_backward,
    _gathered_keys,
    _tied_pipeline,
    no_float8,
    offloads_parameters,
    _dtypes,
    ranks_in_order,
)

#: Names that its config takes.
_OPTIMIZERS = frozenset({"Adam", "AdamW"})

_LIMITS = (
    "ZeRO 1 (ZeRO 2 is fsdp_reshard_after_forward=never, ZeRO 3 is always)",
    "ZeRO 3 with schedules that split backward",
    "recomputation that differs by stage",
    "stages cut inside a layer, tied weights in a pipeline",
    "ep together with tp, but without sequence parallelism",
    "all-to-all context parallelism",
    "reductions in bfloat16, products in float16 and float8",
    "optimizers but Adam and AdamW",
    "compressed gradients, prefetch depths, bucket sizes",
    "ranks out of the order of devices",
)

TARGETS = (
    Target(
        name="torchtitan",
        title="torchtitan",
        recipe="torchtitan",
        version="0.3.0",
        runs="itself",
        says=_SAID,
        leaves=frozenset(
            {"sharding.patterns", "sharding.loss_parallel", "context_algorithm"}
        ),
        rules=(*_RULES, _states),
        optimizers=_OPTIMIZERS,
        limits=_LIMITS,
        check="recipe parsed by torchtitan 0.3.0's ConfigManager, its models split by "
        "its own code",
    ),
    Target(
        name="torchtitan-0.2",
        title="torchtitan",
        recipe="torchtitan",
        version="0.2.2",
        runs="itself",
        says=_SAID | {"sharding.loss_parallel"},
        leaves=frozenset({"sharding.patterns", "context_algorithm"}),
        rules=(
            *_RULES,
            _states_as_weights,
            _replicas_alone,
            _sequence_parallel,
            _mixed_precision,
        ),
        optimizers=_OPTIMIZERS,
        limits=(
            *_LIMITS,
            "tp without sequence parallelism",
            "plain replicas together with tp or pp",
            "mixed precision of tp or pp without sharding",
            "optimizer states in another dtype than weights",
        ),
        check="TOML parsed by torchtitan 0.2.2's ConfigManager",
    ),
)
