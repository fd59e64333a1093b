"""Violations of a strategy: why a model, or Meshwright's own executors, cannot run it.

The planner leaves out what violates a rule here before it prices it; the executors look
again before they start. Every rule of theirs is torch's own, or one of the executors',
seen to fail with torch 2.13, or with the older torch that it names.

Two ways of dividing a step give wrong gradients, or none, on some models, whoever runs
the plan: :func:`stream_violation`, :func:`batch_norm_violation`. Facts about the model
that decide it are in :class:`planner.schema.ModelReference`; a plan is checked when it
is read, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version

from planner.errors import StrategyError
from planner.schema import methods
from planner.schema.optimizers import OPTIMIZERS
from planner.schema.strategy import Recompute, Strategy
from planner.schema.strategy_parts import (
    Offload,
    ShardTraffic,
    TensorSharding,
    matches_pattern,
)

__all__ = [
    "Case",
    "batch_norm_violation",
    "boundary_violation",
    "comparison_violation",
    "coupled_violation",
    "executor_violations",
    "installed_torch",
    "offload_violation",
    "shards_violation",
    "stream_violation",
    "whole_violation",
]

Tied = tuple[tuple[str, ...], ...]

#: Dimension of the weight that a style splits.
_SPLIT_DIM = {"colwise": 0, "vocab": 0, "rowwise": 1}

#: Styles that leave a tp rank all tokens and some of the features.
_SPLIT = frozenset({"colwise", "rowwise"})


@cache
def installed_torch() -> str:
    """Version of the torch that is installed."""
    return version("torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A strategy, and what of the model and the machines decides whether it runs.

    Attributes:
        strategy: What is asked for.
        tied: Groups of parameter FQNs that are one tensor.
        backend: ``gloo`` or ``nccl``.
        attention: See :class:`planner.schema.ModelReference`.
        whole_stream: The same.
        mixing: The same.
        batch_norm_values: The same.
        spatial_sizes: The same.
        experts: The same.
        torch_version: Of the torch that would run it.
        kinds: Recomputation of its stages, where it does not list them.
    """

    strategy: Strategy
    tied: tuple[tuple[str, ...], ...] = ()
    backend: str = "gloo"
    attention: str | None = "causal"
    whole_stream: str | None = None
    mixing: tuple[str, ...] = ()
    batch_norm_values: int | None = None
    spatial_sizes: tuple[int, ...] = ()
    experts: int = 0
    torch_version: str = field(default_factory=installed_torch)
    kinds: tuple[Recompute, ...] = ()

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """Recomputation of each stage."""
        return self.kinds or tuple(stage.recompute for stage in self.strategy.stages)

    @property
    def torch_release(self) -> tuple[int, int]:
        """Major and minor version of torch."""
        major, minor = self.torch_version.split(".")[:2]
        return int(major), int(minor)


def executor_violations(
    strategy: Strategy,
    *,
    tied: Tied = (),
    backend: str = "gloo",
    attention: str | None = "causal",
    whole_stream: str | None = None,
    mixing: tuple[str, ...] = (),
    batch_norm_values: int | None = None,
    spatial_sizes: tuple[int, ...] = (),
    experts: int = 0,
    torch_version: str | None = None,
) -> tuple[str, ...]:
    """Violations of what the executors can run; empty if they run the strategy.

    Args:
        strategy: What is asked for.
        tied: Groups of parameter FQNs that are one tensor.
        backend: ``gloo`` or ``nccl``.
        attention: See :class:`planner.schema.ModelReference`.
        whole_stream: The same.
        mixing: The same.
        batch_norm_values: The same.
        spatial_sizes: The same.
        experts: The same.
        torch_version: Of the torch that would run it; None for the installed one.

    Returns:
        One line each: the value, the rule, the remedy.
    """
    case = Case(
        strategy=strategy,
        tied=tied,
        backend=backend,
        attention=attention,
        whole_stream=whole_stream,
        mixing=mixing,
        batch_norm_values=batch_norm_values,
        spatial_sizes=spatial_sizes,
        experts=experts,
        torch_version=torch_version or installed_torch(),
    )
    found = (rule(case) for rule in _RULES)
    return (*(one for one in found if one), *methods.violations(case))


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
    data_parallel: int, num_microbatches: int, own_loss: str | None
) -> str | None:
    """Why a batch may not be divided for a model whose samples meet.

    Args:
        data_parallel: Ranks that the batch is divided over.
        num_microbatches: Parts of each rank's share.
        own_loss: See :class:`planner.schema.Workload`.

    Returns:
        Value, rule and remedy; None if the batch stays whole, or may be divided.
    """
    if own_loss != "coupled" or data_parallel * num_microbatches == 1:
        return None
    return (
        f"data parallel {data_parallel} x num_microbatches={num_microbatches} divides "
        f"the batch, and the model or its loss compares its samples with each other, "
        f"or nobody knows that it does not, which would be another loss; use "
        f"dp_replicate=1, dp_shard=1 and num_microbatches=1"
    )


