"""Weights of a member: who holds each, who exchanges it, and how others get it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from executors.checkpoints.snapshot import Inventory
from executors.replicas.pieces import local_part
from executors.trainer import Trainer
from planner.errors import ExecutionError
from planner.schema.federation import assign_owners

__all__ = ["MemberWeights"]


class MemberWeights:
    """Trained weights of one member; building it is collective over its ranks.

    Several ranks hold a weight if they are replicas, hold parts of it, or are stages
    that share it. One of them, its owner, has it whole during an exchange.

    Args:
        trainer: Of this rank.
        inventory: Of the whole model.

    Raises:
        ExecutionError: If a weight is divided in a way that cannot be done again.
    """

    def __init__(self, trainer: Trainer, inventory: Inventory) -> None:
        held: dict[str, list[nn.Parameter]] = {}
        for part in trainer.parts.values():
            for fqn, parameter in part.inner.named_parameters():
                if parameter.requires_grad:
                    held.setdefault(inventory.name(fqn), []).append(parameter)
        self._rank, self._device = dist.get_rank(), trainer.place.device
        every: list[dict[str, int]] = [{}] * dist.get_world_size()
        mine = {n: p[0].numel() * p[0].element_size() for n, p in held.items()}
        dist.all_gather_object(every, mine)
        sizes, holders = {}, {}
        for name in inventory.shapes:
            ranks = [rank for rank, one in enumerate(every) if name in one]
            if ranks:
                sizes[name], holders[name] = every[ranks[0]][name], tuple(ranks)
        #: Names of all trained weights of the model, in an order that all ranks have.
        self.names = tuple(sizes)
        #: Rank that exchanges each.
        self.owners = assign_owners(sizes, holders)
        self._held = {name: held[name] for name in self.names if name in held}
        self._holders = holders
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks_of_one in sorted({h for h in holders.values() if len(h) > 1}):
            # Collective over the member, held by this rank or not.
            group = dist.new_group(list(ranks_of_one))
            if self._rank in ranks_of_one:
                self._groups[ranks_of_one] = group
        self._require_known_division()

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank, every copy of one included."""
        for copies in self._held.values():
            yield from copies

    def whole(
        self, value: Callable[[nn.Parameter], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Put together values that are divided as weights are; collective.

        Args:
            value: Gives this rank's part of the value of a parameter.

        Returns:
            Values of the weights that this rank owns, on the CPU. Shapes [n].
        """
        found = {}
        for name, (first, *_) in self._held.items():
            local = value(first)
            whole = _like(first, local).full_tensor() if _divided(first) else local
            if self.owners[name] == self._rank:
                found[name] = whole.detach().cpu().reshape(-1).clone()
        return found

    def spread(
        self, values: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[list[nn.Parameter], torch.Tensor]]:
        """Hand out what owners have of each weight; collective.

        Args:
            values: Of the weights that this rank owns. Shapes [n].

        Yields:
            Copies of a weight on this rank, and its part of the value.
        """
        for name, copies in self._held.items():
            first, holders = copies[0], self._holders[name]
            if self.owners[name] == self._rank:
                whole = values[name].to(self._device).view(first.shape)
            else:
                whole = torch.empty(first.shape, dtype=first.dtype, device=self._device)
            if len(holders) > 1:
                dist.broadcast(whole, self.owners[name], group=self._groups[holders])
            yield copies, _part(first, whole)

    def _require_known_division(self) -> None:
        for name, (first, *_) in self._held.items():
            if not _divided(first):
                continue
            local = local_part(first)
            again = _part(first, _like(first, local).full_tensor())
            if again.shape != local.shape or not torch.equal(again, local):
                raise ExecutionError(
                    f"{name} is divided over the ranks of a member in an order that "
                    f"cannot be made again from the whole; plan the member with "
                    f"another mesh"
                )


def _divided(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor)


def _like(parameter: nn.Parameter, local: torch.Tensor) -> DTensor:
    """A rank's part of values that are divided as a parameter is."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _part(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Part of a whole tensor that this rank holds of a parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    placed = distribute_tensor(
        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    return placed.to_local().detach()
