"""Copies that every step keeps equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["AllReduceReplicas"]


class AllReduceReplicas:
    """Copies that every step keeps equal: gradients are reduced over all of them."""

    apart: ClassVar[bool] = False
    phases: ClassVar[Mapping[str, float]] = {"step": 1.0}

    def attach(self, trainer: Trainer) -> None:
        """Do nothing: the wrappers of data parallelism reduce gradients."""

    def before_forward(self, step: int) -> None:
        """Do nothing."""

    def after_update(self, step: int) -> None:
        """Do nothing."""

    def rests(self, done: int) -> bool:
        """Return True: copies are equal after every step."""
        return True

    def state(self) -> Mapping[str, torch.Tensor]:
        """Nothing beside the model."""
        return {}

    def force(self, phase: str | None) -> None:
        """Do nothing: there is one phase."""
