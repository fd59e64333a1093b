"""Numbers of a run that must be finite, and weights that ranks must agree on.

Copies of a weight are compared by sums over its bits, one message an axis: replicas of
data parallelism, what tp leaves whole, and tied weights of a pipeline.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from executors.replicas import (
    HoldingReplicas,
    SkippingReplicas,
    SplitReplicas,
    skipped_parameters,
)
from executors.trainer import StepResult, Trainer
from planner.errors import ExecutionError, NonFiniteError

__all__ = ["require_finite_step", "require_sound_weights"]

_DIVERGED = "lower the learning rate or set grad_clip_norm"
_PARTED = "look for a faulty device, or for code of the model that depends on the rank"

_LOG = logging.getLogger(__name__)

#: Axes of experts, and of all other parameters, along which there can be copies.
_EXPERTS, _OTHERS = ("expert_shard", "ep"), ("shard", "tp")
_COMMON = ("replicate",)
#: Words of 8 bytes in a row of the table that a tensor's bits are laid out as; factors
#: of what its rows and its columns sum to: one odd, one even, so that their sum is odd.
_COLUMNS, _ROW_FACTOR, _COLUMN_FACTOR = 4096, 0x4F1BBCDCBFA53E0B, 0x85EBCA6A
#: Differences of this share of the largest value are rounding where GPUs compute
#: copies each for itself, along tp: attention adds gradients in an order that varies.
_ROUNDING = 1e-3


def require_finite_step(
    trainer: Trainer, step: int, result: StepResult, remedy: Callable[[str], str]
) -> None:
    """Stop a run that has diverged, before anything of it is saved.

    Collective, but free of messages as long as loss and norm are finite. Gradients are
    looked at only if one is not.

    Args:
        trainer: After the step.
        step: Its number, from 0.
        result: Of the step.
        remedy: Adds to advice where to go on from; collective.

    Raises:
        NonFiniteError: The same on all ranks: what is not finite, the first rank that
            had the loss, the first and last parameters whose gradients are not
            finite, and their ranks.
    """
    # Between exchanges each copy has a norm of its own; the next loss tells.
    norm = None if trainer.place.apart else result.grad_norm
    if math.isfinite(result.loss) and (norm is None or math.isfinite(norm)):
        return
    found: list[tuple[bool, list[str]]] = [(True, [])] * dist.get_world_size()
    mine = math.isfinite(trainer.loss_share), _not_finite(trainer, gradients=True)
    dist.all_gather_object(found, mine)
    if math.isfinite(result.loss):
        said = f"the gradient norm of step {step + 1} is {norm}"
    else:
        finite = [one for one, _ in found]
        # Where every share is finite their sum has overflown.
        where = f" on rank {finite.index(False)}" if False in finite else ""
        said = f"the loss of step {step + 1} is {result.loss}{where}"
    names = list(dict.fromkeys(name for _, some in found for name in some))
    if names:
        ranks = [rank for rank, (_, some) in enumerate(found) if some]
        which = (
            f"the gradient of {names[0]} is"
            if len(names) == 1
            else f"gradients of {len(names)} parameters, from {names[0]} to "
            f"{names[-1]}, are"
        )
        said += f"; {which} not finite on {_shown(ranks)}"
    raise NonFiniteError(f"{said}; {remedy(_DIVERGED)}")


def require_sound_weights(
    trainer: Trainer,
    done: int,
    remedy: Callable[[str], str],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Stop a run whose weights are not finite, or whose copies of them differ.

    Collective. It reads the weights once; while all is well it sends two numbers a
    parameter along each axis that has copies.

    Args:
        trainer: Whose weights.
        done: Steps done.
        remedy: Adds to advice where to go on from; collective.
        group: All ranks, to tell each other by; None for the default one.

    Raises:
        NonFiniteError: The same on all ranks, naming a parameter and a rank.
        ExecutionError: Likewise, if copies differ.
    """
    trainer.replicas.settle()
    found: list[tuple[str | None, str | None]]
    found = [(None, None)] * dist.get_world_size()
    names = _not_finite(trainer, gradients=False)
    mine = f"{names[0]} is not finite" if names else None
    differs = _difference(trainer, done)
    dist.all_gather_object(found, (mine, differs), group=group)
    for rank, (one, other) in enumerate(found):
        if one is not None:
            raise NonFiniteError(
                f"{one} after step {done} on rank {rank}; {remedy(_DIVERGED)}"
            )
        if other is not None:
            raise ExecutionError(f"after step {done} {other}; {remedy(_PARTED)}")


