"""Copies that every step keeps equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from planner.schema.methods import Synchronisation

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["AllReduceReplicas"]


class AllReduceReplicas:
    """Does nothing: wrappers of data parallelism reduce gradients over all copies.

    Args:
        synchronisation: All-reduce, which has no settings.
    """

    rests_every = 1
    lead_in = 0

    def __init__(self, synchronisation: Synchronisation) -> None:
        (self._phase,) = synchronisation.phases

    def attach(self, trainer: Trainer) -> None:
        """Do nothing."""

    def before_forward(self, step: int) -> None:
        """Do nothing."""

    def after_backward(self, step: int) -> None:
        """Do nothing."""

    def after_update(self, step: int) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing: every step ends with what it began."""

    def rests(self, done: int) -> bool:
        """Return True: every step ends with what it began."""
        return True

    def meets(self, done: int) -> bool:
        """Return True: every step ends with the loss of all copies."""
        return True

    def in_sync(self, done: int) -> bool:
        """Return True: copies are equal after every step."""
        return True

    def state(self) -> Mapping[str, Mapping[nn.Parameter, torch.Tensor]]:
        """Nothing is kept."""
        return {}

    def restored(self, *, complete: bool) -> None:
        """Do nothing."""

    def phase(self, step: int) -> str:
        """Name of the one phase that there is."""
        return self._phase

    def force(self, phase: str | None) -> None:
        """Do nothing: every step is of the one phase."""
