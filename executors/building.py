"""A plan's part of a model on this rank: cut into stages, and made parallel."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from executors.data import synthetic_batch
from executors.deferred.materialize import compute_attributes
from executors.deferred.recording import Recording
from executors.losses import LossFunction
from executors.mesh import ProcessMesh
from executors.names import units_of_model
from executors.parallelize import ParallelPart, parallelize
from executors.pipelines.pipeline import Pipeline
from executors.pipelines.stages import LoweredStage, cuts_inside_stream, lower
from executors.pipelines.tied import TiedSync, find_copies, untie
from executors.replicas import HoldingReplicas, Replicas, SkippingReplicas
from executors.strategies.context import (
    local_positions,
    slice_sequence,
    whole_sequences,
)
from executors.strategies.halo import local_region
from planner.errors import ExecutionError
from planner.kv_cache import disable_kv_cache
from planner.schema import Plan, Recompute
from planner.schema.violations import coupled_violation

__all__ = [
    "ModelParts",
    "build_parts",
    "densify_gradients",
    "further_inputs",
    "lower_stages",
    "own_positions",
    "own_region",
    "own_regions",
    "own_tokens",
    "require_whole_batch",
    "seed_dropout",
    "spatial_inputs",
]


def own_positions(plan: Plan, index: int) -> torch.Tensor | None:
    """Tokens of every sequence that one rank along cp has; None for all.

    Args:
        plan: What to do.
        index: Place of the rank along cp.
    """
    strategy = plan.strategy
    if strategy.mesh.cp == 1 or strategy.spatial:
        return None
    length = plan.workload.seq_len or 0
    return local_positions(length, index, strategy.mesh.cp, strategy.context_algorithm)


def spatial_inputs(plan: Plan) -> frozenset[str]:
    """Names of the inputs of which ranks along cp have shards."""
    if not plan.strategy.spatial:
        return frozenset()
    sizes = plan.model.spatial_sizes
    return frozenset(
        spec.name
        for spec in plan.workload.inputs
        if tuple(spec.shape[1:]) == sizes and "float" in spec.dtype
    )


def own_regions(plan: Plan, index: int) -> dict[str, tuple[slice, ...]]:
    """Shards that one rank along cp has, by input; empty if it has whole samples.

    Args:
        plan: What to do.
        index: Place of the rank along cp.
    """
    if not plan.strategy.spatial:
        return {}
    region = local_region(plan.model.spatial_sizes, index, plan.strategy.spatial)
    return dict.fromkeys(sorted(spatial_inputs(plan)), region)


def own_region(
    plan: Plan, index: int, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Cut the shards of one rank along cp out of samples.

    Args:
        plan: What to do.
        index: Place of the rank along cp.
        inputs: Keyword of forward to tensor, of whole samples or of these shards.

    Raises:
        ExecutionError: If an input is neither.
    """
    sizes, factors = plan.model.spatial_sizes, plan.strategy.spatial
    region = local_region(sizes, index, factors)
    shard = tuple(part.stop - part.start for part in region)
    cut = dict(inputs)
    for name in spatial_inputs(plan) & inputs.keys():
        found = tuple(inputs[name].shape[2:])
        if found not in (sizes, shard):
            raise ExecutionError(
                f"{name!r} has samples of {found} values, the plan is for {sizes} with "
                f"spatial={factors}; give whole samples, or shards of {shard}"
            )
        if found != shard:
            part = inputs[name][(slice(None), slice(None), *region)]
            cut[name] = part.contiguous()
    return cut


