"""Data parallelism of one model part: replicas, ZeRO shards, or neither.

Replicas are DistributedDataParallel's where it can hold them, or in buckets of our own
where a codec compresses their gradients or a send table sums them, else torch's
``replicate``; shards are ``fully_shard``'s, and so are stages and tp parts whose
replicas a send table sums. Whole weights that nothing reduces are cast by
:mod:`executors.strategies.casts`. On GPUs the gather of a unit runs beside the
computation of those before it: more units ahead hide longer gathers, and hold more
weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from executors.communication.buckets import (
    BucketedReplicas,
    Exchange,
    PlainExchange,
)
from executors.communication.tables import ShardSums, TableExchange
from executors.mesh import ProcessMesh
from executors.names import inside, tied_parameters
from executors.strategies.casts import WeightCasts, can_cast_weights, cast_inputs
from executors.strategies.compression import bucket_mb, compress_gradients
from planner.plugins import load_object
from planner.schema import Overlap, Precision, Recompute, Strategy
from planner.schema.methods import MethodValue, method_of, read_method
from planner.schema.nccl import nccl_environment

__all__ = [
    "casts_of_weights",
    "is_whole",
    "make_data_parallel",
    "set_prefetch",
    "sum_shards",
    "sums_by_nccl",
    "wait_for_fewer",
]


def is_whole(parameter: torch.Tensor) -> bool:
    """Return True for scalars, which ``fully_shard`` and ``replicate`` cannot hold.

    They stay plain parameters, and :func:`executors.steps.average_whole` averages
    their gradients.
    """
    return parameter.ndim == 0


def _whole(model: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in model.parameters() if is_whole(parameter)}


def casts_of_weights(
    model: nn.Module,
    strategy: Strategy,
    place: ProcessMesh,
    units: Sequence[str],
    recompute: Recompute,
) -> WeightCasts | None:
    """Casts of a part's weights, to be applied; None if a wrapper casts, or none are.

    A compiler that recomputes part of a block takes other weights for another graph.

    Args:
        model: The model, or one stage of it, split over tp and ep already.
        strategy: Precision, and how replicas are kept equal.
        place: Where this process stands.
        units: FQNs of the part's pipeline units.
        recompute: Of the part.
    """
    if strategy.compile and recompute == "selective":
        return None
    whole = place.size("shard") == 1 and strategy.offload.states != "parameters"
    summed = place.reduces and not (
        strategy.uses_own_buckets and not strategy.shards_by_table
    )
    if not _casts(strategy.precision) or not whole or summed:
        return None
    if strategy.asynchrony.unflushed or not can_cast_weights(model):
        return None
    dtype = _torch_dtype(strategy.precision.activation_dtype)
    return WeightCasts(model, units, dtype)


def make_data_parallel(
    model: nn.Module,
    strategy: Strategy,
    place: ProcessMesh,
    units: Sequence[str],
    experts: Sequence[str],
    fill: Callable[[], None],
    *,
    cast: bool = False,
) -> nn.Module:
    """Make replicas or shards of a part, or neither.

    Args:
        model: The model, or one stage of it, split over tp and ep already.
        strategy: Axes, ZeRO stage, precision, overlap.
        place: Where this process stands.
        units: FQNs of the part's pipeline units, in order of execution.
        experts: FQNs of the modules that hold experts.
        fill: Gives parameters their values; called before DDP looks at them.
        cast: Whether the part casts its weights already.

    Returns:
        The module to call from then on.
    """
    lone = place.size("shard") == 1 and not place.reduces
    if lone and not _casts(strategy.precision):
        return model
    if not any(True for _ in model.parameters()):
        return model
    if cast or (strategy.asynchrony.unflushed and _casts(strategy.precision)):
        # Replicas of asynchronous stages cast the weights that they stash.
        cast_inputs(model, units, _torch_dtype(strategy.precision.activation_dtype))
    if strategy.asynchrony.unflushed or (cast and lone):
        # Those average gradients, too.
        return model
    if _shards_by_table(strategy, place):
        # Of shards of one replica each; a table averages them, see ``sum_shards``.
        _fully_shard(model, strategy, place, units, experts, alone=True)
        return model
    if place.size("shard") > 1 or not place.reduces:
        _fully_shard(model, strategy, place, units, experts)
        return model
    if strategy.uses_own_buckets:
        fill()
        if _casts(strategy.precision) and not cast:
            _fully_shard(model, strategy, place, units, experts, alone=True)
        return _in_own_buckets(model, strategy, place, units)
    if strategy.replicas_by_ddp:
        # It compares and copies values as soon as it is made.
        fill()
        return _wrap_in_ddp(model, strategy, place)
    _replicate(model, strategy.precision, place, units)
    return model


def _compression(strategy: Strategy) -> MethodValue:
    return read_method("gradient_compression", strategy.gradient_compression)


def _in_own_buckets(
    model: nn.Module, strategy: Strategy, place: ProcessMesh, units: Sequence[str]
) -> nn.Module:
    """Make replicas whose gradients a codec compresses, or a send table sums."""
    group = place.group("replicate")
    assert group is not None
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    exchange: Exchange
    if strategy.replicas_by_table and sums_by_nccl(strategy, place.device, group):
        exchange = PlainExchange()
    elif strategy.replicas_by_table:
        exchange = TableExchange(strategy.communication.replicas.table(group.size()))
    else:
        codec = _compression(strategy)
        method = method_of("gradient_compression", codec)
        assert method.runs is not None
        exchange = load_object(method.runs)(codec)
    return BucketedReplicas(
        model,
        group,
        exchange,
        strategy.overlap.bucket_bytes,
        needed_first=strategy.communication.buckets == "needed",
        units=[model.get_submodule(unit) for unit in _wrapped_units(model, units)],
    )


def _shards_by_table(strategy: Strategy, place: ProcessMesh) -> bool:
    """Return True if a table, and not NCCL, sums what shards reduce; collective."""
    if not (strategy.shards_by_table and place.reduces):
        return False
    group = place.group("replicate")
    assert group is not None
    return not sums_by_nccl(strategy, place.device, group)


def _backend(group: dist.ProcessGroup) -> str:
    return str(dist.get_backend(group))


def sums_by_nccl(
    strategy: Strategy, device: torch.device, group: dist.ProcessGroup
) -> bool:
    """Return True if NCCL itself sums as a strategy says, on all ranks of a group.

    It does where the variables that name its algorithm have been set before groups were
    made, see :func:`executors.launching.process_group.process_group`. Collective.

    Args:
        strategy: With an algorithm for the sums of replicas.
        device: Of this process.
        group: Replicas.
    """
    wanted = nccl_environment(strategy)
    if _backend(group) != "nccl" or not wanted:
        return False
    here = all(os.environ.get(name) == value for name, value in wanted.items())
    told = torch.tensor(int(here), device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MIN, group=group)
    return bool(told)


def sum_shards(
    model: nn.Module, strategy: Strategy, place: ProcessMesh
) -> ShardSums | None:
    """Let a send table average what a part's shards reduce over its replicas, if asked.

    Args:
        model: After :func:`make_data_parallel`.
        strategy: As there.
        place: The same.
    """
    if not _shards_by_table(strategy, place):
        return None
    group = place.group("replicate")
    assert group is not None
    sums = ShardSums(strategy.communication.replicas.table(group.size()), group)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sums.attach(module)
    return sums


def wait_for_fewer(
    replicas: DistributedDataParallel,
    loss: torch.Tensor,
    strategy: Strategy,
    place: ProcessMesh,
) -> DistributedDataParallel | None:
    """Replicas that do without gradients of parameters that a loss does not depend on.

    Looking for those takes time in each step, so that it is not done without need.

    Args:
        replicas: Whose loss it is.
        loss: Before its backward.
        strategy: As in :func:`make_data_parallel`.
        place: The same.

    Returns:
        New replicas, for another forward; None if the loss of each rank depends on all
        that is trained. Collective.
    """
    reached = _parameters_behind(loss)
    fewer = any(
        parameter.requires_grad and id(parameter) not in reached
        for parameter in replicas.module.parameters()
    )
    told = torch.tensor(int(fewer), device=place.device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=place.group("replicate"))
    if not told:
        return None
    return _wrap_in_ddp(replicas.module, strategy, place, looks=True)


def _parameters_behind(loss: torch.Tensor) -> set[int]:
    """Ids of the leaves that a loss depends on."""
    waiting, seen, leaves = [loss.grad_fn], set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        waiting += [following for following, _ in node.next_functions]
    return leaves


def _wrap_in_ddp(
    model: nn.Module, strategy: Strategy, place: ProcessMesh, *, looks: bool = False
) -> DistributedDataParallel:
    """Make replicas; ``looks`` for parameters without a gradient in each step."""
    group = place.group("replicate")
    assert group is not None
    wrapped = DistributedDataParallel(
        model,
        process_group=group,
        find_unused_parameters=looks,
        # Gradients that are views of the buckets take their memory once.
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb(strategy),
    )
    compress_gradients(wrapped, strategy.gradient_compression, group)
    return wrapped


def _replicate(
    model: nn.Module, precision: Precision, place: ProcessMesh, units: Sequence[str]
) -> None:
    """Replicate where DDP cannot: batch norms, then units, then what is left."""
    mesh, policy = place.along("replicate"), _mixed_precision(precision)
    whole = _whole(model)
    for norm in _uncast_norms(model, precision):
        replicate(norm, mesh=mesh, mp_policy=_uncast(precision))
    for unit in _wrapped_units(model, units):
        part = model.get_submodule(unit)
        replicate(part, mesh=mesh, mp_policy=policy, ignored_params=whole)
    replicate(model, mesh=mesh, mp_policy=policy, ignored_params=whole)


def _fully_shard(
    model: nn.Module,
    strategy: Strategy,
    place: ProcessMesh,
    units: Sequence[str],
    experts: Sequence[str],
    *,
    alone: bool = False,
) -> None:
    """Apply ZeRO to experts, then batch norms, then units, then what is left.

    Replicas reduce nothing where each is ``alone``.
    """
    precision, reshard = strategy.precision, strategy.zero_stage == 3
    policy, lying = _mixed_precision(precision), _offload(strategy, place)
    outer = ("replicate",) if place.reduces and not alone else ()
    for fqn in experts:
        fully_shard(
            model.get_submodule(fqn),
            mesh=place.along(*outer, "expert_shard"),
            mp_policy=policy,
            reshard_after_forward=reshard,
            offload_policy=lying,
            shard_placement_fn=partial(_place_shard, place.size("expert_shard")),
        )
    mesh = place.along(*outer, "shard")
    norms, named = _uncast_norms(model, precision), _wrapped_units(model, units)
    parts = [(norm, _uncast(precision)) for norm in norms]
    parts += [(model.get_submodule(unit), policy) for unit in named]
    whole = _whole(model)
    for part, casting in (*parts, (model, policy)):
        fully_shard(
            part,
            mesh=mesh,
            mp_policy=casting,
            reshard_after_forward=reshard,
            offload_policy=lying,
            shard_placement_fn=partial(_place_shard, place.size("shard")),
            ignored_params=whole,
        )
    set_prefetch(model, named, experts, strategy.overlap)


def _offload(strategy: Strategy, place: ProcessMesh) -> OffloadPolicy:
    """Policy of weights and gradients while nothing is computed with them."""
    if strategy.offload.states != "parameters":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=place.device.type == "cuda")


def _casts(precision: Precision) -> bool:
    """Return True if compute casts parameters to another dtype."""
    return precision.activation_dtype != precision.parameter


def _mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=(
            _torch_dtype(precision.activation_dtype) if _casts(precision) else None
        ),
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


def _place_shard(ways: int, parameter: nn.Parameter) -> Shard | None:
    """Place shards of few rows along another dimension, so that no rank is empty.

    Rows are padded to a multiple of the ranks: 8 experts on 64 ranks to 64.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.shape[0] >= ways:
        return None
    dims = (dim for dim in range(1, local.ndim) if local.shape[dim] % ways == 0)
    return next((Shard(dim) for dim in dims), None)


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