def comparison_violation(strategy: Strategy) -> str | None:
    """Why the first step of a strategy is not to be compared with plain training.

    Returns:
        Value, rule and remedy; None if a step computes what plain training would.
    """
    for method, value in methods.methods_of(strategy):
        if method.inexact:
            return (
                f"check_first_step with {method.slot}={value}; {method.inexact}, so "
                f"that it is not one process's, leave check_first_step out"
            )
    return None


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


def _context(case: Case) -> str | None:
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


def _stream(case: Case) -> str | None:
    return stream_violation(
        case.strategy.sharding, whole_stream=case.whole_stream, mixing=case.mixing
    )


def _batch_norm(case: Case) -> str | None:
    return batch_norm_violation(case.strategy, case.batch_norm_values)


def _experts(case: Case) -> str | None:
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


def _stages_named(case: Case) -> str | None:
    strategy = case.strategy
    mesh = strategy.mesh
    if (mesh.pp > 1 or mesh.tp > 1) and not strategy.stages:
        return (
            f"pp={mesh.pp}, tp={mesh.tp} without stages; name the modules of each "
            f"of the {mesh.pp * strategy.virtual_stages} stages"
        )
    return None


def _one_process_one_stage(case: Case) -> str | None:
    strategy = case.strategy
    virtual = strategy.virtual_stages
    if strategy.mesh.pp == 1 and virtual > 1:
        return f"virtual_stages={virtual} without a pipeline; use 1, or pp > 1"
    return None


def _schedule(case: Case) -> str | None:
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


def _v_on_gloo(case: Case) -> str | None:
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


def _split_backward(case: Case) -> str | None:
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


#: Dtypes in which few methods but plain steps are run, and why.
_IN_PLAIN_STEPS = {
    "float16": "whose steps do not scale the loss",
    "float8": "whose layers are not those that torchao casts",
}


def _precision(case: Case) -> str | None:
    strategy = case.strategy
    precision = strategy.precision
    if precision.compute == "float8" and case.experts:
        return (
            f"compute=float8 of {case.experts} experts, whose products are no linear "
            f"layers that torchao casts; use bfloat16"
        )
    if precision.compute == "float8" and strategy.mesh.tp > 1:
        return (
            f"compute=float8 with tp={strategy.mesh.tp}, which splits layers that "
            f"torchao casts whole; use tp=1 or bfloat16"
        )
    if precision.compute == "float16" and precision.parameter != "float32":
        return (
            f"compute=float16 with parameter={precision.parameter}; use float32 "
            f"for weights"
        )
    why = _IN_PLAIN_STEPS.get(precision.compute)
    for slot in methods.slots() if why else ():
        value = getattr(strategy, slot)
        if not methods.runs_in(slot, value, precision.compute):
            return (
                f"compute={precision.compute} with {slot}={value}, {why}; use bfloat16"
            )
    if precision.parameter == "bfloat16" and precision.compute == "float32":
        return "compute=float32 of bfloat16 parameters; use bfloat16 for both"
    if strategy.optimizer.state_dtype != precision.parameter:
        return (
            f"state_dtype={strategy.optimizer.state_dtype} with "
            f"parameter={precision.parameter}; torch's optimizers keep states as they "
            f"keep parameters, use {precision.parameter} for both"
        )
    return None


def _loss(case: Case) -> str | None:
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