def own_tokens(
    plan: Plan, positions: torch.Tensor | None, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Cut the tokens of one rank along cp out of inputs.

    Args:
        plan: What to do.
        positions: From :func:`own_positions`.
        inputs: Keyword of forward to tensor, of whole sequences.
    """
    if positions is None:
        return dict(inputs)
    return slice_sequence(inputs, positions, plan.workload.seq_len or 0)


def require_whole_batch(plan: Plan) -> None:
    """Refuse to divide what the loss needs together: samples, or a sequence.

    Raises:
        ExecutionError: If the plan does.
    """
    strategy = plan.strategy
    violation = coupled_violation(
        strategy.mesh.data_parallel, strategy.num_microbatches, plan.workload.own_loss
    )
    if violation is not None:
        raise ExecutionError(violation)
    divided = strategy.mesh.cp > 1 and not strategy.spatial
    if divided and plan.workload.loss == "model":
        raise ExecutionError(
            f"cp={strategy.mesh.cp} with the model's own loss, which each rank would "
            f"compute of its part of a sequence, without the label of the next token; "
            f"plan with loss='cross_entropy' and example_inputs without labels"
        )


def densify_gradients(model: nn.Module) -> None:
    """Let embeddings make dense gradients, which shards and the plan's optimizers take.

    Their values are those of ``sparse=True``, which lists the rows that were read.

    Args:
        model: Whose modules are changed.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False


def further_inputs(plan: Plan, model: nn.Module) -> frozenset[str]:
    """Inputs that forward takes by name and the plan does not name, but can do with.

    A pipeline is cut for the inputs of the plan, cp divides no masks, and what tp does
    to an input was looked at for those of the plan.
    """
    mesh = plan.strategy.mesh
    if max(mesh.pp, mesh.cp, mesh.tp) > 1:
        return frozenset()
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.kind in plain}
    if plan.workload.loss != "model":
        # Labels are the loss's here, or nobody's.
        names.discard("labels")
    return frozenset(names - {spec.name for spec in plan.workload.inputs})


def lower_stages(
    plan: Plan, model: nn.Module, device: torch.device, cp_index: int = 0
) -> list[LoweredStage]:
    """Cut a model into the stages of a plan's pipeline; the same for every rank.

    Args:
        plan: What to do.
        model: Built equally on all ranks, in the plan's parameter dtype. Its modules
            become part of the stages.
        device: Where the stages will run.
        cp_index: Place of the rank along cp: whose tokens are the example.
    """
    disable_kv_cache(model.modules())
    densify_gradients(model)
    strategy = plan.strategy
    precision, tp = strategy.precision, strategy.mesh.tp
    made = synthetic_batch(plan.workload, 0, samples=strategy.microbatch_size)
    sample = {spec.name: made[spec.name] for spec in plan.workload.inputs}
    with whole_sequences() if strategy.mesh.cp > 1 else nullcontext():
        return lower(
            model,
            strategy.run_stages,
            own_tokens(plan, own_positions(plan, cp_index), sample),
            kind=plan.workload.loss,
            device=device,
            wire=(
                getattr(torch, precision.parameter),
                getattr(torch, precision.activation_dtype),
            ),
            output_shards=tp if strategy.divides_logits else 1,
            computes_loss=strategy.loss_chunks > 1,
            stream_shards=tp,
            inside_stream=cuts_inside_stream(model, strategy),
        )


@dataclass(kw_only=True)
class ModelParts:
    """Part of a model that one rank has.

    Attributes:
        parts: Stages of this rank by index; one without a pipeline.
        pipeline: Runs the stages; None without a pipeline.
        tied: Keeps tied weights in several stages equal; None without a pipeline.
        sends: Empty tensors like those that each stage makes; none without stages.
    """

    parts: dict[int, ParallelPart] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    tied: TiedSync | None = None
    sends: Sequence[tuple[torch.Tensor, ...]] = ()


def build_parts(
    plan: Plan,
    model: nn.Module,
    place: ProcessMesh,
    *,
    replicas: Replicas,
    loss: LossFunction,
    recording: Recording | None,
    lowered: Sequence[LoweredStage] | None,
) -> ModelParts:
    """Make this rank's part of a model parallel; collective.

    Args:
        plan: What to do.
        model: Built equally on all ranks. It is taken apart: do not use it after.
        place: Where this process stands.
        replicas: What keeps copies of the weights together.
        loss: Of the last stage of a pipeline.
        recording: What the model's tensors without values get theirs from.
        lowered: Stages from :func:`lower_stages`; None to make them here.

    Raises:
        FingerprintError: If the model lacks a module that the plan names.
        ExecutionError: If the model cannot be cut into stages.
        StrategyError: If tp cannot split a module.
    """
    if len(plan.strategy.run_stages) <= 1:
        part = _whole_part(plan, model, place, replicas, recording)
        loss.head = part.head
        return ModelParts(parts={0: part})
    if lowered is None:
        lowered = _lower_recorded(plan, model, place, recording)
    return _stage_parts(plan, place, replicas, loss, recording, lowered)