def set_prefetch(
    model: nn.Module, units: Sequence[str], experts: Sequence[str], overlap: Overlap
) -> None:
    """Set the units that each unit gathers while it is computed.

    Args:
        model: The model, or one stage of it, after ``fully_shard``.
        units: FQNs of the units that are sharded on their own, in order of execution.
        experts: FQNs of modules within them that are sharded on their own, too, and
            gathered along with the unit around them.
        overlap: How many units ahead; None leaves torch's own order.
    """
    groups = [
        [unit, *(expert for expert in experts if inside(expert, unit))]
        for unit in units
    ]
    for index, (unit, *_) in enumerate(groups):
        depth = overlap.forward_prefetch
        if depth is not None:
            ahead = groups[index + 1 : index + 1 + depth]
            _sharded(model, unit).set_modules_to_forward_prefetch(
                [_sharded(model, name) for group in ahead for name in group]
            )
        depth = overlap.backward_prefetch
        if depth is not None:
            behind = groups[max(0, index - depth) : index][::-1]
            _sharded(model, unit).set_modules_to_backward_prefetch(
                [_sharded(model, name) for group in behind for name in group]
            )


def _sharded(model: nn.Module, name: str) -> FSDPModule:
    module = model.get_submodule(name)
    assert isinstance(module, FSDPModule)
    return module


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
