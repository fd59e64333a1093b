"""Rules of a step that is divided: over a mesh, into microbatches, or into stages.

Functions that take a :class:`Case` are rules of the executors; others are rules of
tables, too. Each returns value, rule and remedy; None if its rule is kept.
"""

from __future__ import annotations

from planner.schema.strategy import Strategy
from planner.schema.strategy_parts import Precision, TensorSharding, matches_pattern
from planner.schema.violations.case import Case

__all__ = [
    "batch_norm",
    "batch_norm_violation",
    "context",
    "coupled_violation",
    "experts",
    "hook_violation",
    "loss",
    "one_process_one_stage",
    "patterns",
    "schedule",
    "split_backward",
    "stages_named",
    "stream",
    "stream_violation",
    "tied",
    "v_on_gloo",
]

#: Dimension of the weight that a style splits.
_SPLIT_DIM = {"colwise": 0, "vocab": 0, "rowwise": 1}

#: Styles that leave a tp rank all tokens and some of the features.
_SPLIT = frozenset({"colwise", "rowwise"})


def hook_violation(
    hooked: str | None, devices: int, microbatches: int, precision: Precision
) -> str | None:
    """Why the hook on a parameter's gradient is not called as in one process.

    Args:
        hooked: Name of the parameter; None if there is no such hook.
        devices: Of the mesh.
        microbatches: Of a step.
        precision: Dtypes of the step.
    """
    if hooked is None:
        return None
    if devices > 1:
        given, why = f"{devices} devices", "whose shards and copies do not call it"
    elif microbatches > 1:
        given, why = f"num_microbatches={microbatches}", "which call it with parts"
    elif precision.compute in ("float16", "float8"):
        given, why = f"compute={precision.compute}", "which scales gradients"
    else:
        return None
    return (
        f"{hooked} has a hook on its gradient, with {given}, {why}; remove it, and "
        f"change the gradient in forward (a torch.autograd.Function within a unit) or "
        f"the optimizer's step (optimizer= of prepare), or plan for 1 device, 1 "
        f"microbatch and bfloat16 or float32"
    )


def stream_violation(
    sharding: TensorSharding, *, whole_stream: str | None, mixing: tuple[str, ...]
) -> str | None:
    """Why the residual stream cannot be divided along the sequence as is asked for.

    Args:
        sharding: What is asked for.
        whole_stream: See :class:`planner.schema.ModelReference`.
        mixing: The same.

    Returns:
        Value, rule and remedy; None if sequence parallelism is off, or right.
    """
    if not sharding.sequence_parallel:
        return None
    if whole_stream is not None:
        return (
            f"sequence_parallel, but {whole_stream}, so that every tp rank needs "
            f"whole sequences; switch it off"
        )
    split = [p for p, style in sharding.patterns.items() if style in _SPLIT]
    missing = [
        layer
        for layer in mixing
        if not any(matches_pattern(pattern, layer) for pattern in split)
    ]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return (
            f"sequence_parallel, but no pattern splits {missing[0]}{more}, between "
            f"which tokens see each other; add it to sharding.patterns or switch "
            f"sequence_parallel off"
        )
    return None


def batch_norm_violation(
    strategy: Strategy, batch_norm_values: int | None
) -> str | None:
    """Why the batch norms of a model cannot take the statistics of a batch.

    Data-parallel ranks take them together; microbatches come after each other, and each
    has its own, which is another model. ``semantics`` consents to that; then each rank
    has its own, too.

    Args:
        strategy: How the batch is divided.
        batch_norm_values: See :class:`planner.schema.ModelReference`.

    Returns:
        Value, rule and remedy; None if batch norms see what they are to see.
    """
    if batch_norm_values is None:
        return None
    ranks, count = strategy.mesh.data_parallel, strategy.num_microbatches
    size = strategy.microbatch_size
    if strategy.semantics == "exact":
        if count > 1:
            return (
                f"num_microbatches={count} gives the model's batch norms the "
                f"statistics of each microbatch instead of the batch's; use "
                f"num_microbatches=1, or consent by semantics=approximate"
            )
        if ranks > 1 and strategy.mesh.pp > 1:
            return (
                f"pp={strategy.mesh.pp} with data parallel {ranks}: stages do not take "
                f"the statistics of batch norms over ranks; use pp=1, or consent by "
                f"semantics=approximate"
            )
    else:
        ranks = 1
    if size * ranks * batch_norm_values >= 2:
        return None
    return (
        f"microbatch_size={size} leaves a batch norm of the model one value a channel "
        f"({batch_norm_values} a sample), of which there is no variance; use "
        f"microbatch_size=2 or more"
    )


