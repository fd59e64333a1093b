"""How one model part becomes parallel, top to bottom.

Tensor parallelism, then experts and context, then compilation and recomputation, then
data parallelism: each wraps what the one before has made, and no other order composes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from executors.deferred.materialize import Shards
from executors.deferred.recording import Recording
from executors.mesh import ProcessMesh
from executors.names import inside, tied_parameters
from executors.strategies.compile import compile_blocks, require_compiler
from executors.strategies.compression import ONE_BUCKET_MB, compress_gradients
from executors.strategies.context import apply_context_parallel
from executors.strategies.experts import shard_experts
from executors.strategies.overlap import set_prefetch
from executors.strategies.recompute import apply_recompute
from executors.strategies.tensor_parallel import apply_tensor_parallel, styles_of_model
from planner.schema import Precision, Recompute, Strategy

__all__ = ["ParallelPart", "parallelize"]


@dataclass(frozen=True, kw_only=True)
class ParallelPart:
    """A model, or one stage of it, ready to train.

    Attributes:
        module: What is called; a DDP wrapper perhaps.
        inner: What holds the parameters under the model's own FQNs.
        units: FQNs of its pipeline units.
        partial: FQNs of parameters whose gradients are still to be summed over tp.
        zero_stage: What dp_shard splits.
    """

    module: nn.Module
    inner: nn.Module
    units: tuple[str, ...]
    partial: frozenset[str]
    zero_stage: int

    def sync_gradients(self, last: bool) -> None:
        """Say whether the next backward is the last of the step.

        ZeRO 2 and 3 reduce-scatter after every microbatch, because whole gradients
        would take the memory that they are chosen to save; the all-reduce over
        replicas waits for the last. ZeRO 2 keeps the gathered weights until then.
        DDP is told by its ``no_sync`` instead.
        """
        if isinstance(self.module, FSDPModule):
            self.module.set_is_last_backward(last)
            self.module.set_requires_gradient_sync(last or self.zero_stage >= 2)
            self.module.set_requires_all_reduce(last)
            self.module.set_reshard_after_backward(last or self.zero_stage == 3)


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    place: ProcessMesh,
    *,
    units: Sequence[str] = (),
    recompute: Recompute = "none",
    causal: bool = True,
    recording: Recording | None = None,
    comes_sharded: bool = False,
    leaves_sharded: bool = False,
) -> ParallelPart:
    """Make a model, or one stage of it, parallel along every axis but pp, in place.

    Args:
        model: Whole parameters, equal on all ranks, or deferred ones.
        strategy: What to do.
        place: Where this process stands.
        units: FQNs of the part's pipeline units, in order of execution.
        recompute: Of this part.
        causal: Whether its attention is, for cp.
        recording: What parameters without values get theirs from, shard by shard.
        comes_sharded: Whether a stage receives a tp shard of the residual stream.
        leaves_sharded: Whether it sends one.

    Raises:
        StrategyError: If tp or ep cannot split a module as the sharding says.
        ExecutionError: If blocks are to be compiled and there is no compiler.
    """
    if strategy.compile:
        require_compiler(place.device)
    dtype = _torch_dtype(strategy.precision.parameter)
    values = Shards(model, recording, place.device, dtype)

    # 1. Tensor and sequence parallelism: patterns of names to shards.
    with values.splitting():
        split = _split_tensors(
            model, strategy, place, units, comes_sharded, leaves_sharded
        )

        # 2. Experts move apart, and tokens to them.
        experts = _split_experts(model, strategy, place)
    values.hollow()

    # 3. Attention over sequences that ranks share.
    context = place.group("cp")
    if context is not None:
        apply_context_parallel(
            model,
            units or ("",),
            context,
            algorithm=strategy.context_algorithm,
            causal=causal,
        )

    # 4. Compilation and recomputation, inside of the all-gathers that data parallelism
    # adds. Code of a block runs again as a whole; which of its ops are kept is for the
    # compiler to arrange.
    if strategy.compile and recompute != "selective":
        compile_blocks(model, units)
    apply_recompute(model, units, recompute)
    if strategy.compile and recompute == "selective":
        compile_blocks(model, units)

    # 5. Data parallelism: experts first, then units, then what is left.
    module = _data_parallel(model, strategy, place, units, experts, values)
    values.fill()
    return ParallelPart(
        module=module,
        inner=model,
        units=tuple(units),
        partial=split,
        zero_stage=strategy.zero_stage,
    )


def _split_tensors(
    model: nn.Module,
    strategy: Strategy,
    place: ProcessMesh,
    units: Sequence[str],
    comes_sharded: bool,
    leaves_sharded: bool,
) -> frozenset[str]:
    """Apply tp; names of parameters whose gradients are then to be summed over it."""
    if place.size("tp") == 1:
        return frozenset()
    head = strategy.stages[-1].modules[-1]
    return apply_tensor_parallel(
        model,
        strategy.sharding,
        place.along("tp"),
        units,
        head=head if strategy.sharding.loss_parallel else None,
        comes_sharded=comes_sharded,
        leaves_sharded=leaves_sharded,
    )


def _split_experts(
    model: nn.Module, strategy: Strategy, place: ProcessMesh
) -> tuple[str, ...]:
    """Apply ep; names of the modules that hold experts."""
    if place.size("ep") == 1:
        return ()
    styles = styles_of_model(model, strategy.sharding)
    experts = tuple(fqn for fqn, style in styles.items() if style == "experts")
    for fqn in experts:
        shard_experts(model.get_submodule(fqn), fqn, place.along("ep"))
    return experts


def _data_parallel(
    model: nn.Module,
    strategy: Strategy,
    place: ProcessMesh,
    units: Sequence[str],
    experts: Sequence[str],
    values: Shards,
) -> nn.Module:
    """Make replicas or shards of a part, or neither; what to call from then on."""
    precision = strategy.precision
    casts = _casts(precision)
    if place.size("shard") == 1 and not place.reduces and not casts:
        return model
    if not any(True for _ in model.parameters()):
        return model
    if place.size("shard") > 1 or not place.reduces:
        _fully_shard(model, strategy, place, units, experts)
        return model
    mixed = place.size("pp") > 1 or place.size("tp") > 1 or casts
    if not mixed and precision.reduce == precision.parameter:
        # It compares and copies values as soon as it is made.
        values.fill()
        return _wrap_in_ddp(model, strategy, place)
    _replicate(model, precision, place, units)
    return model


def _wrap_in_ddp(model: nn.Module, strategy: Strategy, place: ProcessMesh) -> nn.Module:
    group = place.group("replicate")
    assert group is not None
    # Gradients that are views of the buckets take their memory once.
    wrapped = DistributedDataParallel(
        model,
        process_group=group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=_bucket_mb(strategy),
    )
    compress_gradients(wrapped, strategy.gradient_compression, group)
    return wrapped


def _replicate(
    model: nn.Module, precision: Precision, place: ProcessMesh, units: Sequence[str]
) -> None:
    """Replicas where DDP cannot be: batch norms, then units, then what is left."""
    mesh, policy = place.along("replicate"), _mixed_precision(precision)
    for norm in _uncast_norms(model, precision):
        replicate(norm, mesh=mesh, mp_policy=_uncast(precision))
    for unit in _wrapped_units(model, units):
        replicate(model.get_submodule(unit), mesh=mesh, mp_policy=policy)
    replicate(model, mesh=mesh, mp_policy=policy)


def _fully_shard(
    model: nn.Module,
    strategy: Strategy,
    place: ProcessMesh,
    units: Sequence[str],
    experts: Sequence[str],
) -> None:
    """ZeRO: experts first, then batch norms, then units, then what is left."""
    precision, reshard = strategy.precision, strategy.zero_stage == 3
    policy = _mixed_precision(precision)
    outer = ("replicate",) if place.reduces else ()
    for fqn in experts:
        fully_shard(
            model.get_submodule(fqn),
            mesh=place.along(*outer, "expert_shard"),
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=partial(_place_expert, place.size("expert_shard")),
        )
    mesh = place.along(*outer, "shard")
    norms, named = _uncast_norms(model, precision), _wrapped_units(model, units)
    parts = [(norm, _uncast(precision)) for norm in norms]
    parts += [(model.get_submodule(unit), policy) for unit in named]
    for part, casting in (*parts, (model, policy)):
        fully_shard(part, mesh=mesh, mp_policy=casting, reshard_after_forward=reshard)
    set_prefetch(model, named, experts, strategy.overlap)


def _casts(precision: Precision) -> bool:
    """Whether parameters are computed with in another dtype than they are kept in."""
    return precision.compute != precision.parameter


def _mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=_torch_dtype(precision.compute) if _casts(precision) else None,
        reduce_dtype=_torch_dtype(precision.reduce),
    )


def _uncast_norms(model: nn.Module, precision: Precision) -> tuple[nn.Module, ...]:
    """Batch norms that a cast would reach: they take narrow inputs, no narrow weights.

    Their running statistics are kept in full, and torch wants parameters like those.
    """
    if not _casts(precision):
        return ()
    return tuple(
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.affine
    )


def _uncast(precision: Precision) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        reduce_dtype=_torch_dtype(precision.reduce), cast_forward_inputs=False
    )


def _bucket_mb(strategy: Strategy) -> float | None:
    """Size of DDP's buckets in MiB, any fraction of one; None for torch's own."""
    if strategy.gradient_compression == "powersgd":
        return ONE_BUCKET_MB
    size = strategy.overlap.bucket_bytes
    return None if size is None else size / 2**20


def _place_expert(ways: int, parameter: nn.Parameter) -> Shard | None:
    """Shards of few experts are cut along their features: no rank goes empty."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.shape[0] >= ways or local.ndim < 2 or local.shape[1] % ways:
        return None
    return Shard(1)


def _wrapped_units(model: nn.Module, units: Sequence[str]) -> tuple[str, ...]:
    """Units that get collectives of their own; the rest share those of the root.

    Left to the root: units that share a parameter with another one, and units of
    vectors alone (norms), whose collective would cost more latency than it carries.
    """
    tied = {
        unit
        for group in tied_parameters(model)
        for unit in units
        if any(inside(name, unit) for name in group)
        and not all(inside(name, unit) for name in group)
    }
    return tuple(
        unit
        for unit in units
        if unit not in tied
        and any(p.ndim > 1 for p in model.get_submodule(unit).parameters())
    )


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
