"""Gradients of the whole model, by back-propagation."""

from __future__ import annotations

from executors.steps import PlainStep
from planner.schema.methods import Learning

__all__ = ["BackpropagationStep"]


class BackpropagationStep(PlainStep):
    """Plain training; what keeps copies together may put a rule in its place.

    Args:
        learning: Back-propagation, which has no settings.
    """

    def __init__(self, learning: Learning) -> None:
        (self._phase,) = learning.phases

    def phase(self, step: int) -> str:
        """Name of the one phase that there is."""
        return self._phase
