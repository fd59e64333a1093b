"""Rounds of local steps, at whose ends copies are equal and keep nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from executors.replicas.pieces import local_part, pieces

__all__ = ["Rounds", "average"]


class Rounds:
    """Phases of replicas that train apart for a round, and are whole behind it.

    Args:
        period: Steps of a round.
    """

    lead_in = 0

    def __init__(self, period: int) -> None:
        self.rests_every = period
        self._forced: str | None = None

    def settle(self) -> None:
        """Do nothing: a step ends what it began."""

    def rests(self, done: int) -> bool:
        """Return True at the end of a round."""
        if self._forced is not None:
            return self._forced != "plain"
        return done % self.rests_every == 0

    def meets(self, done: int) -> bool:
        """Return True where it rests."""
        return self.rests(done)

    def in_sync(self, done: int) -> bool:
        """Return True at the end of a round: what all copies hold is equal there."""
        return self.rests(done)

    def state(self) -> Mapping[str, Mapping[nn.Parameter, torch.Tensor]]:
        """Nothing is kept from round to round."""
        return {}

    def phase(self, step: int) -> str:
        """Return ``exchange`` for the last step of a round, else ``plain``."""
        if self._forced is not None:
            return self._forced
        return "exchange" if self.rests(step + 1) else "plain"

    def force(self, phase: str | None) -> None:
        """See :meth:`executors.replicas.Replicas.force`."""
        self._forced = phase


@torch.no_grad()
def average(weights: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Take the mean of weights over copies, in place; collective.

    Args:
        weights: Equal parameters on all copies.
        group: The copies; None for one.
    """
    for piece in pieces(weights) if group is not None else ():
        flat = torch.cat([local_part(weight).reshape(-1) for weight in piece])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        sizes = [local_part(weight).numel() for weight in piece]
        for weight, mean in zip(piece, torch.split(flat, sizes), strict=True):
            local_part(weight).copy_(mean.view_as(local_part(weight)))