def _overlap(case: Case) -> str | None:
    """Require that overlap settings have an effect where they are set."""
    strategy, mesh = case.strategy, case.strategy.mesh
    overlap = strategy.overlap
    sharded = strategy.zero_stage > 0 and mesh.shards > 1
    if overlap.forward_prefetch is not None and not sharded:
        return (
            f"overlap.forward_prefetch={overlap.forward_prefetch} without ZeRO; no "
            f"weights are gathered, leave it out or use zero_stage above 0 with "
            f"dp_shard or cp > 1"
        )
    if overlap.backward_prefetch is not None and not (
        sharded and strategy.zero_stage == 3
    ):
        return (
            f"overlap.backward_prefetch={overlap.backward_prefetch} with "
            f"zero_stage={strategy.zero_stage}; backward gathers weights under ZeRO 3 "
            f"alone, leave it out or use zero_stage=3"
        )
    if overlap.bucket_bytes is None:
        return None
    if not (strategy.replicas_by_ddp or strategy.uses_own_buckets):
        return (
            f"overlap.bucket_bytes={overlap.bucket_bytes} with {strategy.label()}; "
            f"buckets are for plain replicas in one precision (pp=1, tp=1, no ZeRO), "
            f"each unit is one elsewhere, leave it out"
        )
    return None


def boundary_violation(boundary: str, pp: int, tp: int) -> str | None:
    """Why messages between stages cannot be scattered; None if they can.

    Args:
        boundary: As ``communication.boundary``.
        pp: Pipeline degree.
        tp: Tensor parallel degree.
    """
    if boundary == "direct" or (pp > 1 and tp > 1):
        return None
    lacks = "no stages" if pp == 1 else "no ranks that hold the same"
    axis = f"pp={pp}" if pp == 1 else f"tp={tp}"
    return (
        f"communication.boundary={boundary} with {axis}; there are {lacks} to "
        f"{'send between' if pp == 1 else 'share a message'}, use direct, or pp > 1 "
        f"and tp > 1"
    )


def _boundary(case: Case) -> str | None:
    strategy = case.strategy
    return boundary_violation(
        strategy.communication.boundary, strategy.mesh.pp, strategy.mesh.tp
    )


def _summed(case: Case) -> str | None:
    strategy = case.strategy
    if not strategy.replicas_by_table:
        return None
    name = strategy.communication.replicas.algorithm
    asked = f"communication.replicas.algorithm={name}"
    copies = strategy.copies
    if not strategy.may_sum_by_table:
        return (
            f"{asked} with {strategy.label()}; it sums gradients over dp_replicate "
            f"(with cp, where nothing is sharded) in every step, of float32 weights "
            f"and reductions; use library, or dp_replicate > 1"
        )
    if strategy.gradient_compression != "none":
        return (
            f"{asked} with gradient_compression={strategy.gradient_compression}; a "
            f"codec has messages of its own, use library, or no compression"
        )
    try:
        strategy.communication.replicas.table(copies)
    except StrategyError as error:
        return str(error)
    return None


def shards_violation(
    shards: ShardTraffic, pp: int, zero_stage: int, ways: int, *, plain: bool
) -> str | None:
    """Why ranks cannot send weights and gradients as is asked for; None if they can.

    Args:
        shards: As ``communication.shards``.
        pp: Pipeline degree.
        zero_stage: ZeRO's stage.
        ways: Of dp_shard times that of cp.
        plain: Whether copies are kept alike in every step.
    """
    if shards == ShardTraffic():
        return None
    asked = f"communication.shards of {shards}"
    if zero_stage != 3 or ways == 1 or pp > 1 or not plain:
        return (
            f"{asked} with zero_stage={zero_stage} over {ways} ranks and pp={pp}; they "
            f"are for weights that ZeRO gathers for each unit, use zero_stage=3 with "
            f"dp_shard > 1, pp=1 and synchronisation=all_reduce, or leave them out"
        )
    if ways % shards.second_copy:
        return (
            f"{asked}: second_copy={shards.second_copy} does not divide the {ways} "
            f"ranks of dp_shard x cp; use a divisor, such as the devices of a host"
        )
    return None


def _shard_traffic(case: Case) -> str | None:
    """Refuse ZeRO++, which DeepSpeed alone runs."""
    shards = case.strategy.communication.shards
    if shards == ShardTraffic():
        return None
    return (
        f"communication.shards of {shards} are DeepSpeed's ZeRO++, which is priced and "
        f"exported to it, and does not run here; leave communication.shards out"
    )