def _not_finite(trainer: Trainer, *, gradients: bool) -> list[str]:
    """Names of parameters of this rank that hold NaN or an infinity, in order."""
    elsewhere = skipped_parameters(trainer.replicas)
    named = [
        (name, parameter.grad if gradients else parameter)
        for name, parameter in trainer.named_parameters()
        if parameter not in elsewhere
    ]
    return [
        name
        for name, tensor in named
        if tensor is not None and not _is_finite(_local(tensor))
    ]


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no value is NaN or infinite, by the fastest op that tells."""
    if not tensor.numel():
        return True
    return all(math.isfinite(bound) for bound in torch.aminmax(tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


# -- Copies ----------------------------------------------------------------------


def _difference(trainer: Trainer, done: int) -> str | None:
    """Describe the first copies that differ among this rank's; None if none do."""
    place = trainer.place
    elsewhere = skipped_parameters(trainer.replicas)
    replicas, found = trainer.replicas, []
    held = replicas.held() if isinstance(replicas, HoldingReplicas) else None
    named = [
        (name, parameter)
        for part in trainer.parts.values()
        for name, parameter in part.inner.named_parameters()
        if parameter not in elsewhere and (held is None or parameter in held)
    ]
    sums = {id(parameter): _bit_sum(parameter) for _, parameter in named}
    own: Collection[nn.Parameter] = ()
    if isinstance(replicas, SplitReplicas):
        own = replicas.split.keys()
    elif isinstance(replicas, SkippingReplicas):
        own = replicas.dealt
    for axis in (*_COMMON, *_OTHERS, *_EXPERTS):
        group = place.group(axis)
        if axis == "replicate" and (held is not None or not replicas.in_sync(done)):
            continue
        chosen = [
            (n, p)
            for n, p in named
            if _has_copies(p, axis) and not (axis == "replicate" and p in own)
        ]
        if group is not None and chosen:
            loose = axis == "tp" and place.device.type == "cuda"
            found.append(
                _compare(chosen, sums, group, f"copies along {axis}", loose=loose)
            )
    names = {id(parameter): name for name, parameter in named}
    for parameters, group in trainer.tied.sets if trainer.tied else ():
        tied = [(names[id(p)], p) for p in parameters]
        found.append(_compare_tied(tied, sums, group))
    return next(filter(None, found), None)


def _has_copies(parameter: nn.Parameter, axis: str) -> bool:
    """Return True if ranks along an axis hold the same part of a parameter."""
    names: Sequence[str] = ()
    split = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        split = {
            name
            for name, placement in zip(names, parameter.placements, strict=True)
            if not placement.is_replicate()
        }
    own = _EXPERTS if set(names) & set(_EXPERTS) else _OTHERS
    return axis in (*_COMMON, *own) and axis not in split


def _bit_sum(parameter: nn.Parameter) -> torch.Tensor:
    """Weighted sum of a local shard's bits, modulo 2**64.

    A change of one value always changes it, an exchange of two almost always.
    """
    local = _local(parameter).contiguous()
    if local.storage_offset() * local.element_size() % 8:
        local = local.clone()
    data = local.view(-1).view(torch.uint8)
    whole = data.numel() // (8 * _COLUMNS) * 8 * _COLUMNS
    total = _weighed(data[whole:].long())
    if whole:
        table = data[:whole].view(torch.int64).view(-1, _COLUMNS)
        total = total + _weighed(table.sum(1)) * _ROW_FACTOR
        total = total + _weighed(table.sum(0)) * _COLUMN_FACTOR
    return total


def _weighed(values: torch.Tensor) -> torch.Tensor:
    """Sum of integers, each times an odd number of its own; it wraps around."""
    return (values * (2 * torch.arange(len(values), device=values.device) + 1)).sum()


def _compare(
    named: Sequence[tuple[str, nn.Parameter]],
    sums: dict[int, torch.Tensor],
    group: dist.ProcessGroup,
    which: str,
    *,
    loose: bool = False,
) -> str | None:
    """Describe the first of a list of parameters that differs within a group."""
    mine = torch.stack([sums[id(parameter)] for _, parameter in named])
    bounds = torch.stack([mine, ~mine])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    for index in (bounds[0] != ~bounds[1]).nonzero().flatten().tolist():
        name, parameter = named[index]
        gap, scale = _gap(parameter, group)
        if loose and gap <= _ROUNDING * scale:
            _LOG.warning("%s of %s differ by %.2g, which is rounding", which, name, gap)
            continue
        ranks = dist.get_process_group_ranks(group)
        every = [0] * len(ranks)
        dist.all_gather_object(every, int(mine[index]), group=group)
        usual = every.index(Counter(every).most_common(1)[0][0])
        others = [r for r, one in zip(ranks, every, strict=True) if one != every[usual]]
        return (
            f"{which} of {name} differ by up to {gap:.2g}: {_shown(others)} with other "
            f"values than rank {ranks[usual]}"
        )
    return None


def _gap(parameter: nn.Parameter, group: dist.ProcessGroup) -> tuple[float, float]:
    """Largest difference within a group, and largest value."""
    local = _local(parameter).float()
    bounds = torch.stack([local, -local])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    return float((bounds[0] + bounds[1]).max()), float(bounds.abs().max())


def _compare_tied(
    named: Sequence[tuple[str, nn.Parameter]],
    sums: dict[int, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> str | None:
    """Describe how copies of one parameter differ between the stages that hold one."""
    name, parameter = named[0]
    found = None
    if group is not None:
        found = _compare([(name, parameter)], sums, group, "copies on several stages")
    if len({int(sums[id(p)]) for _, p in named}) > 1:
        return f"copies of {name} on stages of one rank differ"
    return found


def _shown(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{word} {', '.join(map(str, ranks[:8]))}{more}"