def _whole_part(
    plan: Plan,
    model: nn.Module,
    place: ProcessMesh,
    replicas: Replicas,
    recording: Recording | None,
) -> ParallelPart:
    strategy = plan.strategy
    densify_gradients(model)
    named = [name for stage in strategy.stages for name in stage.modules]
    recompute: Recompute = strategy.stages[0].recompute if strategy.stages else "none"
    elsewhere: Collection[str] = ()
    if isinstance(replicas, SkippingReplicas):
        elsewhere = replicas.elsewhere(model, strategy, place)
    return parallelize(
        model,
        strategy,
        place,
        units=units_of_model(model, named),
        recompute=recompute,
        causal=plan.model.attention != "full",
        recording=recording,
        elsewhere=elsewhere,
        spatial_inputs=spatial_inputs(plan),
    )


def _lower_recorded(
    plan: Plan, model: nn.Module, place: ProcessMesh, recording: Recording | None
) -> list[LoweredStage]:
    with recording.active() if recording else nullcontext():
        model.to(getattr(torch, plan.strategy.precision.parameter))
    if recording is not None:
        compute_attributes(model, recording)
    return lower_stages(plan, model, place.device, place.index("cp"))


def _stage_parts(
    plan: Plan,
    place: ProcessMesh,
    replicas: Replicas,
    loss: LossFunction,
    recording: Recording | None,
    lowered: Sequence[LoweredStage],
) -> ModelParts:
    """Make the stages of this rank parallel, and the pipeline that runs them."""
    strategy = plan.strategy
    built = ModelParts(sends=[stage.sends for stage in lowered])
    copies = find_copies([stage.module for stage in lowered])
    stages, rank = strategy.run_stages, place.index("pp")
    own = [index for index, stage in enumerate(stages) if stage.rank == rank]
    with recording.active() if recording else nullcontext():
        untie({index: lowered[index].module for index in own}, copies)
    for index in own:
        built.parts[index] = parallelize(
            lowered[index].module,
            strategy,
            place,
            units=lowered[index].units,
            recompute=stages[index].recompute,
            causal=plan.model.attention != "full",
            recording=recording,
            input_sharded=lowered[index].input_sharded,
            output_sharded=lowered[index].output_sharded,
        )
        if isinstance(replicas, HoldingReplicas):
            replicas.take(index, built.parts[index], place)
    if place.size("pp") == 1:
        # They run in turn by a rule of the copies' own.
        return built
    inner = {index: part.inner for index, part in built.parts.items()}
    built.tied = TiedSync(copies, inner, strategy, place)
    loss.head = next((p.head for p in built.parts.values() if p.head), None)
    modules = {index: part.module for index, part in built.parts.items()}
    casts = {index: part.casts for index, part in built.parts.items()}
    mine = [lowered[index] for index in own]
    built.pipeline = Pipeline(mine, modules, strategy, place, loss, casts)
    return built


def seed_dropout(plan: Plan, place: ProcessMesh) -> None:
    """Seed dropout: masks differ between data ranks and stages, not tp ranks."""
    sequence = plan.strategy.sharding.sequence_parallel
    tp = place.index("tp") if sequence else 0
    data = place.data_index
    if not plan.strategy.spatial:
        # Ranks with shards of one sample compute its dense layers alike.
        data = data * place.size("cp") + place.index("cp")
    offset = (data * place.size("pp") + place.index("pp")) * 1009 + tp
    torch.manual_seed(torch.initial_seed() + offset)