def _bucket_order(case: Case) -> str | None:
    """Require that weights can be updated bucket by bucket where a plan says so."""
    strategy = case.strategy
    if strategy.communication.buckets == "filled":
        return None
    asked = f"communication.buckets={strategy.communication.buckets}"
    coded = strategy.gradient_compression != "none"
    if coded or not (strategy.uses_own_buckets and strategy.replicas_by_table):
        return (
            f"{asked} with {strategy.label()}; weights are updated bucket by bucket in "
            f"plain replicas (pp=1, tp=1, no ZeRO) whose sums are messages of our own, "
            f"without a codec, use filled, or communication.replicas.algorithm=ring"
        )
    kind = strategy.optimizer.name
    fields = type(strategy).model_fields
    lacks = {
        f"grad_clip_norm={strategy.grad_clip_norm}, which needs all sums before any "
        f"weight changes": strategy.grad_clip_norm is not None,
        "compute=float16, whose loss scale needs all sums before any weight changes": (
            strategy.precision.compute == "float16"
        ),
        f"optimizer {kind}, which does not update each number by itself": (
            not OPTIMIZERS[kind].elementwise
        ),
        f"offload={strategy.offload}, whose weights the host updates together": bool(
            strategy.offload
        ),
        "compile=True, whose blocks cannot wait for a sum where they begin": (
            strategy.compile
        ),
        **{
            f"{slot}={getattr(strategy, slot)}, which has a step of its own": (
                getattr(strategy, slot)
                != fields[slot].get_default(call_default_factory=True)
            )
            for slot in ("synchronisation", "asynchrony", "learning")
        },
    }
    for what, there in lacks.items():
        if there:
            return f"{asked} with {what}; use communication.buckets=filled"
    return None


def _compiled(case: Case) -> str | None:
    strategy = case.strategy
    if not strategy.compile:
        return None
    if not strategy.stages:
        return (
            "compile=True without stages; name the modules of the one stage, whose "
            "blocks are compiled"
        )
    if strategy.mesh.tp > 1:
        return (
            f"compile=True with tp={strategy.mesh.tp}; compiled code was seen to give "
            f"wrong numbers around the sums of tp, use compile=False or tp=1"
        )
    if strategy.mesh.ep > 1:
        return (
            f"compile=True with ep={strategy.mesh.ep}; experts get another number of "
            f"tokens each step, for which code would be made anew, use compile=False "
            f"or ep=1"
        )
    if strategy.mesh.pp > 1 and strategy.schedule_spec.splits_backward:
        return (
            f"compile=True with {strategy.schedule}; a compiled block computes all "
            f"gradients at once and would compute them twice, use compile=False or 1F1B"
        )
    return None


def _chunked(case: Case) -> str | None:
    strategy = case.strategy
    if strategy.loss_chunks == 1:
        return None
    shown = f"loss_chunks={strategy.loss_chunks}"
    if not strategy.stages:
        return (
            f"{shown} without stages; name the modules of the one stage, whose last "
            f"makes the logits"
        )
    if strategy.mesh.pp > 1 and strategy.schedule_spec.splits_backward:
        return (
            f"{shown} with {strategy.schedule}; the last layer computes all gradients "
            f"at once and would compute them twice, use loss_chunks=1 or 1F1B"
        )
    for slot in ("learning", "asynchrony", "synchronisation"):
        value = getattr(strategy, slot)
        if value != methods.default_value(slot):
            return (
                f"{shown} with {slot}={value}, with which it was not tried; use "
                f"loss_chunks=1"
            )
    return None


def offload_violation(
    offload: Offload, pp: int, zero_stage: int, shards: int
) -> str | None:
    """Why tensors cannot lie in the host's memory; None if they can.

    Args:
        offload: Which.
        pp: Pipeline degree.
        zero_stage: ZeRO's stage.
        shards: Devices that ZeRO shards over.
    """
    if offload.states != "parameters":
        return None
    if pp > 1:
        return (
            f"offload.states=parameters with pp={pp}; a stage would wait for its "
            f"weights with every microbatch, use optimizer, or pp=1"
        )
    if zero_stage == 0 or shards == 1:
        return (
            f"offload.states=parameters with zero_stage={zero_stage} over {shards} "
            f"devices; weights come to a device as ZeRO gathers them, use optimizer, "
            f"or zero_stage=3 with dp_shard or cp > 1"
        )
    return None