def coupled_violation(
    data_parallel: int,
    num_microbatches: int,
    own_loss: str | None,
    *,
    reason: str = "",
) -> str | None:
    """Why a batch may not be divided for a model whose samples meet.

    Args:
        data_parallel: Ranks that the batch is divided over.
        num_microbatches: Parts of each rank's share.
        own_loss: See :class:`planner.schema.Workload`.
        reason: How they meet, where that is known.

    Returns:
        Value, rule and remedy; None if the batch stays whole, or may be divided.
    """
    if own_loss != "coupled" or data_parallel * num_microbatches == 1:
        return None
    return (
        f"data parallel {data_parallel} x num_microbatches={num_microbatches} divides "
        f"the batch, and the model or its loss compares its samples with each other, "
        f"or nobody knows that it does not, which would be another loss"
        f"{reason and f' ({reason})'}; use "
        f"dp_replicate=1, dp_shard=1 and num_microbatches=1"
    )


def _spatial(case: Case) -> str | None:
    """Why ranks cannot have shards of samples."""
    strategy, sizes = case.strategy, case.spatial_sizes
    split = strategy.spatial
    if not sizes:
        return (
            f"spatial={split}, but the model's samples cannot be cut: it has no "
            f"convolutions over them, or mixes these with what needs whole samples; "
            f"use cp=1"
        )
    if len(split) > len(sizes) or any(
        size % parts for size, parts in zip(sizes, split, strict=False)
    ):
        return (
            f"spatial={split} does not divide samples of {sizes}; use as many shards "
            f"as divide each dimension"
        )
    mesh = strategy.mesh
    for axis in ("pp", "tp", "ep"):
        if getattr(mesh, axis) > 1:
            return (
                f"spatial={split} with {axis}={getattr(mesh, axis)}; shards of samples "
                f"go with data parallelism and ZeRO alone, use {axis}=1"
            )
    if strategy.compile:
        return (
            f"spatial={split} with compile=True, which does not see where halos are "
            f"exchanged; use compile=False"
        )
    plain = Strategy()
    ways = (strategy.synchronisation, strategy.learning)
    if ways != (plain.synchronisation, plain.learning):
        return (
            f"spatial={split} with synchronisation={strategy.synchronisation} and "
            f"learning={strategy.learning}; shards of samples go with all-reduced "
            f"gradients alone, use them"
        )
    return None


def context(case: Case) -> str | None:
    """Require samples that cp can divide: sequences, or images and volumes."""
    mesh = case.strategy.mesh
    if case.strategy.context_algorithm == "halo":
        return _spatial(case)
    if mesh.cp > 1 and case.attention is None:
        return (
            f"cp={mesh.cp}, but the model's attention is neither causal nor full "
            f"throughout, has dropout or masks, or forward takes no position_ids; use "
            f"cp=1"
        )
    ring = case.strategy.context_algorithm == "ring"
    compute = case.strategy.precision.compute
    if mesh.cp > 1 and ring and case.backend == "nccl" and compute == "float32":
        return (
            f"context_algorithm=ring with compute={compute} on GPUs; flash kernels "
            f"take bfloat16 there, use it or context_algorithm=all_to_all"
        )
    return None


def stream(case: Case) -> str | None:
    """Apply :func:`stream_violation`."""
    return stream_violation(
        case.strategy.sharding, whole_stream=case.whole_stream, mixing=case.mixing
    )


def batch_norm(case: Case) -> str | None:
    """Apply :func:`batch_norm_violation`."""
    return batch_norm_violation(case.strategy, case.batch_norm_values)


def experts(case: Case) -> str | None:
    """Require ranks and patterns for ep to divide experts by."""
    strategy = case.strategy
    mesh = strategy.mesh
    if mesh.ep == 1:
        return None
    alone = mesh.ep == mesh.tp and mesh.dp_replicate * mesh.shards == 1
    if strategy.zero_stage == 0 and not alone:
        return (
            f"ep={mesh.ep} with zero_stage=0; experts are dealt out over the ranks "
            f"that ZeRO shards over and tp, use zero_stage=1, 2 or 3, or tp={mesh.ep} "
            f"without replicas"
        )
    if "experts" not in strategy.sharding.patterns.values():
        return (
            f"ep={mesh.ep} without a pattern of style 'experts'; add it to "
            f"sharding.patterns or use ep=1"
        )
    return None


