"""Copies that train on their own, and average their weights every few steps.

Averages are of local shards, over the ranks that hold the same one: ZeRO, tensor and
pipeline parallelism inside a copy take no further messages. What the optimizer keeps of
a parameter stays the copy's own. Source: Stich 2019, arXiv 1805.09767.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from planner.schema.methods.local_steps import LocalSteps

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["LocalStepsReplicas"]


class LocalStepsReplicas:
    """Averages the trained weights of all copies every ``period`` steps.

    Args:
        synchronisation: Its settings.
    """

    def __init__(self, synchronisation: LocalSteps) -> None:
        self.sync_every = synchronisation.period
        self._forced: str | None = None
        self._group: dist.ProcessGroup | None = None
        self._trained: list[nn.Parameter] = []

    def attach(self, trainer: Trainer) -> None:
        """Take the weights that are trained."""
        self._group = trainer.place.group("replicate")
        self._trained = [p for p in trainer.all_parameters() if p.requires_grad]

    def before_forward(self, step: int) -> None:
        """Do nothing."""

    def after_update(self, step: int) -> None:
        """Average the weights if the step ends a period."""
        if self._group is None or not self.in_sync(step + 1):
            return
        for piece in _pieces(map(_local, self._trained)):
            mean = torch.cat([weight.reshape(-1) for weight in piece])
            dist.all_reduce(mean, group=self._group)
            mean /= self._group.size()
            parts = torch.split(mean, [weight.numel() for weight in piece])
            for weight, part in zip(piece, parts, strict=True):
                weight.copy_(part.view_as(weight))

    def in_sync(self, done: int) -> bool:
        """Return True at the end of a period, and at its beginning."""
        if self._forced is not None:
            return self._forced == "exchange"
        return done % self.sync_every == 0

    def phase(self, step: int) -> str:
        """Return ``exchange`` for the last step of a period, else ``plain``."""
        return "exchange" if self.in_sync(step + 1) else "plain"

    def force(self, phase: str | None) -> None:
        """See :meth:`executors.replicas.Replicas.force`."""
        self._forced = phase


def _local(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()


def _pieces(weights: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut a list into runs of one dtype and no more bytes than a piece has."""
    piece: list[torch.Tensor] = []
    size = 0
    for weight in weights:
        full = size + weight.nbytes > LocalSteps.PIECE_BYTES
        if piece and (full or weight.dtype != piece[0].dtype):
            yield piece
            piece, size = [], 0
        piece.append(weight)
        size += weight.nbytes
    if piece:
        yield piece