def _offloaded(case: Case) -> str | None:
    strategy, offload = case.strategy, case.strategy.offload
    if not offload:
        return None
    for slot in methods.slots():
        value = getattr(strategy, slot)
        if value != methods.default_value(slot):
            return (
                f"offload={offload} with {slot}={value}, with which it was not tried; "
                f"use offload=none"
            )
    if offload.states == "parameters" and strategy.precision.compute == "float16":
        return (
            "offload.states=parameters with compute=float16, whose gradients are "
            "scaled on the device; use bfloat16, or optimizer"
        )
    if offload.activations and not strategy.stages:
        return (
            "offload.activations without stages; name the modules of the one stage, "
            "each of which begins its recomputation with what is offloaded"
        )
    kinds = {stage.recompute for stage in strategy.stages}
    if offload.activations and kinds != {"full"}:
        return (
            f"offload.activations with recompute={', '.join(sorted(kinds))}; what is "
            f"offloaded is what recomputation begins with, use recompute=full"
        )
    if offload.activations and strategy.compile:
        return (
            "offload.activations with compile=True; compiled blocks save what no hook "
            "sees, use one of the two"
        )
    splits = strategy.mesh.pp > 1 and strategy.schedule_spec.splits_backward
    if offload.activations and splits:
        return (
            f"offload.activations with {strategy.schedule}; a split backward reads "
            f"them twice, use 1F1B"
        )
    mesh = strategy.mesh
    return offload_violation(offload, mesh.pp, strategy.zero_stage, mesh.shards)


def _patterns(case: Case) -> str | None:
    strategy = case.strategy
    sharding = strategy.sharding
    if strategy.mesh.tp > 1 and not sharding.patterns:
        return (
            f"tp={strategy.mesh.tp} without patterns to shard by; add them to "
            f"sharding.patterns or use tp=1"
        )
    return None


def _tied(case: Case) -> str | None:
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


#: Optimizers whose states methods divide, keep apart and hand on.
_KNOWN_STATES = ("AdamW", "Adam", "SGD")


def whole_violation(name: str, shards: int, tp: int, ep: int) -> str | None:
    """Why an optimizer cannot update parts of tensors; None if it can, or has none.

    Args:
        name: Of the optimizer.
        shards: Devices that ZeRO divides tensors over.
        tp: Degree; likewise ep.
    """
    if not OPTIMIZERS[name].whole or shards == tp == ep == 1:
        return None
    axis = "ZeRO" if shards > 1 else f"tp={tp}" if tp > 1 else f"ep={ep}"
    return (
        f"optimizer={name} with {axis}; it keeps sums and scales of whole tensors, of "
        f"which a rank has a part, use AdamW, or dp_replicate or pp"
    )


def _optimizer(case: Case) -> str | None:
    strategy = case.strategy
    name, ema = strategy.optimizer.name, strategy.optimizer.ema
    if ema is not None and strategy.precision.parameter != "float32":
        return (
            f"ema={ema} with parameter={strategy.precision.parameter}, in which a "
            f"step's part of an average is lost in rounding; use float32 or ema=None"
        )
    kind, mesh = OPTIMIZERS[name], strategy.mesh
    if not kind.elementwise and strategy.offload.states != "none":
        return (
            f"optimizer={name} with offload.states={strategy.offload.states}; the host "
            f"updates numbers one by one, use AdamW, or offload=none"
        )
    violation = whole_violation(
        name, mesh.shards if strategy.zero_stage else 1, mesh.tp, mesh.ep
    )
    if violation is not None:
        return violation
    if name in _KNOWN_STATES and ema is None:
        return None
    for slot in methods.slots():
        value = getattr(strategy, slot)
        # Stages of their own have whole optimizers of their own.
        if slot != "asynchrony" and value != methods.default_value(slot):
            if ema is not None:
                return (
                    f"ema={ema} with {slot}={value}, which knows nothing of averages "
                    f"of the weights; use ema=None"
                )
            return (
                f"optimizer={name} with {slot}={value}, which knows the states of "
                f"{', '.join(_KNOWN_STATES)}; use one of these"
            )
    return None


_RULES: tuple[Callable[[Case], str | None], ...] = (
    _context,
    _stream,
    _batch_norm,
    _experts,
    _stages_named,
    _one_process_one_stage,
    _schedule,
    _v_on_gloo,
    _split_backward,
    _precision,
    _loss,
    _optimizer,
    _overlap,
    _boundary,
    _summed,
    _bucket_order,
    _shard_traffic,
    _compiled,
    _chunked,
    _offloaded,
    _patterns,
    _tied,
)
