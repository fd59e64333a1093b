"""Weights that several pipeline stages share, of which each stage has a copy.

Each stage trains its own copy. The gradients of the copies are summed over the pp ranks
that hold one, so that equal optimizer steps keep the copies equal.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from executors.mesh import ProcessMesh
from planner.schema import Strategy

__all__ = ["TiedCopies", "TiedSync", "find_copies", "untie"]


@dataclass(frozen=True, kw_only=True)
class TiedCopies:
    """One parameter that several stages use.

    Attributes:
        names: Its first FQN on each stage that has it, by stage index.
    """

    names: Mapping[int, str]


def find_copies(stages: Sequence[nn.Module]) -> tuple[TiedCopies, ...]:
    """Parameters that more than one of all the stages of a model hold.

    Args:
        stages: All of them, before any is changed; index is position.
    """
    places: dict[int, dict[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            places.setdefault(id(parameter), {})[index] = name
    return tuple(TiedCopies(names=p) for p in places.values() if len(p) > 1)


def untie(stages: Mapping[int, nn.Module], copies: Sequence[TiedCopies]) -> None:
    """Give each local stage but the first a copy of its own, in place.

    Two stages of one rank would otherwise shard one tensor twice. Of modules that
    stages share, too, each stage but the first gets its own.

    Args:
        stages: Local stages by index.
        copies: From :func:`find_copies`.
    """
    seen: set[nn.Module] = set()
    for index in sorted(stages):
        _part_from(stages[index], seen)
        seen.update(stages[index].modules())
    for tied in copies:
        local = [index for index in sorted(tied.names) if index in stages]
        for index in local[1:]:
            stage = stages[index]
            old = stage.get_parameter(tied.names[index])
            new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
            for module in stage.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if parameter is old:
                        module.register_parameter(name, new)


def _part_from(module: nn.Module, others: Set[nn.Module]) -> None:
    """Replace what a module holds of others by copies with the same tensors."""
    for name, child in module._modules.items():
        if child is None:
            continue
        if child in others:
            child = module._modules[name] = copy.copy(child)
            for held in ("_parameters", "_buffers", "_modules"):
                setattr(child, held, dict(getattr(child, held)))
        _part_from(child, others)


class TiedSync:
    """Sums the gradients of copies over the stages that hold them.

    Building one is collective: every rank of the world must do it, with equal
    arguments but for ``stages``.

    Args:
        copies: Of the whole model.
        stages: Local stages by index, in their final form.
        strategy: Tells which pp rank holds which stage.
        place: Where this process stands.
    """

    def __init__(
        self,
        copies: Sequence[TiedCopies],
        stages: Mapping[int, nn.Module],
        strategy: Strategy,
        place: ProcessMesh,
    ) -> None:
        #: Local copies of each weight, and the group of the ranks that have some.
        self.sets: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]] = []
        for tied in copies:
            holders = sorted({strategy.rank_of_stage(index) for index in tied.names})
            group = _group_over(holders, place)
            local = [
                stages[index].get_parameter(name)
                for index, name in sorted(tied.names.items())
                if index in stages
            ]
            if local:
                self.sets.append((local, group))
        #: ids of local copies that another copy, here or elsewhere, stands for.
        self.extra: frozenset[int] = frozenset(
            id(stages[index].get_parameter(name))
            for tied in copies
            for index, name in sorted(tied.names.items())[1:]
            if index in stages
        )

    def sum_gradients(self) -> None:
        """Make every copy's gradient the sum over all copies, in place."""
        for parameters, group in self.sets:
            grads = [_local_grad(parameter) for parameter in parameters]
            total = torch.stack(grads).sum(0) if len(grads) > 1 else grads[0].clone()
            if group is not None:
                dist.all_reduce(total, group=group)
            for grad in grads:
                grad.copy_(total)


def _local_grad(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        # Never read in this step: its share of the sum is zero.
        parameter.grad = torch.zeros_like(parameter)
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _group_over(holders: Sequence[int], place: ProcessMesh) -> dist.ProcessGroup | None:
    """Group of the pp ranks ``holders`` at this process's other coordinates."""
    if len(holders) == 1:
        return None
    mine = None
    stride = place.plan.stride("pp")
    for offset in range(stride):
        # new_group is collective over the world: every rank makes every group.
        ranks = [pp * stride + offset for pp in holders]
        group = dist.new_group(ranks)
        if place.rank in ranks:
            mine = group
    return mine
