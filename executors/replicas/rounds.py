"""Rounds of local steps, at whose ends copies are equal and keep nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

__all__ = ["Rounds"]


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