def stages_named(case: Case) -> str | None:
    """Require that stages name their modules where tp or pp looks them up."""
    strategy = case.strategy
    mesh = strategy.mesh
    if (mesh.pp > 1 or mesh.tp > 1) and not strategy.stages:
        return (
            f"pp={mesh.pp}, tp={mesh.tp} without stages; name the modules of each "
            f"of the {mesh.pp * strategy.virtual_stages} stages"
        )
    return None


def one_process_one_stage(case: Case) -> str | None:
    """Require a pipeline for several stages on one rank."""
    strategy = case.strategy
    virtual = strategy.virtual_stages
    if strategy.mesh.pp == 1 and virtual > 1:
        return f"virtual_stages={virtual} without a pipeline; use 1, or pp > 1"
    return None


def schedule(case: Case) -> str | None:
    """Require a schedule that torch runs on so many stages and microbatches."""
    strategy, spec = case.strategy, case.strategy.schedule_spec
    pp = strategy.mesh.pp
    if pp == 1:
        return None
    reason = spec.violation(pp, strategy.virtual_stages, strategy.num_microbatches)
    if reason is None and spec.runs is None:
        return (
            f"schedule {spec.name}, which no class of torch runs; use 1F1B or another "
            f"schedule of torch"
        )
    return reason


def v_on_gloo(case: Case) -> str | None:
    """Rule out schedules that greet their own rank, to which gloo has no connection.

    Before a first step torch greets both neighbours of every stage; at the turn of a V
    the neighbour is the rank itself ("Pair is not connected", seen with torch 2.11).
    """
    since = case.strategy.schedule_spec.runs_on_gloo_since
    if case.strategy.mesh.pp == 1 or since is None or case.backend != "gloo":
        return None
    if case.torch_release >= since:
        return None
    return (
        f"schedule {case.strategy.schedule} on gloo with torch {case.torch_version}, "
        f"which sends to its own rank, and gloo cannot; use torch "
        f"{since[0]}.{since[1]} or newer, or InterleavedZeroBubble"
    )


def split_backward(case: Case) -> str | None:
    """Rule out what a backward in two halves does not go with."""
    strategy = case.strategy
    if strategy.mesh.pp == 1 or not strategy.schedule_spec.splits_backward:
        return None
    if strategy.zero_stage == 3 and strategy.mesh.shards > 1:
        return (
            f"zero_stage=3 with {strategy.schedule}; freeing parameters between the "
            f"halves of a split backward gives wrong gradients, use zero_stage=2"
        )
    kinds = {stage.recompute for stage in strategy.stages} - {"none"}
    if kinds:
        return (
            f"recompute={kinds.pop()} with {strategy.schedule}; a split backward "
            f"recomputes many times or fails, use recompute=none or 1F1B"
        )
    return None


def loss(case: Case) -> str | None:
    """Require logits that tp divides where the loss is taken of parts of them."""
    strategy = case.strategy
    if not strategy.sharding.loss_parallel:
        return None
    head = strategy.stages[-1].modules[-1] if strategy.stages else ""
    if strategy.mesh.tp == 1 or _style(strategy, f"{head}.weight") != "colwise":
        return (
            f"loss_parallel with tp={strategy.mesh.tp} and a last module "
            f"{head or '(none)'}; it needs tp > 1 and a last module of style colwise, "
            f"use loss_parallel=False"
        )
    return None


def patterns(case: Case) -> str | None:
    """Require patterns for tp to shard by."""
    strategy = case.strategy
    sharding = strategy.sharding
    if strategy.mesh.tp > 1 and not sharding.patterns:
        return (
            f"tp={strategy.mesh.tp} without patterns to shard by; add them to "
            f"sharding.patterns or use tp=1"
        )
    return None


def tied(case: Case) -> str | None:
    """Require that tied parameters are split along one dimension."""
    if case.strategy.mesh.tp == 1:
        return None
    for group in case.tied:
        styles = {name: _style(case.strategy, name) for name in group}
        if len({_SPLIT_DIM.get(style) for style in styles.values()}) > 1:
            shown = ", ".join(f"{name} {style}" for name, style in styles.items())
            return (
                f"tied parameters are split unlike ({shown}); give all of them styles "
                f"that split one dimension (vocab with colwise), or use tp=1"
            )
    return None


def _style(strategy: Strategy, parameter: str) -> str:
    module = parameter.rpartition(".")[0]
    patterns = strategy.sharding.patterns.items()
    found = (s for p, s in patterns if matches_pattern(p, module))
    return next(found, "unsplit")
