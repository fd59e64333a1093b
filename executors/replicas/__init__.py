"""Agreement between replicas: what happens to copies of the weights around a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from executors.replicas.all_reduce import AllReduceReplicas
from planner.schema import Strategy

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["Replicas", "replicas_of"]


class Replicas(Protocol):
    """Keeps the copies along ``replicate`` together, or lets them part for a while."""

    @property
    def apart(self) -> bool:
        """True if copies may differ between exchanges.

        Then no step reduces anything over ``replicate``, and the loss between
        exchanges is the copy's own.
        """

    @property
    def phases(self) -> Mapping[str, float]:
        """Kinds of step that differ in time, memory or traffic, and their shares.

        Shares of all steps, by name of the phase; their sum is 1.
        """

    def attach(self, trainer: Trainer) -> None:
        """Take parameters and groups of a complete trainer; collective, once.

        The trainer itself is not kept: a circle would keep DDP's reducer alive longer
        than its group.
        """

    def before_forward(self, step: int) -> None:
        """Act before a step; collective.

        Args:
            step: Number of the step, from 0.
        """

    def after_update(self, step: int) -> None:
        """Act after the optimizer's step; collective."""

    def rests(self, done: int) -> bool:
        """Return True if all copies are equal after so many steps."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """This rank's tensors, by name, that a checkpoint must hold beside the model.

        A resumed run fills them in place.
        """

    def force(self, phase: str | None) -> None:
        """Make every step one of a phase, to measure it; None ends that.

        Args:
            phase: One of :attr:`phases`.
        """


def replicas_of(strategy: Strategy) -> Replicas:  # noqa: ARG001
    """Make the keeper of a strategy's copies."""
    return AllReduceReplicas()
